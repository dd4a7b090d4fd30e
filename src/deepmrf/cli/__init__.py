"""The `deepmrf` command: reads options and prints; the work is done elsewhere. Nothing else imports typer and rich.

bench      deepmrf bench
training   deepmrf train, deepmrf evaluate
data       deepmrf data get, deepmrf data check
"""

from __future__ import annotations

from typing import Annotated

import typer

import deepmrf
from deepmrf.cli.bench import BENCH_HELP, bench
from deepmrf.cli.data import data_app
from deepmrf.cli.training import EVALUATE_HELP, TRAIN_HELP, evaluate, train

app = typer.Typer(
    name="deepmrf",
    help="Learnable Markov random fields for segmentation.\n\n"
    "Example: [bold]deepmrf bench --quick[/bold] measures every layer on small images in a few seconds.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"deepmrf {deepmrf.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Learnable Markov random fields for segmentation."""


app.command(help=TRAIN_HELP)(train)
app.command(help=EVALUATE_HELP)(evaluate)
app.command(help=BENCH_HELP)(bench)
app.add_typer(data_app, name="data")

__all__ = ["app", "main"]
