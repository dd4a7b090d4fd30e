"""`deepmrf refine`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deepmrf.cli import process
from deepmrf.cli.console import Bars, say, sentences, warn

REFINE_HELP = """Sharpen saved predictions with an MRF, and write label maps as PNG, of NIfTI volumes as .nii.gz.

Where a labels.json gave the masks other ids than 0, 1, 2 ..., label maps are read and written with those ids.

[bold]Examples[/bold]

[cyan]deepmrf refine mrf --predictions predictions --images images -o refined[/cyan]: with what deepmrf fit learned.

[cyan]deepmrf refine --preset dense-crf --predictions predictions --images images -o refined[/cyan]: no training.
"""


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
    console = Console()
    with sentences():
        from deepmrf.predict.devices import chosen_device
        from deepmrf.refine.apply import open_mrf, open_preset, read_label_file, refine

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
        with Bars(console) as bars:
            report = refine(
                model,
                known,
                predictions,
                images,
                out,
                probabilities=probabilities,  # type: ignore[arg-type]  # refine checks it
                overwrite=overwrite,
                device=device,
                progress=bars.progress("refining"),
                label_ids=label_ids,
            )
    warn([*report.notes, *(f"{stem}: {reason}" for stem, reason in report.failed)], console)
    counts = f"{len(report.done)} refined, {len(report.skipped)} there already, {len(report.failed)} failed"
    kinds = f" Predictions were read as {'; '.join(report.kinds)}." if report.kinds else ""
    ids = "" if label_ids is None else f" Label maps hold the ids of the masks: {', '.join(map(str, label_ids.ids))}."
    say(f"{counts}: {out}.{kinds}{ids}", console)
    if report.failed:
        raise typer.Exit(1)
