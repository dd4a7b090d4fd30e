"""What the commands share: how they fail, show progress, and print tables and sentences."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from deepmrf.data.progress import Progress
    from deepmrf.predict.result import ClassTotals

INTERRUPTED = "Interrupted: what is written is complete, and the same command goes on from here."
"""After Ctrl-C, for commands that begin where they were stopped."""
SECONDS_BEFORE_BAR = 2.0
"""Shorter work shows no progress bar."""
NARROW_TERMINAL, NARROW_BAR, WIDE_BAR = 100, 10, 40
"""In a terminal of so many columns or fewer, bars are short, so that the texts beside them fit."""
SECONDS_BETWEEN_LINES = 30.0
"""Without a terminal, so often a line says how far the work is."""
MAX_FAILURES_SHOWN = 20
"""Files that are named in a list of failures; the rest is counted."""


def fail(error: BaseException | str, code: int = 2) -> NoReturn:
    """Print one sentence on standard error, and exit."""
    typer.echo(plain(str(error)), err=True)
    raise typer.Exit(code) from None


@contextmanager
def sentences(*more: type[BaseException]) -> Iterator[None]:
    """Turn errors about the input, and those named, into one sentence and exit code 2."""
    errors: tuple[type[BaseException], ...] = (ValueError, OSError, ImportError, *more)
    try:
        yield
    except errors as error:
        fail(error)


def plain(text: str) -> str:
    """Replace what a terminal cannot show: file names may hold line ends, escapes and bytes of no character."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def say(text: str, console: Console, style: str = "") -> None:
    """Print one line as it is: no markup, no emoji codes, no line breaks."""
    console.print(plain(text), style=style, markup=False, emoji=False, soft_wrap=True, highlight=False)


def say_pairs(pairs: Mapping[str, str], console: Console, indent: str = "") -> None:
    """Print one line per name, with its text in a second column."""
    width = max(map(len, pairs), default=0)
    for name, text in pairs.items():
        say(f"{indent}{name:<{width}}  {text}", console)


def warn(texts: Iterable[str], console: Console) -> None:
    """Print lines in yellow."""
    for text in texts:
        say(text, console, "yellow")


def warn_of_failures(failures: Sequence[tuple[str, str]], console: Console) -> None:
    """Print why files failed, given as (name, reason): a reason stands once, with the names of all that have it.

    Beyond MAX_FAILURES_SHOWN, names are counted.
    """
    alike: dict[str, list[tuple[str, str]]] = {}
    for name, reason in failures[:MAX_FAILURES_SHOWN]:
        without_name = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "", reason)
        alike.setdefault(without_name, []).append((name, reason))
    for (_, reason), *others in alike.values():
        likewise = f" (likewise {', '.join(name for name, _ in others)})" if others else ""
        warn([f"{reason}{likewise}"], console)
    if len(failures) > MAX_FAILURES_SHOWN:
        warn([f"... and {len(failures) - MAX_FAILURES_SHOWN} more."], console)


class Bars:
    """Progress bars for a `with` block: they appear after two seconds of work, on a terminal, and go at the end.

    Elsewhere, such as in a log, a line on standard error says every half minute how far the work is.

    `bars.progress(name)` begins a bar and returns its Progress, so that `bars.progress` itself is a Phases. keep: leave
    the bars on the screen, one below the other; else a new bar replaces the last.
    """

    def __init__(self, console: Console, keep: bool = False) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(WIDE_BAR if console.width > NARROW_TERMINAL else NARROW_BAR),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )
        self.rich = RichProgress(
            *columns, console=console, transient=not keep, disable=not (keep or console.is_terminal)
        )
        self.keep, self.on_terminal = keep, console.is_terminal
        self.time_of_line = time.monotonic()
        self.tasks: dict[str, TaskID] = {}
        self.timer = threading.Timer(SECONDS_BEFORE_BAR, self.rich.start)

    def __enter__(self) -> Bars:
        self.timer.daemon = True
        self.timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()
        self.timer.join()
        self.rich.stop()

    def show(self, name: str, done: int, total: int | None, note: str = "") -> None:
        """Move the bar of that name, which appears with its first move."""
        if name not in self.tasks:
            for task in () if self.keep else self.tasks.values():
                self.rich.update(task, visible=False)
            self.tasks[name] = self.rich.add_task(plain(name), total=total, note=note)
        self.rich.update(self.tasks[name], completed=done, total=total, note=note)
        if not self.on_terminal and time.monotonic() - self.time_of_line > SECONDS_BETWEEN_LINES:
            self.time_of_line = time.monotonic()
            so_far = f"{done} of {total}" if total else str(done)
            typer.echo(plain(f"{name}: {so_far} {note}".rstrip()), err=True)

    def progress(self, name: str, unit: str = "") -> Progress:
        """The Progress of a bar; with a unit, such as "frames", it also shows how many are done in a second."""
        start = time.monotonic()

        def show(done: int, total: int | None) -> None:
            speed = f"{done / max(time.monotonic() - start, 1e-3):.1f} {unit}/s" if unit else ""
            self.show(name, done, total, speed)

        return show


def table(headings: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str | None = None) -> Table:
    """A table without lines whose first column is text and whose others are numbers; a Text keeps its colours.

    Nothing in it is taken for markup: labels, folders and files may hold brackets.
    """
    caption = None if title is None else Text(plain(title), "table.title")
    result = Table(title=caption, box=None, header_style="dim", pad_edge=False)
    for number, heading in enumerate(headings):
        result.add_column(Text(plain(heading)), justify="right" if number else "left")
    for row in rows:
        result.add_row(*[cell if isinstance(cell, Text) else Text(plain(cell)) for cell in row])
    return result


def class_table(totals: ClassTotals, unit: str = "") -> Table:
    """What each class covers, the largest first; unit: also in how many "images" or "frames" it is."""
    rows = []
    for item, number in totals.summary():
        pixels = f"{100 * item.share:.1f}%" if item.share >= 0.0005 else "<0.1%"
        rows.append((item.name, pixels, f"{percent(item.confidence, 0)}%", *[str(number)] * bool(unit)))
    return table(("class", "pixels", "confidence", *[unit] * bool(unit)), rows)


def percent(value: float | None, digits: int = 2) -> str:
    """A share such as 0.1234 as "12.34"; a missing one as "-"."""
    return "-" if value is None or value != value else f"{100 * value:.{digits}f}"


def count(number: int, noun: str) -> str:
    """ "1 frame", "2 frames"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def split_scales(inputs: Sequence[str], scales: Sequence[str]) -> tuple[list[str], list[float]]:
    """Return (inputs, factors) of "--scales 0.5,1" or "--scales 0.5 1".

    In the second form, the further numbers arrive among the inputs; a number that is no file is one of them.
    """
    words = [word for text in scales for word in text.replace(",", " ").split()]
    numbers = [text for text in inputs if scales and _is_number(text) and not Path(text).exists()]
    words += numbers
    for word in words:
        if not _is_number(word):
            fail(f"--scales {word} is no number: write factors such as --scales 0.75 1 1.25.")
    return [text for text in inputs if text not in numbers], [float(word) for word in words] or [1.0]


def split_settings(settings: Sequence[str] | None, example: str) -> dict[str, str]:
    """{key: value} of the words "key=value" that --set gave."""
    values = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            fail(f"--set {setting} has no value: write --set key=value, such as --set {example}.")
        values[key.strip()] = value.strip()
    return values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
