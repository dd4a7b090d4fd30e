"""`deepmrf refine`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from deepmrf.cli import process
from deepmrf.cli.console import (
    INTERRUPTED,
    Bars,
    fail,
    say,
    say_pairs,
    sentences,
    split_settings,
    table,
    warn,
    warn_of_failures,
)
from deepmrf.cli.options import RayOption

PRESET_FIELDS = {
    "voc": "CAMs and pseudo-labels of weak supervision; pydensecrf's own example",
    "irn": "pseudo-labels of IRN and the methods after it",
    "deeplab": "semantic segmentation networks such as DeepLab",
    "maskcut": "unsupervised masks: MaskCut, TokenCut",
    "saliency": "salient objects",
    "medical3d": "NIfTI volumes",
}
"""What each preset is for, without importing PyTorch; a test compares the names with those of the library."""

REFINE_HELP = """Sharpen saved predictions with an MRF, and write label maps as PNG, of NIfTI volumes as .nii.gz.

Many viewers show label maps dark; [bold]--overlays[/bold] adds NAME_overlay.jpg, the image with its labels painted over
it, to look at. A note at the end names labels that lost a third of their pixels or more.

Predictions lie as for [bold]deepmrf fit[/bold]. Masks of 0 and 255 are read and written as binary masks; grey masks are
read as soft ones, the probability of the foreground. Where a labels.json gave the masks other ids than 0, 1, 2 ...,
label maps are read and written with those ids.

[bold]Presets[/bold]: dense CRFs with the settings of a field, which need no training. [cyan]--preset list[/cyan] shows
their numbers and what these mean, --set changes them.

PRESETS
[bold]Examples[/bold]

[cyan]deepmrf refine mrf --predictions predictions --images images -o refined[/cyan]: with what deepmrf fit learned.

[cyan]deepmrf refine --preset voc --predictions predictions --images images -o refined[/cyan]: no training.

[cyan]deepmrf refine --preset voc --set colour_width=5 --predictions predictions --images images -o refined[/cyan]

[cyan]deepmrf refine --preset maskcut --predictions masks --images images -o refined --gt-prob 0.7[/cyan]: plain masks.

