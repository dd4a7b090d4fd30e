"""`deepmrf export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from deepmrf.cli import process
from deepmrf.cli.console import say, sentences, table
from deepmrf.cli.options import NetworkOption, own_code

if TYPE_CHECKING:
    from deepmrf.models.parsing_network import DeepParsingNetwork

EXPORT_HELP = """Write a whole model, network and MRF, to one file: ONNX (.onnx) or torch.export (.pt2).

It takes uint8 RGB images (batch, 3, height, width) of any size that the network takes, and
gives log-probabilities of the same size.
The file is run beside the model before it is put in place; a difference above 1e-4 is an error.

[bold]Examples[/bold]

[cyan]deepmrf export street -o street.onnx[/cyan]

[cyan]deepmrf export runs/fast/model -o model.onnx --image photo.jpg[/cyan]

[cyan]deepmrf export runs/fast/model -o model.pt2[/cyan]

[cyan]deepmrf export animals -o animals.onnx --network-only[/cyan]: without its MRF, which joins all pairs of
pixels: no such file can hold it.
"""


def export_command(
    model: Annotated[str, typer.Argument(help="A bundled model's name, a trained model's folder, or a hub id.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file, .onnx or .pt2.")],
    image: Annotated[
        Path | None, typer.Option(help="A photograph to compare file and model on; made-up images if none is given.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="The largest difference of log-probabilities that is no error.")
    ] = 1e-4,
    network_only: Annotated[bool, typer.Option("--network-only", help="Leave the MRF out.")] = False,
    network: NetworkOption = None,
) -> None:
    """Write a whole model to one file."""
    process.prepare()
    console = Console()
    with sentences(ArithmeticError), own_code(network):
        from deepmrf.data.files import read_image
        from deepmrf.export import centre_crops, check_path, export
        from deepmrf.models.names import open_model

        check_path(out)  # before anything is read or computed
        images = None if image is None else centre_crops(read_image(image))
        opened = open_model(model, network)
        if network_only:
            opened = _network_of(opened)
        with console.status(escape(f"Tracing {model}, writing and checking {out.name}: half a minute or more")):
            comparisons = export(opened, out, images, tolerance)
    program = "onnxruntime" if out.suffix.lower() == ".onnx" else "torch.export"
    rows = [
        (
            f"{c.height} x {c.width}",
            f"{c.difference:.1e}",
            *[f"{1000 * s:.0f} ms" for s in (c.model_seconds, c.file_seconds)],
        )
        for c in comparisons
    ]
    console.print(table(("image", "largest difference", "PyTorch", program), rows))
    say(f"Wrote {out}, {out.stat().st_size / 2**20:.1f} MiB.", console)


def _network_of(model: DeepParsingNetwork) -> DeepParsingNetwork:
    """The model without its MRF."""
    if model.mean_field is not None and model.mean_field.unary == "sigmoid":
        raise ValueError(
            "The network gives each label a probability of its own (unary='sigmoid'), which its MRF says: "
            "leave --network-only out."
        )
    return type(model)(model.unary, None, model.labels, model.card).eval()
