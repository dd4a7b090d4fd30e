"""`deepmrf calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deepmrf.cli import process
from deepmrf.cli.console import Bars, percent, say, sentences, table
from deepmrf.cli.options import NetworkOption, own_code

CALIBRATE_HELP = """Find the temperature at which a model is as sure as it is right.

It takes labelled images that the model was not trained on. Networks are surer of those than they should be; divided
by a temperature before the MRF, their output leaves more to the MRF, and the probabilities that come out mean what they
say. Of the temperatures tried, the one with the smallest negative log-likelihood (nll) is taken; --out writes the model
with it.

[bold]Examples[/bold]

[cyan]deepmrf calibrate runs/fast/model --data camvid:data/camvid[/cyan]: only look

[cyan]deepmrf calibrate runs/fast/model --data camvid:data/camvid -o calibrated[/cyan]

[cyan]deepmrf calibrate street --data folder:mine -t 1.5 -t 1.6 -t 1.7 -o street-here[/cyan]
"""


def calibrate_command(
    model: Annotated[str, typer.Argument(help="A bundled model's name, a trained model's folder, or a hub id.")],
    data: Annotated[str, typer.Option(help="The data, such as camvid:PATH, voc:PATH or folder:PATH.")],
    split: Annotated[str, typer.Option(help="Which part of it: not one that the model was trained on.")] = "val",
    temperatures: Annotated[
        list[float] | None,
        typer.Option("--temperature", "-t", help="Try this one; may be repeated. [1 1.25 1.5 1.75 2 2.5]"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the calibrated model.")] = None,
    network: NetworkOption = None,
) -> None:
    """Find the temperature at which a model is as sure as it is right."""
    process.prepare()
    console = Console()
    with sentences(RuntimeError), own_code(network):
        from deepmrf.data.writing import check_folder
        from deepmrf.evaluation.calibration import TEMPERATURES, best, calibrate
        from deepmrf.evaluation.models import open_models
        from deepmrf.models.folder import is_half
        from deepmrf.models.names import find_folder
        from deepmrf.models.parsing_network import write_model
        from deepmrf.predict.segmenter import chosen_device

        if out is not None:  # before minutes are spent
            check_folder(out, "the calibrated model")
        target = chosen_device(device)
        [opened], images = open_models([model], data, split, network)
        with Bars(console) as bars:
            tried = temperatures or TEMPERATURES
            rows = calibrate(opened.to(target), images, tried, target, bars.progress("images"))
        chosen = best(rows)
        if out is not None and opened.mean_field is not None:
            same = opened.video is not None and opened.video.temperature == opened.mean_field.temperature
            if opened.video is not None and same and opened.mean_field.can_inflate:  # else its field is divided already
                opened.video.temperature = chosen.temperature
            opened.mean_field.temperature = chosen.temperature
            values = {"split": split, "temperature": chosen.temperature, "nll": chosen.nll, "error": chosen.error}
            opened.card.metrics["calibration"] = {"data": data.split(":")[0], **values, "miou": chosen.miou}
            write_model(opened, out, is_half(find_folder(model)))
    headings = ("temperature", "mIoU", "pixels right", "sure of", "calibration error", "nll")
    cells = []
    for row in rows:
        shares = [percent(value) for value in (row.miou, row.accuracy, row.confidence, row.error)]
        cells.append((f"{row.temperature:g}", *shares, f"{row.nll:.4f}"))
    console.print(table(headings, cells, f"{model}: {data}, {split}, {len(images)} images"))
    say(f"Temperature {chosen.temperature:g} has the smallest nll.", console)
    others = [row.temperature for row in rows if row is not chosen]
    if others and not min(others) < chosen.temperature < max(others):
        say("None beyond it was tried: --temperature tries others.", console)
    if out is not None:
        say(f"Wrote {out}: deepmrf predict PHOTO --model {out}", console)
