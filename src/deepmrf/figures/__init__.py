"""Figures: label maps over images, and what an MRF has learned, drawn from numbers.

overlays      label maps over their image, legends, pictures side by side; by Pillow
drawing       the style of all figures below, and their files, PNG and SVG; by matplotlib
contexts      label compatibility, contextual patterns, the context that won at each pixel
steps         what each layer made of an image, and which pixels changed; scores by stage
window        b12's window at a pixel, and its weights
pages         HTML pages of pictures, with page.css and window.js

The functions of contexts, steps and window take arrays, compute nothing of a model, and return a matplotlib
figure; `drawing.save` writes it.
"""

from deepmrf.figures.overlays import LegendEntry, legend, overlay, pale, panels

__all__ = ["LegendEntry", "legend", "overlay", "pale", "panels"]
