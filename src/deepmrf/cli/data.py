"""`deepmrf data get` and `deepmrf data check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deepmrf.cli import process
from deepmrf.cli.console import Bars, fail, sentences

data_app = typer.Typer(
    help="Download and validate data sets.", rich_markup_mode="rich", no_args_is_help=True, add_completion=False
)

GET_HELP = """Download a data set from its publisher: resumed where it stopped, checksum verified, unpacked.

Names: camvid, camvid-original, voc, animals, sbd, coco, cityscapes (which needs a login: it says what to do).

ImageNet weights for recipes, from the Hugging Face hub: vgg16_imagenet_features, vgg16_imagenet,
efficientnet_lite0_imagenet.

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
    from deepmrf.data.weights import WEIGHTS, get_weights

    try:
        with sentences():
            if name in WEIGHTS:
                get_weights(name, to or Path("weights"))
            else:
                download(name, to or Path("data") / name)
    except KeyboardInterrupt:
        fail("Interrupted: run the same command again to go on where it stopped.")


@data_app.command(help=CHECK_HELP)
def check(
    name: Annotated[str, typer.Argument(help="camvid, voc, animals, cityscapes, coco or folder.")],
    path: Annotated[str, typer.Argument(help="Where it lies.")],
    split: Annotated[str, typer.Option(help="Which part of it.")] = "train",
) -> None:
    """Validate a data set."""
    process.prepare(torch=False)
    from deepmrf.data.check import check as inspect

    console = Console()
    with sentences(), Bars(console) as bars:
        report = inspect(f"{name}:{path}", split, bars.progress("checking"))
    console.print(report.table())
    if not report.ok:
        raise typer.Exit(1)
