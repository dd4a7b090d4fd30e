"""Commands that SIGKILL ends at a random moment; begun again, they leave what an uninterrupted run leaves."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from campaign import Outcome, Part, contents, deepmrf

RECIPE = """
seed = 0
save_every = 5
data = { train = "synthetic:24x32", workers = 0 }
unary = { network = "fast", options = { width = 8, norm_momentum = 0.1 } }
mean_field = { window = 3, contexts = 2, context_size = 3 }
augment = { crop = [24, 32] }
stage = [
  { name = "unary", learn = ["unary"], steps = 40, batch = 2 },
  { name = "joint", learn = ["unary", "triple_penalty", "label_contexts"], steps = 20, batch = 2 },
]
"""


@dataclass(frozen=True)
class Command:
    """A command, what it writes, and how it is begun again."""

    words: tuple[object, ...]
    """"OUT" among them stands for the folder of results."""
    files: tuple[str, ...] = ("*",)
    """Patterns of files that are the same after every run: others hold dates and seconds."""
    again: tuple[str, ...] = ()
    """Further words where `state` exists."""
    state: str = ""

    def run(self, out: Path, **options: object) -> Outcome:
        """Run it, with its results below `out`."""
        words = [Path(str(word).replace("OUT", str(out))) if "OUT" in str(word) else word for word in self.words]
        return deepmrf(*words, *(self.again if self.state and (out / self.state).exists() else ()), **options)

    def results(self, out: Path) -> dict[str, str]:
        """Digests of what it has written."""
        return contents(out, *self.files)


def commands(work: Path) -> dict[str, Command]:
    """The commands of the campaign, by name."""
    model, fit = ("-m", work / "model"), work / "fit"
    video = ("predict", work / "film.mp4", "--labels", "OUT/maps", *model, "-o")
    folders = ("--predictions", fit / "predictions", "--images", fit / "images")
    quick = ("--window", 3, "--contexts", 1, "--context-size", 3, "--folds", 2, "--crop", 16)
    steps = ("--penalty-steps", 5, "--contexts-steps", 5, "--kernel", "distance", "--no-gate", "--temperature", 1)
    (work / "recipe.toml").write_text(RECIPE)
    return {
        "predict": Command(("predict", work / "photos", "-o", "OUT/out", "--probabilities", *model)),
        **{f"video, {suffix}": Command((*video, f"OUT/film{suffix}")) for suffix in (".mp4", ".mkv", ".webm")},
        "refine": Command(("refine", "--preset", "maskcut", *folders, "-o", "OUT/out")),
        "fit": Command(
            ("fit", *folders, "--masks", fit / "masks", "-o", "OUT/mrf", *quick, *steps), ("*.safetensors",)
        ),
        "train": Command(
            ("train", work / "recipe.toml", "-o", "OUT/run"),
            ("model.safetensors", "metrics.json"),
            ("--resume",),
            "run/state.safetensors",
        ),
    }


def reference(name: str, command: Command, work: Path, part: Part) -> tuple[dict[str, str], float]:
    """What an uninterrupted run writes, and its seconds."""
    out = work / "reference" / name
    seconds = 0.0
    if not out.exists():
        outcome = command.run(out)
        part.add(f"{name}, uninterrupted", outcome.problem(0), outcome)
        seconds = outcome.seconds
    return command.results(out), seconds


def compare(expected: dict[str, str], actual: dict[str, str], out: Path) -> str:
    """How results differ from those of an uninterrupted run, "" if they do not."""
    if left := [path.name for path in out.rglob("*") if ".part" in path.name]:
        return f"left behind: {left}"
    names = sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
    return f"{len(names)} files differ: {', '.join(names[:3])}" if names else ""


def killed_commands(part: Part, work: Path, count: int, seed: int) -> None:
    """Kill every command `count` times, and begin it again."""
    rng = random.Random(seed)
    for name, command in commands(work).items():
        expected, seconds = reference(name, command, work, part)
        for number in range(count):
            out, after = work / "killed" / name / str(number), rng.uniform(0.2, 1.0) * seconds
            killed = command.run(out, kill_after=after)
            finished = command.run(out)
            problem = killed.problem(0, -9) or finished.problem(0) or compare(expected, command.results(out), out)
            part.add(f"{name}, killed after {after:.1f} of {seconds:.1f} s", problem, finished)
            shutil.rmtree(out, ignore_errors=True)
