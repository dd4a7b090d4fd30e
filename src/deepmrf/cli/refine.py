"""`deepmrf refine`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deepmrf.cli import process
from deepmrf.cli.console import Bars, say, sentences, warn

PRESET_LINES = {
    "voc": ("3/3, 80/13/10, 10", "pydensecrf's own example: CAMs and pseudo-labels of weak supervision"),
    "irn": ("3/3, 50/5/10, 10", "pseudo-labels of IRN and the methods after it"),
    "deeplab": ("1/3, 67/3/4, 10", "semantic segmentation networks such as DeepLab"),
    "maskcut": ("3/7, 50/5/10, 10", "unsupervised masks: MaskCut, TokenCut"),
    "saliency": ("3/3, 60/5/5, 1", "salient objects"),
    "medical3d": ("1/3, 5/25/5, 5", "volumes, widths in mm"),
}
"""Settings and field of each preset, repeated so that --help need not import PyTorch; a test holds them equal."""

REFINE_HELP = """Sharpen saved predictions with an MRF, and write label maps as PNG, of NIfTI volumes as .nii.gz.

Predictions lie as for [bold]deepmrf fit[/bold]; masks of 0 and 255 are read and written as binary masks. Where a
labels.json gave the masks other ids than 0, 1, 2 ..., label maps are read and written with those ids.

[bold]Presets[/bold]: dense CRFs with the settings of a field, which need no training. The numbers: position
width/weight, then position width/colour width/weight of pairs of similar colour, then iterations.

PRESETS
[bold]Examples[/bold]

[cyan]deepmrf refine mrf --predictions predictions --images images -o refined[/cyan]: with what deepmrf fit learned.

[cyan]deepmrf refine --preset voc --predictions predictions --images images -o refined[/cyan]: no training.

[cyan]deepmrf refine --preset maskcut --predictions masks --images images -o refined --gt-prob 0.7[/cyan]: plain masks.
""".replace(
    "PRESETS\n",
    "".join(f"[cyan]{name}[/cyan]: {numbers}. {field}.\n\n" for name, (numbers, field) in PRESET_LINES.items()),
)


def refine_command(
    predictions: Annotated[Path, typer.Option(help="Folder of the network's predictions, or of masks.")],
    images: Annotated[Path, typer.Option(help="Folder of the images.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the results into.")],
    mrf: Annotated[Path | None, typer.Argument(help="Folder that deepmrf fit wrote.")] = None,
    preset: Annotated[str, typer.Option(help=f"Instead of a folder: {', '.join(PRESET_LINES)}.")] = "",
    gt_prob: Annotated[
        float | None,
        typer.Option(show_default="0.9", help="Probability that label maps and masks without a confidence are right."),
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="A labels.json with names and colours, for a preset.")] = None,
    probabilities: Annotated[str, typer.Option(help="Also write float16 probabilities: npy or npz.")] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Do again what is done already.")] = False,
    workers: Annotated[
        int | None, typer.Option(show_default="PyTorch's threads", help="Images refined at a time.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Sharpen saved predictions with an MRF."""
    process.prepare()
    console = Console()
    with sentences():
        from deepmrf.predict.devices import chosen_device
        from deepmrf.refine.apply import refine
        from deepmrf.refine.opening import open_mrf, open_preset

        if (mrf is None) == (not preset):
            raise ValueError("Give either a folder that deepmrf fit wrote, or a preset, such as --preset voc.")
        if mrf is not None and labels is not None:
            raise ValueError(f"--labels is for a preset, and {mrf} has labels of its own: leave --labels out.")
        chosen_device(device)  # before the files are read
        opened = open_preset(preset, predictions, images, labels) if mrf is None else open_mrf(mrf)
        model, label_set, label_ids = opened
        with Bars(console) as bars:
            report = refine(
                model,
                label_set,
                predictions,
                images,
                out,
                probabilities=probabilities,  # type: ignore[arg-type]  # refine checks it
                overwrite=overwrite,
                device=device,
                progress=bars.progress("refining"),
                label_ids=label_ids,
                gt_prob=gt_prob,
                workers=workers,
            )
    warn([*report.notes, *(f"{stem}: {reason}" for stem, reason in report.failed)], console)
    counts = f"{len(report.done)} refined, {len(report.skipped)} there already, {len(report.failed)} failed"
    kinds = f" Predictions were read as {'; '.join(report.kinds)}." if report.kinds else ""
    ids = "" if label_ids is None else f" Label maps hold the ids of the masks: {', '.join(map(str, label_ids.ids))}."
    say(f"{counts}: {out}.{kinds}{ids}", console)
    if report.failed:
        raise typer.Exit(1)
