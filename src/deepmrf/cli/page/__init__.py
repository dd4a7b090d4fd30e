"""`deepmrf app`: a page on this machine to segment pictures, and to move the MRF while looking at the result.

controls     the numbers of an MRF that can be moved, their ranges, and the MRF with other numbers
uploads      read pictures, clips and predictions that somebody has uploaded, within limits
sessions     Session: one person's picture, the network's output for it and results; Sessions: all of them
downloads    results as files
views        what the browser gets of a result: maps to hover over, classes, what changed
page         the page itself, of Gradio's components; viewer.html, viewer.css and viewer.js draw the maps
server       listen, receive files, send results, remove what was written

Only page and server need Gradio.
"""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer
from rich.console import Console

from deepmrf.cli import process
from deepmrf.cli.console import say, sentences
from deepmrf.cli.options import DeviceOption

APP_HELP = """Open a page to segment pictures and clips, and to move the MRF while looking at the result.

Drop a picture: network and MRF lie under one slider, labels and confidences under the pointer. A second tab refines a \
prediction of your own network: probabilities, a label map or a mask. A third one shows what a model's MRF has learned.

The page listens on this machine alone and calls no other; pictures stay in memory, and what is written lies in a \
temporary folder that is removed at the end (Ctrl-C).

[bold]Examples[/bold]

[cyan]deepmrf app[/cyan]: the bundled models

[cyan]deepmrf app --model runs/mine/model --open[/cyan]: a model of yours, in the browser at once

[cyan]deepmrf app --host 0.0.0.0 --port 8000[/cyan]: for everybody in this network
"""


def app_command(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", show_default="all bundled ones", help="Models to choose from; repeatable."),
    ] = None,
    host: Annotated[str, typer.Option(help="Who may connect: 0.0.0.0 for every machine.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(show_default="7860 or the next free one", help="The port.")] = None,
    device: DeviceOption = None,
    max_megabytes: Annotated[float, typer.Option(help="Refuse larger files.")] = 50,
    max_megapixels: Annotated[float, typer.Option(help="Refuse larger pictures.")] = 24,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Open a page to segment pictures."""
    console = Console(highlight=False)
    process.prepare(heaps=2)

    def ready(address: str) -> None:
        say(f"Open {address} in a browser; Ctrl-C ends it.", console)
        if open_page:
            webbrowser.open(address)

    with sentences():
        from deepmrf.cli.page.server import serve
        from deepmrf.cli.page.uploads import MEGABYTE, MEGAPIXEL, Limits
        from deepmrf.models.names import bundled

        limits = Limits(file_bytes=int(max_megabytes * MEGABYTE), pixels=int(max_megapixels * MEGAPIXEL))
        serve(model or bundled(), host=host, port=port, device=device, limits=limits, ready=ready)
