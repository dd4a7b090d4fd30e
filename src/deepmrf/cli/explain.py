"""`deepmrf explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deepmrf.cli import process
from deepmrf.cli.console import Bars, count, fail, say, sentences
from deepmrf.cli.options import NetworkOption, own_code

EXPLAIN_HELP = """Show what a model has learned, and what each of its layers does to a picture.

Writes DIR/index.html, a page that works offline and needs no other file, and each figure beside it as PNG and SVG:

- label compatibility: which labels go together, and which do not; contextual patterns A:B, where B is likely when A is
at the centre; for models of clips, also between one frame and the next

- of pictures: labels after the network, after b12, after b13 and b14, and the pixels that changed; which label context
won where; b12's window and weights at a pixel, also at each pixel that you click

- TA, LA and BA after each stage of training, where the model's card holds them

[bold]Examples[/bold]

[cyan]deepmrf explain animals -o explained[/cyan]: with the picture that comes with the model

[cyan]deepmrf explain street --image drive.jpg --pixel 320,240 -o explained[/cyan]

[cyan]deepmrf explain runs/fast/model --data camvid:data/camvid --pairs "car:road,building:sky" -o out[/cyan]: three
pictures of the data, with their true labels
"""


def explain_command(
    model: Annotated[str, typer.Argument(help="A bundled model's name, a trained model's folder, or a hub id.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the page and its figures.")],
    data: Annotated[
        str | None, typer.Option(help="Labelled data, such as camvid:PATH: three of its pictures are shown.")
    ] = None,
    split: Annotated[str, typer.Option(help="Which part of the data.")] = "val",
    images: Annotated[list[Path] | None, typer.Option("--image", help="Show this picture; may be repeated.")] = None,
    pixel: Annotated[
        str | None,
        typer.Option(metavar="X,Y", help="Where to show b12's window; by default where the MRF changed a label."),
    ] = None,
    pairs: Annotated[
        str | None,
        typer.Option(
            metavar="A:B,...",
            help="Labels whose patterns to show; by default the pairs of the pictures that gain most.",
        ),
    ] = None,
    network: NetworkOption = None,
) -> None:
    """Show what a model has learned, and what each of its layers does to a picture."""
    if data is not None and images:
        fail("--data and --image are two ways to give pictures: leave one out.")
    position = _pixel(pixel)
    process.prepare()
    console = Console()
    with sentences(RuntimeError), own_code(network):
        from deepmrf.data import open_data
        from deepmrf.data.extras import optional
        from deepmrf.data.files import read_image
        from deepmrf.data.writing import check_folder
        from deepmrf.evaluation.explain import Picture, explain, parse_pairs, pictures_of
        from deepmrf.evaluation.models import SAME_LABELS
        from deepmrf.models.names import find_folder, from_folder

        optional("matplotlib", "deepmrf explain needs", "figures")
        check_folder(out, "the report")
        folder = find_folder(model)
        opened = from_folder(folder, network)
        chosen = None if pairs is None else parse_pairs(pairs, opened.labels)
        if data is not None:
            dataset = open_data(data, split)
            opened.labels.check_same(model, dataset.labels, data, SAME_LABELS)
            pictures = pictures_of(dataset)
        else:
            paths = images or [path for path in [folder / "example.jpg"] if path.is_file()]
            pictures = [Picture(path.name, read_image(path)) for path in paths]
        with Bars(console) as bars:
            report = explain(opened, model, pictures, out, position, chosen, bars.progress("explaining"))
    say(f"Wrote {report.page}, and {count(len(report.figures), 'figure')} beside it as PNG and SVG.", console)
    if not pictures:
        say("No picture comes with this model: --image FILE shows what its layers do to one.", console)


def _pixel(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        x, y = (int(word) for word in text.split(","))
    except ValueError:
        fail(f"--pixel {text} is no pixel: write its column and row, such as --pixel 320,240.")
    return x, y
