"""`deepmrf fit`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deepmrf.cli import process
from deepmrf.cli.console import Bars, fail, percent, say, sentences, table, warn

if TYPE_CHECKING:
    from deepmrf.refine.report import FitReport

IMAGE_DEFAULTS = {"window": "21, distance kernel 51", "contexts": 3, "context_size": 9, "crop": 128, "batch": 4}
IMAGE_DEFAULTS |= {"penalty_steps": 60}
VOLUME_DEFAULTS = IMAGE_DEFAULTS | {"window": 5, "context_size": 3, "crop": 48, "batch": 2, "penalty_steps": 40}
"""The defaults of FitSettings, repeated so that --help need not import PyTorch; a test holds them equal."""

NO_SETTINGS = ("predictions", "images", "masks", "out", "overwrite")
"""The parameters of the command that are folders; the others have the names of the fields of FitSettings."""

FIT_HELP = """Learn an MRF for predictions that a network has saved, and say by cross-validation what it gains.

Predictions, images and masks have equal names. Predictions: NAME.npy or .npz (L, H, W), a grey PNG per label
(NAME/ID.png, NAME_ID.png), or a label map NAME.png with an optional NAME_confidence.png. Masks: ids, 255 is void;
a labels.json beside them names the labels, and its ids are those of predicted label maps too.

Volumes are told by their images being NIfTI (.nii, .nii.gz): masks too, predictions NAME.npy or .npz (L, D, H, W) or
NIfTI, one map per label or label ids. The MRF is then 3-D, with the spacing of the headers.

Cross-validation chooses kernel, gate, label scaling and the number of steps, and a table says what was tried. Training
goes on until the score of the images held out stops rising, or until the minutes are over. Frames of one video are
recognised, and held out together; groups of another kind, such as patients, are told by [bold]--groups[/bold].

[bold]Examples[/bold]

[cyan]deepmrf fit --predictions predictions --images images --masks masks -o mrf[/cyan]

[cyan]deepmrf fit --predictions P --images I --masks M -o mrf --minutes 20[/cyan]: a more thorough search.

[cyan]deepmrf fit --predictions P --images I --masks M -o mrf --groups '^([^_]+)_'[/cyan]: what stands before the first
_ is the patient, place or video: its images are held out together. With [cyan]'.+'[/cyan] each image is a group.

[cyan]deepmrf fit --predictions P --images I --masks M -o mrf --kernel global --contexts 0[/cyan]: for few masks, only
the widths and the weight of a dense CRF's step, and a scaling per label.

