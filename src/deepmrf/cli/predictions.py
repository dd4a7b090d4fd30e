"""`deepmrf fit` and `deepmrf refine`: an MRF for predictions that any network has saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

FIT_HELP = """Learn an MRF for predictions that a network has saved, and say by cross-validation what it gains.

Predictions, images and masks have equal names. Predictions: NAME.npy or .npz (L, H, W), a grey PNG per label
(NAME/ID.png, NAME_ID.png), or a label map NAME.png with an optional NAME_confidence.png. Masks: ids, 255 is void;
a labels.json beside them names the labels.

[bold]Example[/bold]

[cyan]deepmrf fit --predictions predictions --images images --masks masks -o mrf[/cyan]
"""

REFINE_HELP = """Sharpen saved predictions with an MRF, and write label maps as PNG.

[bold]Examples[/bold]

[cyan]deepmrf refine mrf --predictions predictions --images images -o refined[/cyan]: with what deepmrf fit learned.

[cyan]deepmrf refine --preset dense-crf --predictions predictions --images images -o refined[/cyan]: no training.
"""


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A bar that is told (what, done, in all)."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda what, done, whole: progress.update(task, description=what, completed=done, total=whole)


def fit_command(
    predictions: Annotated[Path, typer.Option(help="Folder of the network's predictions.")],
    images: Annotated[Path, typer.Option(help="Folder of the images.")],
    masks: Annotated[Path, typer.Option(help="Folder of the true masks.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the MRF into.")],
    folds: Annotated[int, typer.Option(help="Folds of the cross-validation, by image.")] = 3,
    kernel: Annotated[str, typer.Option(help="gaussian or distance (the paper's).")] = "gaussian",
    window: Annotated[int, typer.Option(help="Side of the triple penalty's window, pixels.")] = 21,
    contexts: Annotated[int, typer.Option(help="Patterns per label; 0 learns the triple penalty alone.")] = 3,
    context_size: Annotated[int, typer.Option(help="Side of the patterns, pixels.")] = 7,
    crop: Annotated[int, typer.Option(help="Side of the crops to learn from, pixels.")] = 128,
    batch: Annotated[int, typer.Option(help="Crops per step.")] = 2,
    penalty_steps: Annotated[int, typer.Option(help="Steps for the triple penalty.")] = 60,
    contexts_steps: Annotated[int, typer.Option(help="Steps for the label contexts.")] = 120,
    labels: Annotated[
        int | None, typer.Option(help="How many labels, where neither labels.json nor the predictions tell.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of folds, crops and starting values.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Learn an MRF for saved predictions."""
    from deepmrf.fit import FitSettings, fit, save_mrf

    console = Console()
    try:
        settings = FitSettings(
            window=window,
            kernel=kernel,  # type: ignore[arg-type]  # FitSettings checks it
            contexts=contexts,
            context_size=context_size,
            folds=folds,
            crop=crop,
            batch=batch,
            penalty_steps=penalty_steps,
            contexts_steps=contexts_steps,
            labels=labels,
            seed=seed,
            device=device,
        )
        with _bar(console) as progress:
            report = fit(predictions, images, masks, settings, progress)
    except (OSError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    headings = ["before" if part == "nothing" else part for part in report.scores]
    table = Table("IoU, held-out images", *headings, title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(report.labels.names):
        ious = [scores.iou_per_class[number] for scores in report.scores.values()]
        table.add_row(name, *["-" if iou != iou else f"{100 * iou:.1f}" for iou in ious])
    table.add_section()
    table.add_row("mIoU", *[f"{100 * s.miou:.2f}" for s in report.scores.values()], style="bold")
    table.add_row("pixel accuracy", *[f"{100 * s.pixel_accuracy:.2f}" for s in report.scores.values()])
    for number, fold in enumerate(report.folds, start=1):
        table.add_row(f"mIoU of fold {number}", *[f"{100 * s.miou:.2f}" for s in fold.scores.values()], style="dim")
    for note in report.notes:
        console.print(note, style="yellow", markup=False, soft_wrap=True)
    console.print(f"Predictions were read as {report.kind}.")
    console.print(table)
    console.print(report.verdict, soft_wrap=True)
    console.print(f"Wrote {save_mrf(report, out)} ({report.kept}).", soft_wrap=True)


def refine_command(
    predictions: Annotated[Path, typer.Option(help="Folder of the network's predictions.")],
    images: Annotated[Path, typer.Option(help="Folder of the images.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the results into.")],
    mrf: Annotated[Path | None, typer.Argument(help="Folder that deepmrf fit wrote.")] = None,
    preset: Annotated[str, typer.Option(help="Instead of a folder: dense-crf, which needs no training.")] = "",
    labels: Annotated[Path | None, typer.Option(help="A labels.json with names and colours, for a preset.")] = None,
    probabilities: Annotated[str, typer.Option(help="Also write float16 probabilities: npy or npz.")] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Do again what is done already.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Sharpen saved predictions with an MRF."""
    import json

    from deepmrf.data.labels import LabelSet
    from deepmrf.refine import open_mrf, open_preset, refine

    console = Console()
    if (mrf is None) == (not preset):
        typer.echo("Give either a folder that deepmrf fit wrote, or --preset dense-crf.", err=True)
        raise typer.Exit(2)
    try:
        if mrf is not None:
            model, known = open_mrf(mrf)
        else:
            given = None if labels is None else LabelSet.from_dict(json.loads(labels.read_text()))
            model, known = open_preset(preset, predictions, images, given)
        with _bar(console) as progress:
            report = refine(
                model,
                known,
                predictions,
                images,
                out,
                probabilities=probabilities,  # type: ignore[arg-type]  # refine checks it
                overwrite=overwrite,
                device=device,
                progress=lambda done, whole: progress("refining", done, whole),
            )
    except (OSError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    for line in (*report.notes, *(f"{stem}: {why}" for stem, why in report.failed)):
        console.print(line, style="yellow", markup=False, soft_wrap=True)
    counts = f"{len(report.done)} refined, {len(report.skipped)} there already, {len(report.failed)} failed"
    kinds = f" Predictions were read as {'; '.join(report.kinds)}." if report.kinds else ""
    console.print(f"{counts}: {out}.{kinds}", soft_wrap=True)
    if report.failed:
        raise typer.Exit(1)


# ---- to here
