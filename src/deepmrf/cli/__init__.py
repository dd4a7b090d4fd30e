"""The `deepmrf` command. A command parses its options, calls one function of the library and prints.

console       how commands fail, show progress, and print tables and sentences
process       threads, memory and output of the process, set when a command runs
options       options that several commands share: --network, --ray, --device, --scales, --flip
predict, video, fit, refine, train, evaluate, explain, calibrate, export, models, bench, doctor, data: one file per
command; page is that of `deepmrf app`
"""

from __future__ import annotations

from typing import Annotated

import typer

import deepmrf
from deepmrf.cli.bench import BENCH_HELP, bench_command
from deepmrf.cli.calibrate import CALIBRATE_HELP, calibrate_command
from deepmrf.cli.data import data_app
from deepmrf.cli.doctor import DOCTOR_HELP, doctor_command
from deepmrf.cli.evaluate import EVALUATE_HELP, evaluate_command
from deepmrf.cli.explain import EXPLAIN_HELP, explain_command
from deepmrf.cli.export import EXPORT_HELP, export_command
from deepmrf.cli.fit import FIT_HELP, fit_command
from deepmrf.cli.models import MODELS_HELP, models_command
from deepmrf.cli.options import RayCommand
from deepmrf.cli.page import APP_HELP, app_command
from deepmrf.cli.predict import PREDICT_HELP, predict_command
from deepmrf.cli.refine import REFINE_HELP, refine_command
from deepmrf.cli.train import TRAIN_HELP, train_command

app = typer.Typer(
    name="deepmrf",
    help="Learnable Markov random fields for segmentation.\n\n"
    "Have pictures? [bold]deepmrf predict[/bold] segments them. "
    "Have a network? [bold]deepmrf fit[/bold] learns an MRF on its saved predictions, [bold]deepmrf refine[/bold] "
    "applies it. Have labelled images? [bold]deepmrf train[/bold]. Is something missing? [bold]deepmrf doctor[/bold].",
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


app.command(name="predict", help=PREDICT_HELP, cls=RayCommand)(predict_command)
app.command(name="app", help=APP_HELP)(app_command)
app.command(name="models", help=MODELS_HELP)(models_command)
app.command(name="train", help=TRAIN_HELP)(train_command)
app.command(name="evaluate", help=EVALUATE_HELP)(evaluate_command)
app.command(name="explain", help=EXPLAIN_HELP)(explain_command)
app.command(name="calibrate", help=CALIBRATE_HELP)(calibrate_command)
app.command(name="fit", help=FIT_HELP)(fit_command)
app.command(name="refine", help=REFINE_HELP, cls=RayCommand)(refine_command)
app.command(name="export", help=EXPORT_HELP)(export_command)
app.command(
    name="bench",
    help=BENCH_HELP,
    add_help_option=False,  # the benchmark has a help of its own
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(bench_command)
app.command(name="doctor", help=DOCTOR_HELP)(doctor_command)
app.add_typer(data_app, name="data")
for command in (*app.registered_commands, *data_app.registered_commands):
    # Typer keeps the line breaks of the source; the width of the terminal shall decide.
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n")) or None

__all__ = ["app", "main"]