[cyan]deepmrf fit --predictions P --images I --masks M -o mrf --kernel gaussian --no-gate
--label-scaling --contexts-steps 600[/cyan]: nothing is left to choose.
"""


def _by_dims(name: str, text: str) -> Any:
    """An option whose default depends on whether there are images or volumes."""
    images, volumes = IMAGE_DEFAULTS[name], VOLUME_DEFAULTS[name]
    default = f"{images}; of volumes {volumes}" if images != volumes else f"{images}"
    return typer.Option(help=f"{text}.", show_default=default)


# Named here, because typer reads the annotations of all commands whenever one runs: these are computed once, on import.
WindowOption = Annotated[int | None, _by_dims("window", "Side of the triple penalty's window, pixels")]
ContextsOption = Annotated[int | None, _by_dims("contexts", "Patterns per label; 0 learns the triple penalty alone")]
ContextSizeOption = Annotated[int | None, _by_dims("context_size", "Side of the patterns, pixels")]
CropOption = Annotated[int | None, _by_dims("crop", "Side of the crops to learn from, pixels")]
BatchOption = Annotated[int | None, _by_dims("batch", "Crops per step")]
PenaltyStepsOption = Annotated[int | None, _by_dims("penalty_steps", "Steps for the triple penalty")]


def fit_command(
    predictions: Annotated[Path, typer.Option(help="Folder of the network's predictions.")],
    images: Annotated[Path, typer.Option(help="Folder of the images.")],
    masks: Annotated[Path, typer.Option(help="Folder of the true masks.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the MRF into.")],
    minutes: Annotated[float, typer.Option(help="How long it may take, about.")] = 3.0,
    groups: Annotated[
        str | None,
        typer.Option(help="Regular expression that finds an image's group in its name.", show_default="videos"),
    ] = None,
    folds: Annotated[int, typer.Option(help="Folds of the cross-validation, by group.")] = 3,
    kernel: Annotated[
        str | None,
        typer.Option(
            help="distance (the paper's), gaussian, or global: a dense CRF's step over all pairs of pixels.",
            show_default="each, if there is time; for volumes without global",
        ),
    ] = None,
    gate: Annotated[
        bool | None,
        typer.Option(
            "--gate/--no-gate",
            help="Neighbours count where the pixel itself takes a label for possible: the factor q of b12.",
            show_default="both, if there is time",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Divides log-probabilities.", show_default="1; without label scaling 0.7 and 1.4, too"),
    ] = None,
    label_scaling: Annotated[
        bool | None,
        typer.Option(
            "--label-scaling/--no-label-scaling",
            help="A learned factor and summand per label, before the MRF.",
            show_default="both, if there is time; for volumes without",
        ),
    ] = None,
    window: WindowOption = None,
    contexts: ContextsOption = None,
    context_size: ContextSizeOption = None,
    crop: CropOption = None,
    batch: BatchOption = None,
    penalty_steps: PenaltyStepsOption = None,
    contexts_steps: Annotated[
        int | None, typer.Option(help="Steps for the label contexts.", show_default="until the score stops rising")
    ] = None,
    labels: Annotated[
        int | None, typer.Option(help="How many labels, where neither labels.json nor the predictions tell.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of folds, crops and starting values; it repeats a run that has minutes to spare.")
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the MRF that the folder holds.")] = False,
) -> None:
    """Learn an MRF for saved predictions."""
    options = {name: value for name, value in locals().items() if name not in NO_SETTINGS and value is not None}
    process.prepare()
    console = Console()
    with sentences():
        from deepmrf.refine.fit import default_settings, fit
        from deepmrf.refine.report import check_fit_folder
        from deepmrf.refine.search import MAX_PIXELS

        settings = replace(default_settings(images), **options)
        existed = check_fit_folder(out)
        if existed and not overwrite:  # before minutes are spent
            fail(f"{out} holds an MRF already: --overwrite replaces it, or choose another folder.")
        try:
            with Bars(console) as bars:
                report = fit(predictions, images, masks, settings, bars.progress)
        except KeyboardInterrupt:
            fail("Interrupted: nothing was written.", 130)
    warn(report.notes, console)
    say(f"Predictions were read as {report.kind}.", console)
    if report.search is not None:
        console.print(_trials_table(report))
        trials = report.search.trials
        if any(len(trial.fold_gains) < len(trials[0].fold_gains) for trial in trials):
            say("Choices of fewer folds were dropped after a first round, in the first fold.", console)
        scored = f"at most {MAX_PIXELS / 1e6:g} million pixels of each fold"
        say(f"These scores are of half precision and of {scored}; those below are exact.", console)
        console.print()
    headings, rows = report.table()
    console.print(table(headings, [(title, *[percent(value) for value in values]) for title, values in rows]))
    say(report.verdict, console)
    kept = report.stage if report.stage == "nothing" else f"{report.stage}, the simplest stage that no other beats"
    with sentences():
        say(f"{'Replaced' if existed else 'Wrote'} {report.save(out)} ({kept}).", console)


def _trials_table(report: FitReport) -> Table:
    """What was tried; headings break at every word, so that 80 columns have room for the first column."""
    headings, rows = report.trials_table()
    result = table(headings, rows)
    for column, heading in zip(result.columns[1:-1], headings[1:-1], strict=True):
        column.max_width = max(map(len, heading.split()))
    return result
