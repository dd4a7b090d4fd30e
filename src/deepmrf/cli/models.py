"""`deepmrf models`: the models to segment with, and what is known of each."""

from __future__ import annotations

import json
import timeit
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from deepmrf.cli import process
from deepmrf.cli.console import Bars, percent, say, sentences, table

if TYPE_CHECKING:
    from deepmrf.data.progress import Progress
    from deepmrf.models.names import ModelSummary

MODELS_HELP = """List the bundled models: classes, scores, size and, with --time, speed on this machine.

Scores are mean intersection over union on validation images, as the model's own config.json tells them. With NAME, a \
bundled model, a folder or OWNER/NAME on the hub, show one model with its labels and colours.

[bold]Examples[/bold]

[cyan]deepmrf models[/cyan]: all bundled models

[cyan]deepmrf models animals[/cyan]: its labels and colours; [cyan]--time[/cyan]: how long a photograph takes

[cyan]deepmrf models runs/mine/model --json[/cyan]: a model of yours, for programs
"""

TIMED_SIDE, TIMED_RUNS = 512, 3
"""The photograph that --time segments is so many pixels a side; the fastest of so many runs counts."""


def models_command(
    name: Annotated[str | None, typer.Argument(show_default="all bundled ones", help="One model to show.")] = None,
    timed: Annotated[bool, typer.Option("--time", help="Measure seconds per photograph of 512 x 512, here.")] = False,
    device: Annotated[
        str | None, typer.Option(show_default="cuda if there is one", help="Where --time computes: cpu or cuda.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """List models."""
    process.prepare()
    console = Console(highlight=False)
    with sentences():
        from deepmrf.models.names import bundled, summarise

        summaries = [summarise(model) for model in (bundled() if name is None else [name])]
        seconds: dict[str, float] = {}
        if timed:
            with Bars(Console(stderr=True)) as bars:
                seconds = _measure(summaries, device, bars.progress("models"))
    if as_json:
        entries = [summary.to_dict() | {"seconds": seconds.get(summary.name)} for summary in summaries]
        typer.echo(json.dumps(entries if name is None else entries[0], indent=1))
    elif name is None:
        _print_all(summaries, seconds, console)
    else:
        _print_one(summaries[0], seconds, console)


def _measure(summaries: list[ModelSummary], device: str | None, progress: Progress) -> dict[str, float]:
    """Seconds per photograph, by the model's name; compiling kernels and reading files are not counted."""
    import numpy as np

    from deepmrf.predict.segmenter import load

    image = np.random.default_rng(0).integers(0, 256, (TIMED_SIDE, TIMED_SIDE, 3), dtype=np.uint8)
    seconds = {}
    for number, summary in enumerate(summaries):
        progress(number, len(summaries))
        segment = partial(load(summary.name, device=device), image, probabilities=False)
        segment()  # compiles kernels
        seconds[summary.name] = min(timeit.repeat(segment, repeat=TIMED_RUNS, number=1))
    return seconds


def _print_all(summaries: list[ModelSummary], seconds: dict[str, float], console: Console) -> None:
    headings = ("model", "classes", "mIoU", "scored on", "MB", *["seconds"] * bool(seconds))
    console.print(table(headings, [_row(summary, seconds) for summary in summaries]))
    names: dict[tuple[str, ...], list[str]] = {}
    for summary in summaries:
        names.setdefault(summary.labels.names, []).append(summary.name)
    for labels, models in names.items():
        say(f"{', '.join(models)}: {', '.join(labels)}.", console)


def _row(summary: ModelSummary, seconds: dict[str, float]) -> list[str]:
    time = [f"{seconds[summary.name]:.2f}"] if summary.name in seconds else []
    return [
        *(summary.name, str(len(summary.labels)), percent(summary.miou), _scored_on(summary)),
        *(f"{summary.bytes / 1e6:.1f}", *time),
    ]


def _scored_on(summary: ModelSummary) -> str:
    images = f"{summary.images} images" if summary.images else ""
    return ", ".join(part for part in (summary.data, images) if part) or "-"


def _print_one(summary: ModelSummary, seconds: dict[str, float], console: Console) -> None:
    say(f"{summary.name}: {summary.folder}, {summary.bytes / 1e6:.1f} MB", console, "bold")
    say(f"network: {summary.network or 'of your own'}; MRF: {summary.mean_field or 'none'}", console)
    if summary.miou is not None:
        alone = summary.miou_network_alone
        without = "" if alone is None else f", {percent(alone)} without the MRF"
        say(f"mIoU: {percent(summary.miou)}{without} ({_scored_on(summary)})", console)
    if summary.name in seconds:
        say(f"seconds per photograph of {TIMED_SIDE} x {TIMED_SIDE}: {seconds[summary.name]:.2f}", console)
    rows: list[list[str | Text]] = []
    for number, (label, colour) in enumerate(zip(summary.labels.names, summary.labels.colours, strict=True)):
        red, green, blue = colour
        swatch = Text("    ", style=f"on rgb({red},{green},{blue})")
        rows.append([label, str(number), percent(summary.iou.get(label)), f"#{red:02x}{green:02x}{blue:02x}", swatch])
    console.print(table(("label", "id", "IoU", "colour", ""), rows))
