"""The option --ray of commands that can work on a cluster. Its address may be left out."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from deepmrf.cli.console import fail

ADDRESS = re.compile(r"auto|local|ray://\S+|[^/\s]+:\d+")
"""What may follow --ray as its address: auto, local, ray://HOST:PORT or HOST:PORT."""
NEITHER = re.compile(r"(?!-)[^/:*?\[\s]*(?<!\.[A-Za-z]{3})(?<!\.[A-Za-z]{4})")
"""A word that looks neither like an address nor like a file, a pattern or an option."""

RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Share the images between the processes of a Ray cluster: HOST:PORT, auto, or none for this machine.",
    ),
]


class RayCommand(TyperCommand):
    """A command with --ray: the word after it is its address only if it looks like one and is no file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write --ray as --ray=ADDRESS, or --ray= where there is none."""
        words = list(args)
        end = words.index("--") if "--" in words else len(words)
        if "--ray" in words[:end]:
            index = words.index("--ray")
            after = words[index + 1 : index + 2]
            after = [word for word in after if not os.path.lexists(word)]
            if after and NEITHER.fullmatch(after[0]) and not ADDRESS.fullmatch(after[0]):
                fail(f"--ray {after[0]} is neither a file nor an address: give HOST:PORT, auto, or no address.")
            given = after if after and ADDRESS.fullmatch(after[0]) else []
            words[index : index + 1 + len(given)] = [f"--ray={''.join(given)}"]
        return super().parse_args(ctx, words)
