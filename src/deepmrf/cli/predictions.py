"""`deepmrf fit` and `deepmrf refine`: an MRF for predictions that any network has saved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deepmrf.cli import process

if TYPE_CHECKING:
    from deepmrf.data.progress import Phases
    from deepmrf.refine.report import FitReport

PICTURES = {"window": 21, "contexts": 3, "context_size": 7, "crop": 128, "batch": 2}
PICTURES |= {"penalty_steps": 60, "contexts_steps": 120}
VOLUMES = PICTURES | {"window": 5, "context_size": 3, "crop": 48, "penalty_steps": 40, "contexts_steps": 300}
"""The defaults of FitSettings, said here again so that --help need not import PyTorch; a test holds them equal."""

FIT_HELP = """Learn an MRF for predictions that a network has saved, and say by cross-validation what it gains.

Predictions, images and masks have equal names. Predictions: NAME.npy or .npz (L, H, W), a grey PNG per label
(NAME/ID.png, NAME_ID.png), or a label map NAME.png with an optional NAME_confidence.png. Masks: ids, 255 is void;
a labels.json beside them names the labels, and its ids are those of predicted label maps too.

Volumes are told by their images being NIfTI (.nii, .nii.gz): masks too, predictions NAME.npy or .npz (L, D, H, W) or
NIfTI, one map per label or label ids. The MRF is then 3-D, with the spacing of the headers.

[bold]Example[/bold]

[cyan]deepmrf fit --predictions predictions --images images --masks masks -o mrf[/cyan]
"""

REFINE_HELP = """Sharpen saved predictions with an MRF, and write label maps as PNG, of NIfTI volumes as .nii.gz.

Where a labels.json gave the masks other ids than 0, 1, 2 ..., label maps are read and written with those ids.

[bold]Examples[/bold]

[cyan]deepmrf refine mrf --predictions predictions --images images -o refined[/cyan]: with what deepmrf fit learned.

[cyan]deepmrf refine --preset dense-crf --predictions predictions --images images -o refined[/cyan]: no training.
"""


@contextmanager
def _one_sentence() -> Iterator[None]:
    """What is wrong with the input, without a traceback."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


