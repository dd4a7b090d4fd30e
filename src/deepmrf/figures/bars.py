"""Scores by stage, as bars."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from deepmrf.data.colours import distinct_colours
from deepmrf.figures.drawing import SMALL_POINTS, Figure, add_legend, new_figure, styled


@styled
def stage_bars(scores: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw scores of 0 to 1, {stage: {metric: score}}, as a group of bars for each metric, a bar for each stage.

    Bars begin at zero; the numbers above them are in per cent.
    """
    stages = list(scores)
    metrics = list(scores[stages[0]])
    figure = new_figure(1.9)
    axes = figure.add_subplot()
    colours = np.array(distinct_colours(len(stages)), np.uint8)
    width = 0.8 / len(stages)
    for number, stage in enumerate(stages):
        places = np.arange(len(metrics)) + (number - (len(stages) - 1) / 2) * width
        heights = [100 * scores[stage][metric] for metric in metrics]
        bars = axes.bar(places, heights, 0.92 * width, color=colours[number] / 255, label=stage)
        axes.bar_label(bars, fmt="%.1f", rotation=90, padding=1, fontsize=SMALL_POINTS - 0.5)
    axes.set_xticks(range(len(metrics)), metrics)
    axes.set(ylim=(0, 122), yticks=range(0, 101, 20), ylabel="per cent")
    axes.spines[["top", "right"]].set_visible(False)
    add_legend(figure, stages, colours, columns=4)
    return figure
