"""The option --network of commands that open a model: a network of the user's own, by the name of its function."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

NetworkOption = Annotated[
    str | None,
    typer.Option(
        "--network",
        metavar="MODULE:FUNCTION",
        help="A network of your own: the function that builds it, such as mynet:build. This imports and runs your "
        "code; modules in the current folder are found.",
    ),
]


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
        raise ValueError(
            f"{error.folder} was saved around a network of your own ({code}): name a function without arguments that "
            f"builds it, --network {name.replace('__main__', 'MODULE')}, which imports and runs your code."
        ) from None
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)
