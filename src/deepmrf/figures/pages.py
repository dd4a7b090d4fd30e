"""HTML pages of pictures: files without anything from a network, which open with a double click."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from deepmrf.data.files import Bytes
from deepmrf.figures.window import WindowKernel

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
WINDOW_SCRIPT = Path(__file__).with_name("window.js").read_text(encoding="utf-8")
"""Draws b12's weights at the pixel that was clicked; see `clickable_window`."""


def page(title: str, introduction: str, sections: Iterable[tuple[str, str]], script: str = "") -> str:
    """Return a page with these (heading, HTML) sections. title and headings are plain text; introduction is HTML."""
    body = "".join(f"<h2>{html.escape(heading)}</h2>{content}" for heading, content in sections)
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<meta name='viewport' content='width=device-width,initial-scale=1'><style>{STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><p>{introduction}</p>{body}"
        + (f"<script>{script}</script>" if script else "")
        + "</body></html>\n"
    )


def embedded_figure(png: Path, svg: Path, caption: str) -> str:
    """Return a figure with the PNG inside the page, and links to both files beside it."""
    source = base64.b64encode(png.read_bytes()).decode()
    links = f"<a href='{html.escape(png.name)}'>PNG</a>, <a href='{html.escape(svg.name)}'>SVG</a>"
    return (
        f"<figure><img src='data:image/png;base64,{source}' alt='{html.escape(caption, quote=True)}'>"
        f"<figcaption>{html.escape(caption)} {links}</figcaption></figure>"
    )


def linked_figure(file: str, caption: str) -> str:
    """Return a figure whose picture is a file beside the page."""
    text = html.escape(caption)
    return f"<figure class='wide'><img src='{html.escape(file)}' alt='{text}'><figcaption>{text}</figcaption></figure>"


def clickable_window(image: Bytes, pixel: tuple[int, int], kernel: WindowKernel) -> str:
    """Return the image (H, W, 3) as a picture to click into: WINDOW_SCRIPT then draws b12's weights at that pixel."""
    content = io.BytesIO()
    Image.fromarray(image).save(content, format="PNG")
    source = base64.b64encode(content.getvalue()).decode()
    numbers = html.escape(json.dumps({**vars(kernel), "pixel": pixel}), quote=True)
    return (
        f"<figure class='window wide' data-kernel=\"{numbers}\">"
        f"<img style='display:none' src='data:image/png;base64,{source}' alt=''>"
        "<div class='row'><canvas style='cursor:crosshair;max-width:100%'></canvas><canvas></canvas></div>"
        "<figcaption>Click into the image: b12's window there (yellow), and d(j, z) of the pixels in it; brighter is "
        "larger. <output></output></figcaption></figure>"
    )
