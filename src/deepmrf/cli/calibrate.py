"""`deepmrf calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deepmrf.cli import process
from deepmrf.cli.training import advance, bar, fail, percent

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
) -> None:
    """Find the temperature at which a model is as sure as it is right."""
    process.load_torch()
    console = Console()
    try:
        from deepmrf.data import open_data
        from deepmrf.data.writing import check_folder
        from deepmrf.evaluation.calibration import TEMPERATURES, best, calibrate
        from deepmrf.models.names import open_model
        from deepmrf.models.parsing_network import save
        from deepmrf.predict.devices import chosen_device

        if out is not None:  # before minutes are spent
            check_folder(out, "the calibrated model")
        place = chosen_device(device)
        loaded, images = open_model(model).to(place), open_data(data, split)
        if loaded.labels.names != images.labels.names:
            raise ValueError(
                f"{model} knows other labels ({len(loaded.labels)}) than {data} ({len(images.labels)}): match them."
            )
        with bar() as progress:
            task = progress.add_task("images", total=len(images))
            rows = calibrate(loaded, images, temperatures or TEMPERATURES, place, advance(progress, task))
        chosen = best(rows)
        if out is not None and loaded.mean_field is not None:
            loaded.mean_field.temperature = chosen.temperature
            found = {"split": split, "temperature": chosen.temperature, "nll": chosen.nll, "error": chosen.error}
            loaded.card.metrics["calibration"] = {"data": data.split(":")[0], **found, "miou": chosen.miou}
            save(loaded, out)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        fail(error)
    table = Table(title=f"{model}: {data}, {split}, {len(images)} images", box=None, header_style="dim")
    for heading in ("temperature", "mIoU", "pixels right", "sure of", "calibration error", "nll"):
        table.add_column(heading, justify="right")
    for row in rows:
        values = [percent(value) for value in (row.miou, row.accuracy, row.confidence, row.error)]
        table.add_row(f"{row.temperature:g}", *values, f"{row.nll:.4f}", style="bold" if row == chosen else None)
    console.print(table)
    console.print(f"Temperature {chosen.temperature:g} has the smallest nll.")
    others = [row.temperature for row in rows if row is not chosen]
    if others and not min(others) < chosen.temperature < max(others):
        console.print("None beyond it was tried: --temperature tries others.")
    if out is not None:
        console.print(f"Wrote {out}: deepmrf predict PHOTO --model {out}", soft_wrap=True)