[cyan]deepmrf refine --preset voc --predictions predictions --images images -o refined --ray auto[/cyan]: on a cluster.
""".replace("PRESETS\n", "".join(f"[cyan]{name}[/cyan]: {field}.\n\n" for name, field in PRESET_FIELDS.items()))


def _list_presets(name: str) -> str:
    """For --preset list: print the presets and exit, whatever other options there are."""
    if name not in ("list", "help"):
        return name
    from deepmrf.refine.opening import PARAMETERS, preset_values

    console = Console()
    rows = [(key, *[f"{preset_values(preset)[key]:g}" for preset in PRESET_FIELDS]) for key in PARAMETERS]
    console.print(table(("", *PRESET_FIELDS), rows))
    for pairs in (PARAMETERS, PRESET_FIELDS):
        say("", console)
        say_pairs(pairs, console)
    say("", console)
    say("--set changes a number of a preset, such as --preset voc --set colour_width=5.", console)
    raise typer.Exit


def refine_command(
    predictions: Annotated[str, typer.Option(help="Folder of the network's predictions, or of masks.")],
    images: Annotated[str, typer.Option(help="Folder of the images.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Folder to write the results into.")],
    mrf: Annotated[Path | None, typer.Argument(help="Folder that deepmrf fit wrote.")] = None,
    preset: Annotated[
        str,
        typer.Option(
            callback=_list_presets, is_eager=True, help=f"Instead of a folder: {', '.join(PRESET_FIELDS)}; or list."
        ),
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=NUMBER", help="Change a number of the preset; may be repeated."),
    ] = None,
    gt_prob: Annotated[
        float | None,
        typer.Option(show_default="0.9", help="Probability that label maps and masks without a confidence are right."),
    ] = None,
    soft_mask: Annotated[
        bool | None,
        typer.Option(
            show_default="found out", help="Predictions are grey masks, value / 255 is the foreground's probability."
        ),
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="A labels.json with names and colours, for a preset.")] = None,
    probabilities: Annotated[str, typer.Option(help="Also write float16 probabilities: npy or npz.")] = "",
    overlays: Annotated[
        bool, typer.Option("--overlays", help="Also write NAME_overlay.jpg to look at; not for volumes.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Do again what is done already.")] = False,
    workers: Annotated[
        int | None,
        typer.Option(show_default="PyTorch's threads", help="Images refined at a time; with --ray, processes."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    ray: RayOption = None,
) -> None:
    """Sharpen saved predictions with an MRF."""
    process.prepare()
    console = Console()
    with sentences():
        from deepmrf.data.remote import URL, path_or_url
        from deepmrf.predict.segmenter import chosen_device
        from deepmrf.refine.apply import Run, refine
        from deepmrf.refine.changes import describe_changes
        from deepmrf.refine.opening import open_mrf, open_preset
        from deepmrf.refine.remote import mirrored_folders

        if (mrf is None) == (not preset):
            raise ValueError("Give either a folder that deepmrf fit wrote, or a preset, such as --preset voc.")
        for option, value in {"--labels": labels, "--set": settings, "--soft-mask": soft_mask}.items():
            if mrf is not None and value not in (None, []):
                raise ValueError(f"{option} is for a preset, and {mrf} has what was learned: leave {option} out.")
        if preset and labels is None and not soft_mask and isinstance(path_or_url(predictions), URL):
            raise ValueError("A preset does not read predictions at URLs to count labels: give --labels labels.json.")
        if ray is None:
            chosen_device(device)  # before the files are read
        else:
            from deepmrf.refine import cluster
        numbers = _numbers(settings)
        try:
            with Bars(console) as bars, mirrored_folders(predictions, images, out) as folders:
                if mrf is not None:
                    model, label_set, label_ids = open_mrf(mrf)
                else:
                    files = folders.predictions, folders.images
                    model, label_set, label_ids = open_preset(preset, *files, labels, numbers, soft_mask)
                options: dict[str, Any] = {"probabilities": probabilities, "overlays": overlays}
                options |= {"overwrite": overwrite, "workers": workers}
                options |= {"progress": bars.progress("refining"), "label_ids": label_ids, "gt_prob": gt_prob}
                if ray is None:
                    run: Run = partial(folders.run, device=device, workers=workers)
                else:
                    run = cluster.run_on(folders.names, ray or None, workers, device)
                report = refine(model, label_set, *folders, run=run, **options)
        except KeyboardInterrupt:
            fail(INTERRUPTED, 130)
    warn(report.notes, console)
    warn_of_failures([(stem, f"{stem}: {reason}") for stem, reason in report.failed], console)
    counts = f"{len(report.done)} refined, {len(report.skipped)} there already, {len(report.failed)} failed"
    kinds = f" Predictions were read as {'; '.join(report.kinds)}." if report.kinds else ""
    ids = "" if label_ids is None else f" Label maps hold the ids of the masks: {', '.join(map(str, label_ids.ids))}."
    again = " What was there may be of another MRF: --overwrite does it again." if report.skipped else ""
    say(f"{counts}: {out}.{kinds}{ids}{again}", console)
    if changes := describe_changes(report.pixels, label_set.names):
        advice = ", or learn an MRF by deepmrf fit" if preset else ""
        warn([f"{changes}: look at the results{advice}."], console)
    if report.failed:
        raise typer.Exit(1)


def _numbers(settings: list[str] | None) -> dict[str, float]:
    """The numbers that --set gave, by name."""
    numbers = {}
    for name, text in split_settings(settings, "colour_width=5").items():
        try:
            numbers[name] = float(text)
        except ValueError:
            raise ValueError(f"--set {name}={text} is no number: write one such as {name}=5.") from None
    return numbers
