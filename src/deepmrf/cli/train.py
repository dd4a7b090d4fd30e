"""`deepmrf train`."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deepmrf.cli import process
from deepmrf.cli.console import Bars, fail, percent, say, say_pairs, split_settings, table
from deepmrf.cli.options import NetworkOption, own_code

TRAIN_HELP = """Train a Deep Parsing Network by a recipe: the paper's four stages, one after the other.

The run's folder holds the resolved recipe, a checkpoint that is always whole, metrics.json, TensorBoard's events
and the model. Stop it when you like; [bold]--resume[/bold] continues exactly where it was.

A recipe is a .toml file, or the name of one that comes with deepmrf: [cyan]--list[/cyan] shows them. They expect their
data and ImageNet weights where [bold]deepmrf data get[/bold] puts them.

[bold]Examples[/bold]

[cyan]deepmrf train camvid --set data.train=camvid:data/camvid -o runs/fast[/cyan]

[cyan]deepmrf train camvid -o runs/fast --resume[/cyan]

[cyan]deepmrf train camvid-vgg16 --set seed=1 --set stage.joint.steps=500[/cyan]

[cyan]deepmrf train recipe.toml --network mynet:build[/cyan]: a network of your own instead of the recipe's

[cyan]accelerate launch -m deepmrf train camvid-strong[/cyan]: on several GPUs or machines
"""


def _list_recipes(asked: bool) -> None:
    """For --list: print the recipes that come with deepmrf and exit, whatever else was given."""
    if not asked:
        return
    from deepmrf.training.recipes import bundled_recipes, describe_recipe, recipe_folder

    console, recipes = Console(), bundled_recipes()
    say_pairs({name: describe_recipe(path) for name, path in recipes.items()}, console)
    say(f"The files are in {recipe_folder()}: copy one to change it, or use --set.", console)
    raise typer.Exit


def train_command(
    recipe: Annotated[str, typer.Argument(help="The recipe: a .toml file, or a name of --list.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The run's folder; runs/RECIPE by default.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override the recipe; may be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in that folder.")] = False,
    listed: Annotated[
        bool,
        typer.Option("--list", callback=_list_recipes, is_eager=True, help="Show the recipes of deepmrf and stop."),
    ] = False,
    network: NetworkOption = None,
) -> None:
    """Train a Deep Parsing Network by a recipe."""
    process.prepare()
    from deepmrf.training.loop import train
    from deepmrf.training.memory import is_out_of_memory
    from deepmrf.training.recipe import read_recipe
    from deepmrf.training.recipes import find_recipe, short_name
    from deepmrf.training.start import STATE_FILE

    console, name = Console(), short_name(recipe)
    folder = out or Path("runs") / name
    repeated = [word for setting in settings or [] for word in ("--set", setting)]
    repeated += ["--network", network] if network else []
    again = _as_command("deepmrf", "train", recipe, "-o", str(folder), "--resume", *repeated)
    try:
        loaded = read_recipe(find_recipe(recipe), split_settings(settings, "seed=1"))
        with Bars(console, keep=True) as bars, own_code(network):

            def show(name: str, done: int, total: int, values: dict[str, float]) -> None:
                bars.show(name, done, total, "  ".join(f"{key} {value:.3g}" for key, value in values.items()))

            scores = train(
                loaded,
                folder,
                resume,
                network=network,
                message=lambda text: say(text, bars.rich.console),
                progress=show,
            )
    except KeyboardInterrupt:
        fail(f"Interrupted, continue with: {again}")
    except (ValueError, ImportError, FileNotFoundError, FloatingPointError) as error:
        fail(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        fail(f"Stopped, the memory is full: make batch or crop smaller in a new folder, or continue with: {again}")
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        if (folder / STATE_FILE).is_file():
            fail(f"Stopped, {reason}; the last good checkpoint is in {folder}, continue with: {again}")
        fail(f"Stopped, {reason}.")
    keys = ("miou", "pixel_accuracy", "ta", "la", "ba")
    rows = [(stage, *[percent(values[key]) for key in keys]) for stage, values in scores.items()]
    title = f"{name}, {loaded.data.val_split}, seed {loaded.seed}"
    console.print(table(("after stage", "mIoU", "pixels", "TA", "LA", "BA"), rows, title))
    say(f"The model is in {folder / 'model'}.", console)


def _as_command(*words: str) -> str:
    """Words as one would type them."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
