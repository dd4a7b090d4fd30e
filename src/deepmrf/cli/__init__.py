"""The `deepmrf` command: reads options and prints; the work is done elsewhere. Nothing else imports typer and rich.

training      deepmrf train, deepmrf evaluate
calibrate     deepmrf calibrate
predict       deepmrf predict
predictions   deepmrf fit, deepmrf refine
data          deepmrf data get, deepmrf data check
export        deepmrf export
bench         deepmrf bench
process       how threads wait, and what becomes of freed memory
"""

from __future__ import annotations

from typing import Annotated

import typer

import deepmrf
from deepmrf.cli import process  # first: before anything imports PyTorch
from deepmrf.cli.bench import BENCH_HELP, bench_command
from deepmrf.cli.calibrate import CALIBRATE_HELP, calibrate_command
from deepmrf.cli.data import data_app
from deepmrf.cli.export import EXPORT_HELP, export_command
from deepmrf.cli.predict import PREDICT_HELP, predict_command
from deepmrf.cli.predictions import FIT_HELP, REFINE_HELP, fit_command, refine_command
from deepmrf.cli.training import EVALUATE_HELP, TRAIN_HELP, evaluate, train

app = typer.Typer(
    name="deepmrf",
    help="Learnable Markov random fields for segmentation.\n\n"
    "Have pictures? [bold]deepmrf predict[/bold] segments them. "
    "Have a network? [bold]deepmrf fit[/bold] learns an MRF on its saved predictions, [bold]deepmrf refine[/bold] "
    "applies it. Have labelled images? [bold]deepmrf train[/bold]. In a hurry? [bold]deepmrf bench --quick[/bold].",
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


app.command(name="predict", help=PREDICT_HELP)(predict_command)
app.command(help=TRAIN_HELP)(train)
app.command(help=EVALUATE_HELP)(evaluate)
app.command(name="calibrate", help=CALIBRATE_HELP)(calibrate_command)
app.command(name="fit", help=FIT_HELP)(fit_command)
app.command(name="refine", help=REFINE_HELP)(refine_command)
app.command(name="export", help=EXPORT_HELP)(export_command)
app.command(name="bench", help=BENCH_HELP)(bench_command)
app.add_typer(data_app, name="data")

__all__ = ["app", "main", "process"]
