"""`deepmrf train` and `deepmrf evaluate`."""

from __future__ import annotations

import csv
import errno
import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from deepmrf.cli import process

TRAIN_HELP = """Train a Deep Parsing Network by a recipe: the paper's four stages, one after the other.

The run's folder holds the resolved recipe, a checkpoint that is always whole, metrics.json, curves.png, TensorBoard's
events and the model. Stop it when you like; [bold]--resume[/bold] continues exactly where it was.

[bold]Examples[/bold]

[cyan]deepmrf train recipes/street.toml --set data.train=camvid:data/camvid -o runs/fast[/cyan]

[cyan]deepmrf train recipes/street.toml -o runs/fast --resume[/cyan]

[cyan]deepmrf train recipes/camvid-vgg16.toml --set seed=1 --set stage.joint.steps=500[/cyan]

[cyan]accelerate launch -m deepmrf train recipes/camvid-strong.toml[/cyan]: on several GPUs or machines
"""

EVALUATE_HELP = """Measure a model on labelled images: mIoU, pixel accuracy, and the paper's TA, LA and BA.

Several models are averaged. Prints a table; with --out writes scores.json and scores.csv.

[bold]Examples[/bold]

[cyan]deepmrf evaluate runs/fast/model --data camvid:data/camvid --split val[/cyan]

[cyan]deepmrf evaluate runs/a/model runs/b/model --data voc:VOC2012 --scales 0.75 1 1.25 --flip[/cyan]

[cyan]deepmrf evaluate runs/fast/model --data camvid:data/camvid --stages[/cyan]: the network alone, too

[cyan]deepmrf evaluate runs/fast/model runs/3d/model --data camvid:data/camvid --video[/cyan]: frames in their order,
with temporal consistency; every model by itself, and models of clips with linked frames and without
"""


def fail(error: BaseException | str) -> NoReturn:
    """One sentence on standard error, and exit code 2."""
    typer.echo(str(error), err=True)
    raise typer.Exit(2) from None


def train(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a .toml file.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The run's folder; runs/RECIPE by default.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override the recipe; may be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in that folder.")] = False,
) -> None:
    """Train a Deep Parsing Network by a recipe."""
    process.load_torch()
    from deepmrf.training import recipe as recipes
    from deepmrf.training.start import STATE

    overrides = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            fail(f"--set {setting} has no value: write --set key=value, such as --set seed=1.")
        overrides[key.strip()] = value.strip()
    folder = out or Path("runs") / recipe.stem
    repeated = [word for setting in settings or [] for word in ("--set", setting)]
    words = ["deepmrf", "train", str(recipe), "-o", str(folder), "--resume", *repeated]
    again = subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
    try:
        loaded = recipes.load(recipe, overrides)
        scores = _watched(loaded, folder, resume)
    except KeyboardInterrupt:
        fail(f"Interrupted, continue with: {again}")
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        fail(error)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        if (folder / STATE).is_file():
            fail(f"Stopped, {reason}; the last good checkpoint is in {folder}, continue with: {again}")
        fail(f"Stopped, {reason}.")
    table = Table(title=f"{recipe.stem}, {loaded.data.val_split}, seed {loaded.seed}", box=None, header_style="dim")
    for heading in ("after stage", "mIoU", "pixels", "TA", "LA", "BA"):
        table.add_column(heading, justify="left" if heading == "after stage" else "right")
    for stage, found in scores.items():
        table.add_row(stage, *[percent(found[key]) for key in ("miou", "pixel_accuracy", "ta", "la", "ba")])
    console = Console()
    console.print(table)
    console.print(f"The model is in {folder / 'model'}.", soft_wrap=True)


def _watched(recipe: Any, folder: Path, resume: bool) -> dict[str, Any]:
    from deepmrf.training.loop import Watch
    from deepmrf.training.loop import train as run

    numbers = TextColumn("{task.fields[numbers]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), numbers)
    with Progress(*columns) as progress:
        tasks: dict[str, TaskID] = {}

        def moved(what: str, done: int, whole: int, values: dict[str, float]) -> None:
            shown = "  ".join(f"{name} {value:.3g}" for name, value in values.items())
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=whole, numbers=shown)
            progress.update(tasks[what], completed=done, total=whole, numbers=shown)

        return run(recipe, folder, resume, Watch(progress.console.print, moved))


