"""The style that all figures share, and their files: for a column of a paper, in PNG and SVG, without a display."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from deepmrf.data.extras import optional
from deepmrf.data.writing import replacing

COLUMN_INCHES = 3.5
"""The width of a paper's column."""
DOTS_PER_INCH = 220
SMALL_POINTS = 6.0
"""The smallest letters of a figure."""
FAVOURED_MAP = "RdBu"
"""Penalised is red, favoured is blue, as in the paper; ColorBrewer calls it safe for colour-blind readers."""
STYLE: dict[str, Any] = {
    "font.size": 7.0,
    "axes.titlesize": 7.0,
    "axes.labelsize": 7.0,
    "xtick.labelsize": SMALL_POINTS,
    "ytick.labelsize": SMALL_POINTS,
    "legend.fontsize": SMALL_POINTS,
    "axes.linewidth": 0.5,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.major.size": 2.0,
    "ytick.major.size": 2.0,
    "savefig.pad_inches": 0.02,
    "svg.hashsalt": "deepmrf",
}
LABEL_OPACITY = 0.65
"""Of labels over an image."""
MAX_NAME_LETTERS = 14
"""Longer names of labels are cut."""

Figure = Any
"""A matplotlib.figure.Figure."""
Parameters = ParamSpec("Parameters")


def styled(draw: Callable[Parameters, Figure]) -> Callable[Parameters, Figure]:
    """Let a function draw in this style; where matplotlib is missing, it raises one sentence."""

    @functools.wraps(draw)
    def in_style(*positional: Parameters.args, **named: Parameters.kwargs) -> Figure:
        with optional("matplotlib", "Figures need", "figures").rc_context(STYLE):
            return draw(*positional, **named)

    return in_style


def new_figure(height: float) -> Figure:
    """A figure of a column's width, in inches, that keeps its labels apart; on no screen."""
    return optional("matplotlib.figure", "Figures need", "figures").Figure((COLUMN_INCHES, height), layout="compressed")


def save(figure: Figure, path: Path) -> tuple[Path, Path]:
    """Write `path`.png and `path`.svg, and return both paths."""
    files = path.with_name(f"{path.name}.png"), path.with_name(f"{path.name}.svg")
    with optional("matplotlib", "Figures need", "figures").rc_context(STYLE):
        for file in files:
            with replacing(file) as content:
                figure.savefig(
                    content,
                    format=file.suffix[1:],
                    dpi=DOTS_PER_INCH,
                    bbox_inches="tight",
                    metadata={"Date": None} if file.suffix == ".svg" else None,  # equal figures are equal files
                )
            figure.set_layout_engine("none")  # it is laid out
    return files


def label_name(name: str) -> str:
    """A label's name as matplotlib shows it: "$" stays, and a long name is cut."""
    name = name if len(name) <= MAX_NAME_LETTERS else f"{name[: MAX_NAME_LETTERS - 1]}…"
    return name.replace("$", r"\$")


def show_picture(axes: Any, picture: NDArray[Any], title: str, **options: Any) -> Any:
    """Show an image or a map without ticks."""
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, pad=2)
    return axes.imshow(picture, **options)


def add_legend(figure: Figure, texts: Sequence[str], colours: NDArray[Any], columns: int = 5) -> None:
    """Put a legend below a figure: a text for each colour (N, 3) of 0 .. 255."""
    patch = optional("matplotlib.patches", "Figures need", "figures").Patch
    handles = [
        patch(facecolor=colour / 255, edgecolor="black", linewidth=0.4, label=text)
        for text, colour in zip(texts, np.asarray(colours), strict=True)
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(columns, len(handles)),
        frameon=False,
        handlelength=1.2,
        columnspacing=1.2,
    )


def extent(values: NDArray[Any]) -> float:
    """The largest magnitude that colours tell apart: that of all but two per cent of the values."""
    return float(np.quantile(np.abs(values), 0.98)) or 1.0