@contextmanager
def _bar(console: Console) -> Iterator[Phases]:
    """A bar for each phase of the work in turn."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda name: lambda done, total: progress.update(task, description=name, completed=done, total=total)


def _by_dims(name: str, text: str) -> Any:
    """An option whose default depends on whether there are pictures or volumes."""
    flat, deep = PICTURES[name], VOLUMES[name]
    return typer.Option(help=f"{text}.", show_default=f"{flat}; of volumes {deep}" if flat != deep else f"{flat}")


def _table(report: FitReport) -> Table:
    """The scores of held-out images before the MRF and with each of its parts; of volumes, Dice first."""
    from deepmrf.evaluation.dice import dice_per_label, mean_dice

    headings = ["before" if part == "nothing" else part for part in report.scores]
    what = "IoU, held-out images" if not report.dice else "Dice, held-out volumes"
    table = Table(what, *headings, title_justify="left", box=None, pad_edge=False)

    def row(title: str, values: list[float], digits: int = 2, style: str = "") -> None:
        table.add_row(title, *["-" if v != v else f"{100 * v:.{digits}f}" for v in values], style=style or None)

    each = {part: [math.nan, *dice_per_label(found)] for part, found in report.dice.items()} or {
        part: list(scores.iou_per_class) for part, scores in report.scores.items()
    }
    for number, name in enumerate(report.labels.names):
        if number or not report.dice:  # Dice is of the foreground
            row(name, [values[number] for values in each.values()], 1 if not report.dice else 2)
    table.add_section()
    if report.dice:
        row("mean Dice", [mean_dice(found) for found in report.dice.values()], style="bold")
    row("mIoU", [s.miou for s in report.scores.values()], style="" if report.dice else "bold")
    row("pixel accuracy" if not report.dice else "voxel accuracy", [s.pixel_accuracy for s in report.scores.values()])
    for number, fold in enumerate(report.folds, start=1):
        if report.dice:
            parts = [mean_dice({stem: found[stem] for stem in fold.held_out}) for found in report.dice.values()]
            row(f"mean Dice of fold {number}", parts, style="dim")
        else:
            row(f"mIoU of fold {number}", [s.miou for s in fold.scores.values()], style="dim")
    return table


def fit_command(
    predictions: Annotated[Path, typer.Option(help="Folder of the network's predictions.")],
    images: Annotated[Path, typer.Option(help="Folder of the images.")],
    masks: Annotated[Path, typer.Option(help="Folder of the true masks.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the MRF into.")],
    folds: Annotated[int, typer.Option(help="Folds of the cross-validation, by image.")] = 3,
    kernel: Annotated[str, typer.Option(help="gaussian or distance (the paper's).")] = "gaussian",
    window: Annotated[int | None, _by_dims("window", "Side of the triple penalty's window, pixels")] = None,
    contexts: Annotated[
        int | None, _by_dims("contexts", "Patterns per label; 0 learns the triple penalty alone")
    ] = None,
    context_size: Annotated[int | None, _by_dims("context_size", "Side of the patterns, pixels")] = None,
    crop: Annotated[int | None, _by_dims("crop", "Side of the crops to learn from, pixels")] = None,
    batch: Annotated[int | None, _by_dims("batch", "Crops per step")] = None,
    penalty_steps: Annotated[int | None, _by_dims("penalty_steps", "Steps for the triple penalty")] = None,
    contexts_steps: Annotated[int | None, _by_dims("contexts_steps", "Steps for the label contexts")] = None,
    labels: Annotated[
        int | None, typer.Option(help="How many labels, where neither labels.json nor the predictions tell.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of folds, crops and starting values.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Learn an MRF for saved predictions."""
    process.prepare()
    from deepmrf.predict.devices import chosen_device
    from deepmrf.refine.fit import default_settings, fit
    from deepmrf.refine.report import check_fit_folder

    console = Console()
    given = {
        "window": window,
        "contexts": contexts,
        "context_size": context_size,
        "crop": crop,
        "batch": batch,
        "penalty_steps": penalty_steps,
        "contexts_steps": contexts_steps,
    }
    with _one_sentence():
        settings = replace(
            default_settings(images),
            kernel=kernel,  # type: ignore[arg-type]  # FitSettings checks it
            folds=folds,
            labels=labels,
            seed=seed,
            device=device,
            **{name: value for name, value in given.items() if value is not None},
        )
        chosen_device(device)
        check_fit_folder(out)  # before the work, which would be lost
        with _bar(console) as phases:
            report = fit(predictions, images, masks, settings, phases)
    for note in report.notes:
        console.print(note, style="yellow", markup=False, soft_wrap=True)
    console.print(f"Predictions were read as {report.kind}.")
    console.print(_table(report))
    console.print(report.verdict, soft_wrap=True)
    with _one_sentence():
        console.print(f"Wrote {report.save(out)} ({report.stage}).", soft_wrap=True)


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
    process.prepare()
    from deepmrf.predict.devices import chosen_device
    from deepmrf.refine.apply import open_mrf, open_preset, read_label_file, refine

    console = Console()
    with _one_sentence():
        if (mrf is None) == (not preset):
            raise ValueError("Give either a folder that deepmrf fit wrote, or --preset dense-crf.")
        if mrf is not None and labels is not None:
            raise ValueError(f"--labels is for a preset, and {mrf} has labels of its own: leave --labels out.")
        chosen_device(device)
        if mrf is not None:
            model, known, label_ids = open_mrf(mrf)
        else:
            given, label_ids = (None, None) if labels is None else read_label_file(labels)
            model, known = open_preset(preset, predictions, images, given)
        with _bar(console) as phases:
            report = refine(
                model,
                known,
                predictions,
                images,
                out,
                probabilities=probabilities,  # type: ignore[arg-type]  # refine checks it
                overwrite=overwrite,
                device=device,
                progress=phases("refining"),
                label_ids=label_ids,
            )
    for line in (*report.notes, *(f"{stem}: {why}" for stem, why in report.failed)):
        console.print(line, style="yellow", markup=False, soft_wrap=True)
    counts = f"{len(report.done)} refined, {len(report.skipped)} there already, {len(report.failed)} failed"
    kinds = f" Predictions were read as {'; '.join(report.kinds)}." if report.kinds else ""
    ids = "" if label_ids is None else f" Label maps hold the ids of the masks: {', '.join(map(str, label_ids.ids))}."
    console.print(f"{counts}: {out}.{kinds}{ids}", soft_wrap=True)
    if report.failed:
        raise typer.Exit(1)
