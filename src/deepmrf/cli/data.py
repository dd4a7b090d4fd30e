"""`deepmrf data get` and `deepmrf data check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deepmrf.cli import process
from deepmrf.cli.console import Bars, fail, say, sentences

data_app = typer.Typer(
    help="Download and validate data sets.", rich_markup_mode="rich", no_args_is_help=True, add_completion=False
)

DATA_FOLDER, WEIGHTS_FOLDER = Path("data"), Path("weights")
"""Where recipes expect data, in a folder for each data set, and ImageNet weights."""
ALL_WEIGHTS = "weights"
"""The name of all ImageNet weights together."""

GET_HELP = """Download a data set from its publisher: resumed where it stopped, checksum verified, unpacked.

Names: camvid, camvid-original, voc, animals, sbd, coco, cityscapes (which needs a login: it says what to do). Where voc
or animals and sbd lie side by side, SBD's masks are merged into the split trainaug. It ends with what to type next.

ImageNet weights for recipes, from the Hugging Face hub: vgg16_imagenet_features, vgg16_imagenet,
efficientnet_lite0_imagenet, efficientnet_lite1_imagenet, efficientnet_lite2_imagenet; all of them: weights.

[bold]Examples[/bold]: [cyan]deepmrf data get camvid[/cyan] into data/camvid,
[cyan]deepmrf data get vgg16_imagenet_features[/cyan] into weights
"""

CHECK_HELP = """Validate a data set: counts, missing pairs, sizes, label ids out of range, class frequencies.

[bold]Examples[/bold]: [cyan]deepmrf data check camvid data/camvid --split val[/cyan],
[cyan]deepmrf data check folder my-images[/cyan]
"""


@data_app.command(help=GET_HELP)
def get(
    name: Annotated[str, typer.Argument(help="Which data set or weights.")],
    to: Annotated[
        Path | None, typer.Option(show_default="data/NAME; of weights, weights", help="Folder to put it into.")
    ] = None,
) -> None:
    """Download a data set from its publisher."""
    process.prepare(torch=False)
    from deepmrf.data.download import get as download
    from deepmrf.data.publications import PUBLICATIONS
    from deepmrf.data.voc import mat_reader, merge_sbd
    from deepmrf.data.weights import WEIGHTS, get_weights

    try:
        with sentences():
            if name in WEIGHTS or name == ALL_WEIGHTS:
                for file in WEIGHTS if name == ALL_WEIGHTS else [name]:
                    get_weights(file, to or WEIGHTS_FOLDER)
                return
            if name not in PUBLICATIONS:
                raise ValueError(
                    f"There are no data and no weights {name!r}: give one of {', '.join(PUBLICATIONS)}, or for weights "
                    f"one of {', '.join(WEIGHTS)}; {ALL_WEIGHTS} means all of them."
                )
            if name == "sbd":
                mat_reader()  # an error before the download, not after it
            folder = download(name, to or DATA_FOLDER / name)
            merged = merge_sbd(folder.parent) if name in ("voc", "animals", "sbd") else []
            if name == "sbd" and merged:  # it is the images of VOC that one trains on
                name, folder = merged[0].name, merged[0]
            _say_next(name, folder, Console())
    except KeyboardInterrupt:
        fail("Interrupted: run the same command again to go on where it stopped.")


def _say_next(name: str, folder: Path, console: Console) -> None:
    """Print where the data is, and those commands of its recipe that are still to be typed."""
    from deepmrf.data.publications import PUBLICATIONS
    from deepmrf.training.recipes import find_recipe, recipe_commands

    say(f"The data is in {folder}. Next:", console)
    kind = name.partition("-")[0]  # camvid-original is read as camvid
    for command in recipe_commands(find_recipe(PUBLICATIONS[name].recipe)):
        words = command.split()
        if words[1:3] == ["data", "get"] and (words[3] in (name, kind) or _is_there(words[3], folder.parent)):
            continue
        if words[1] == "train" and name != "sbd" and folder != DATA_FOLDER / kind:
            command += f" --set data.train={kind}:{folder}"
        say(f"  {command}", console)


def _is_there(name: str, data: Path) -> bool:
    """Are these weights, or the data in a folder beside, there already?"""
    from deepmrf.data.download import is_unpacked
    from deepmrf.data.publications import PUBLICATIONS

    if name not in PUBLICATIONS:
        return (WEIGHTS_FOLDER / f"{name}.safetensors").is_file()
    return all(is_unpacked(archive, data / name) for archive in PUBLICATIONS[name].archives)


@data_app.command(help=CHECK_HELP)
def check(
    name: Annotated[str, typer.Argument(help="camvid, voc, animals, cityscapes, coco or folder.")],
    path: Annotated[str, typer.Argument(help="Where it lies.")],
    split: Annotated[str | None, typer.Option(help="Which part of it.", show_default="train, then val")] = None,
) -> None:
    """Validate a data set."""
    process.prepare(torch=False)
    from deepmrf.data.check import check as inspect

    console, correct = Console(), True
    for part in ("train", "val") if split is None else (split,):
        with sentences(), Bars(console) as bars:
            report = inspect(f"{name}:{path}", part, bars.progress(f"checking {part}"))
        console.print(report.table())
        correct = correct and report.ok
    if not correct:
        raise typer.Exit(1)
