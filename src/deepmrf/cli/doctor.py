"""`deepmrf doctor`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deepmrf.cli import process
from deepmrf.cli.console import Bars, say, say_pairs, sentences, warn

if TYPE_CHECKING:
    from deepmrf.predict.installation import Cache, Installation

DOCTOR_HELP = """Look at this installation: versions, devices, kernels, caches, and what is missing for which command.

A bundled model segments a small image; the exit code is 0 if that works, else 1.

[bold]Examples[/bold]: [cyan]deepmrf doctor[/cyan], [cyan]deepmrf doctor --json[/cyan]
"""


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs and bug reports.")] = False,
) -> None:
    """Look at this installation."""
    console = Console(highlight=False)
    with Bars(Console(stderr=True)) as bars, sentences():
        process.prepare()
        from deepmrf.predict.installation import inspect_installation

        installation = inspect_installation(bars.progress("looking at the installation"))
    if as_json:
        typer.echo(json.dumps(installation.to_dict(), indent=1))
    else:
        _print(installation, console)
    if installation.problem:
        raise typer.Exit(1)


def _print(installation: Installation, console: Console) -> None:
    sections = {
        "Versions": {name: number or "not installed" for name, number in installation.versions.items()},
        "Devices": installation.devices,
        "Kernels": installation.kernels,
        "Caches": {cache.name: _describe(cache) for cache in installation.caches},
        "Extras": {extra.name: f"installed, for {extra.purpose}" for extra in installation.extras if not extra.missing},
    }
    say(f"deepmrf in {installation.path}", console, "bold")
    for title, pairs in sections.items():
        say(title, console, "bold")
        say_pairs(pairs, console, "  ")
    missing = [extra for extra in installation.extras if extra.missing]
    for extra in missing:
        warn([f"  {extra.name} lacks {', '.join(extra.missing)}, for {extra.purpose}: {extra.install}"], console)
    if installation.problem:
        warn([f"The core does not work: {installation.problem}."], console)
    else:
        say(f"The core works: animals segmented a small image, {installation.seconds:.1f} s.", console, "green")


def _describe(cache: Cache) -> str:
    if not cache.path:
        return "none: no folder can be written"
    size = f"{'' if cache.complete else 'at least '}{cache.bytes / 1e6:.1f} MB"
    return f"{cache.path}, {size}{'' if cache.writable else ', read-only'}"
