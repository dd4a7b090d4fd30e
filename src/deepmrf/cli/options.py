"""Options that several commands share.

--network names a network of the user's own by the function that builds it, --ray a cluster, whose address may be left
out.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from deepmrf.cli.console import fail

DeviceOption = Annotated[
    str | None, typer.Option(show_default="cuda if there is one", help="Where to compute: cpu or cuda.")
]
ScalesOption = Annotated[
    list[str] | None,
    typer.Option(metavar="FACTORS", show_default="1", help="Resize the image by these factors and average."),
]
FlipOption = Annotated[bool, typer.Option("--flip", help="Also the mirror image, averaged.")]
NetworkOption = Annotated[
    str | None,
    typer.Option(
        "--network",
        metavar="MODULE:FUNCTION",
        help="A network of your own: the function that builds it, such as mynet:build. This imports and runs your "
        "code; modules in the current folder are found.",
    ),
]
RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Share the images between the processes of a Ray cluster: HOST:PORT, auto, or none for this machine.",
    ),
]
ADDRESS = re.compile(r"auto|local|ray://\S+|[^/\s]+:\d+")
"""What may follow --ray as its address: auto, local, ray://HOST:PORT or HOST:PORT."""
NEITHER = re.compile(r"(?!-)[^/:*?\[\s]*(?<!\.[A-Za-z]{3})(?<!\.[A-Za-z]{4})")
"""A word that looks neither like an address nor like a file, a pattern or an option."""


@contextmanager
def own_code(network: str | None) -> Iterator[None]:
    """Let --network find modules in the current folder, and name the option where a model asks for its network."""
    folder = os.getcwd()
    added = network is not None and folder not in sys.path
    if added:
        sys.path.insert(0, folder)
    try:
        yield
    except ValueError as error:
        from deepmrf.models.parsing_network import MissingNetworkError

        if not isinstance(error, MissingNetworkError):
            raise
        code = error.code or "MODULE"
        name = code if ":" in code else f"{code.rpartition('.')[0] or 'MODULE'}:FUNCTION"
        if name.startswith(("__main__", "torch.")):  # no module of the user's that can be imported
            name = "MODULE:FUNCTION"
        raise ValueError(
            f"{error.folder} was saved around a network of your own ({code}): name a function without arguments that "
            f"builds it, --network {name}, which imports and runs your code."
        ) from None
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)


class RayCommand(TyperCommand):
    """A command with --ray: the word after it is its address only if it looks like one and is no file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write --ray as --ray=ADDRESS, or --ray= where there is none."""
        words = list(args)
        end = words.index("--") if "--" in words else len(words)
        if "--ray" in words[:end]:
            index = words.index("--ray")
            word = "".join(words[index + 1 : index + 2])
            if ADDRESS.fullmatch(word) and not os.path.lexists(word):
                words[index : index + 2] = [f"--ray={word}"]
            elif word and NEITHER.fullmatch(word) and not os.path.lexists(word):
                fail(f"--ray {word} is neither a file nor an address: give HOST:PORT, auto, or no address.")
            else:
                words[index] = "--ray="
        return super().parse_args(ctx, words)