def evaluate(
    models: Annotated[
        list[Path], typer.Argument(help="Trained models: folders, or names such as street; several are averaged.")
    ],
    data: Annotated[str, typer.Option(help="The data, such as camvid:PATH, voc:PATH or folder:PATH.")],
    split: Annotated[str, typer.Option(help="Which part of it.")] = "val",
    scales: Annotated[
        list[float] | None, typer.Option(help="Resize the image by these factors and average. [1]")
    ] = None,
    flip: Annotated[bool, typer.Option("--flip", help="Also the mirror image, averaged.")] = False,
    stages: Annotated[bool, typer.Option("--stages", help="Also the network alone (b11).")] = False,
    video: Annotated[
        bool, typer.Option("--video", help="Frames in order, with temporal consistency; models of clips need it not.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for scores.json and scores.csv.")] = None,
) -> None:
    """Measure a model on labelled images."""
    process.load_torch()
    from deepmrf.data import open_data
    from deepmrf.data.writing import check_folder
    from deepmrf.evaluation.evaluate import evaluate as measure
    from deepmrf.models.names import from_folder, open_model
    from deepmrf.predict.devices import chosen_device
    from deepmrf.predict.scales import averaged, mirrored, predictor, scaled

    # "--scales 0.75 1 1.25" leaves its further numbers among the models: no folder has such a name.
    numbers = [model for model in models if scales and _is_number(str(model)) and not model.exists()]
    scales = [*(scales or []), *[float(str(number)) for number in numbers]]
    models = [model for model in models if model not in numbers]
    try:
        if out is not None:  # before minutes are spent
            check_folder(out, "the scores")
        place = chosen_device(device)
        # A path has lost its "./": a folder goes before a bundled model of its name.
        loaded = [(from_folder(model) if model.is_dir() else open_model(model)).to(place) for model in models]
        images = open_data(data, split)
        for folder, model in zip(models, loaded, strict=True):
            if model.labels.names != images.labels.names:
                raise ValueError(
                    f"{folder} knows other labels ({len(model.labels)}) than {data} ({len(images.labels)}): match them."
                )
        video = video or any(model.mean_field is not None and model.mean_field.dims == 3 for model in loaded)
        if video and (scales or flip):
            raise ValueError("--scales and --flip are for images: leave them out for videos and models of clips.")
        found = _on_videos(models, loaded, images, place) if video else {}
        parts = {"network alone": lambda m: m.log_unary, "whole model": lambda m: m}
        for name in () if video else parts if stages else ("whole model",):
            predict = averaged([predictor(parts[name](model)) for model in loaded])
            predict = scaled(predict, scales or [1.0])
            predict = mirrored(predict) if flip else predict
            with bar() as progress:
                task = progress.add_task(name, total=len(images))
                found[name] = measure(predict, images, place, advance(progress, task))
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        fail(error)
    if video:
        _print_videos(found, f"{data}, {split}")
    else:
        _print_images(found, f"{data}, {split}")
    if out is not None:
        facts: dict[str, Any] = {"data": data, "split": split, "models": [str(m) for m in models]}
        facts |= {"video": True} if video else {"scales": scales or [1.0], "flip": flip}
        _write_scores(out, facts, found)


def bar() -> Progress:
    """A progress bar with a count and the time left."""
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


def _on_videos(folders: list[Path], loaded: list[Any], images: Any, place: Any) -> dict[str, Any]:
    from deepmrf.evaluation.evaluate import evaluate_video, video_parts

    names = [folder.parent.name if folder.name == "model" else folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    with bar() as progress:
        task = progress.add_task("frames", total=len(images))
        parts = video_parts(dict(zip(names, loaded, strict=True)))
        return dict(evaluate_video(parts, images, place, advance(progress, task)))


def _print_images(found: dict[str, Any], where: str) -> None:
    console = Console()
    for name, scores in found.items():
        table = Table(title=f"{name}: {where}, {scores.images} images", box=None, header_style="dim")
        for heading in ("class", "IoU", "accuracy", "TA", "LA", "BA"):
            table.add_column(heading, justify="left" if heading == "class" else "right")
        for row in scores.rows():
            table.add_row(row[0], *[percent(value) for value in row[1:]])
        console.print(table)
        console.print(f"mIoU {percent(scores.miou)}, pixel accuracy {percent(scores.pixel_accuracy)}")


def _print_videos(found: dict[str, Any], where: str) -> None:
    table = Table(title=f"{where}, frames in order", box=None, header_style="dim")
    for heading in ("", "mIoU", "pixels", "TA", "LA", "BA", "consistency"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, one in found.items():
        values = [getattr(one.scores, key) for key in ("miou", "pixel_accuracy", "ta", "la", "ba")]
        table.add_row(name, *[percent(value) for value in (*values, one.consistency)])
    Console().print(table)


def _write_scores(out: Path, facts: dict[str, Any], found: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    scores_json = {**facts, "scores": {name: scores.to_dict() for name, scores in found.items()}}
    (out / "scores.json").write_text(json.dumps(scores_json, indent=1) + "\n")
    with (out / "scores.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["part", "class", "iou", "accuracy", "ta", "la", "ba"])
        for name, one in found.items():
            writer.writerows([[name, *row] for row in getattr(one, "scores", one).rows()])
    Console().print(f"Wrote {out / 'scores.json'} and {out / 'scores.csv'}", soft_wrap=True)


def advance(progress: Progress, task: TaskID) -> Callable[[int, int], None]:
    """What moves a bar's task, told (done, in all)."""
    return lambda done, whole: progress.update(task, completed=done, total=whole)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def percent(value: float | None) -> str:
    """A share as "12.34", a missing one as "-"."""
    return "-" if value is None or value != value else f"{100 * value:.2f}"
