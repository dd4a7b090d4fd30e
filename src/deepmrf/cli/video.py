"""`deepmrf predict` on videos, folders of frames and cameras: the overlay as a video, and what was found in it."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from deepmrf.cli.console import plain

if TYPE_CHECKING:
    from deepmrf.predict.segmenter import Segmenter
    from deepmrf.video import Recording, Source

VIDEOS = (
    ".mp4",
    ".mov",
    ".m4v",
    ".mkv",
    ".webm",
    ".avi",
    ".mpg",
    ".mpeg",
    ".mts",
    ".m2ts",
    ".wmv",
    ".flv",
    ".3gp",
    ".ogv",
)
"""By which a file counts as a video."""
CAMERA = "camera:"


@dataclass(frozen=True)
class VideoOptions:
    """What `deepmrf predict` is told about videos."""

    overlay: bool = True
    """Write the video with its labels painted over it."""
    labels: Path | None = None
    """A folder for label maps, one PNG a frame."""
    frames: bool = False
    """Folders hold the frames of a video."""
    fps: float = 25.0
    """Of those."""
    max_frames: int | None = None
    """Stop after so many."""
    flow: str = "dis"
    """"dis" or "none"."""
    consistency: bool = False
    """Measure temporal consistency, whatever the model."""
    probabilities: bool = False
    """Asked for, but for images only."""


def expanded(inputs: list[str]) -> list[str]:
    """The inputs, with what patterns match in their place where videos are among it, such as 'clips/*.mp4'.

    Overlays that earlier runs wrote among them are passed over, unless there is nothing else.
    """
    made: list[str] = []
    for text in inputs:
        matches = [] if os.path.lexists(text) else sorted(glob.glob(text, recursive=True))
        made += matches if any(match.lower().endswith(VIDEOS) for match in matches) else [text]
    return [text for text in made if not _is_overlay(text)] or made


def _is_overlay(text: str) -> bool:
    from deepmrf.video.recording import is_recording

    with suppress(ImportError):  # of PyAV: each video will tell
        return text.lower().endswith("_overlay.mp4") and is_recording(Path(text))
    return False


def is_video(text: str, out: Path, options: VideoOptions) -> bool:
    """Is this input a video file, a camera, or a folder whose images are to become a video?"""
    path = Path(text)
    if path.is_dir():
        return options.frames or out.suffix.lower() in VIDEOS
    return text.startswith(CAMERA) or (text.lower().endswith(VIDEOS) and path.is_file())


def check(videos: list[str], out: Path, options: VideoOptions, others: Sequence[str] = ()) -> None:
    """Is there something to write, and has each video a name of its own for it? others: inputs that are no videos."""
    if options.labels is not None and not videos and all(os.path.lexists(text) for text in others):
        raise ValueError("--labels is for videos: the label maps of images are written into --out.")
    if options.flow not in ("dis", "none"):
        raise ValueError(f"--flow {options.flow} is unknown: choose dis or none.")
    if videos and not options.overlay and options.labels is None:
        raise ValueError("Nothing would be written of the video: give --labels DIR, or leave out --no-overlay.")
    if videos and options.probabilities:
        raise ValueError("--probabilities is for images: those of every frame of a video would fill a disk.")
    if len(videos) > 1 and options.labels is not None:
        raise ValueError(f"{options.labels} would get the label maps of {len(videos)} videos: give them in turn.")
    if len(videos) > 1 and out.suffix.lower() in VIDEOS:
        raise ValueError(f"{out} is one video, but {len(videos)} were given: give a folder for them with --out.")
    if options.labels is not None and videos:
        from deepmrf.video.recording import check_folder

        check_folder(options.labels, Path(videos[0]))
    stems = [Path(text).stem.casefold() for text in videos]
    for number, stem in enumerate(stems):
        if stem in stems[:number]:
            both = f"{videos[stems.index(stem)]} and {videos[number]}"
            raise ValueError(f"{both} would both be {out / Path(videos[number]).stem}_overlay.mp4: give them in turn.")


def predict_video(
    path: Path | str,
    segmenter: Segmenter,
    out: Path,
    *,
    overwrite: bool = False,
    console: Console | None = None,
    options: VideoOptions | None = None,
    entries: list[dict[str, Any]] | None = None,
) -> int:
    """Segment one video and say what was found; returns the exit code. `entries` gets its part of --json."""
    from deepmrf.video import open_source, record

    console, options = console or Console(highlight=False), options or VideoOptions()
    try:
        source = open_source(path, options.fps, segmenter.max_pixels)
        target = _target(source, out) if options.overlay else None
        flow: Any = None if options.flow == "none" else "dis"
        there = "" if target is None or overwrite else _is_there(target, segmenter, source, options, flow)
        if there == "all":
            _say(console, f"{target} is there already: --overwrite does it again.")
            if entries is not None:
                labels = None if options.labels is None else str(options.labels)
                entries.append({"video": source.name, "overlay": str(target), "labels": labels, "there_already": True})
            return 0
        with _bar(console, source.name) as progress:
            made = record(
                segmenter,
                source,
                None if there else target,  # a whole one would be lost if this run were stopped
                labels=options.labels,
                flow=flow,
                consistency=options.consistency,
                max_frames=options.max_frames,
                overwrite=overwrite,
                progress=progress,
            )
    except (ValueError, OSError, ImportError) as why:
        _say(console, str(why).splitlines()[0], "yellow")
        return 1
    if entries is not None:
        entries.append(_entry(source, made) | {"overlay": None if target is None else str(target)})
    return _report(source, made, console)


def _target(source: Source, out: Path) -> Path:
    path = out if out.suffix.lower() in VIDEOS else out / f"{source.stem}_overlay.mp4"
    if path.exists() and Path(source.name).exists() and path.samefile(source.name):
        raise ValueError(f"{path} is the video itself, and would be overwritten: choose another --out.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give a video that is none, such as out.mp4, with --out.")
    if path is not out and out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: give a folder for the results, or a video such as out.mp4, with --out.")
    return path


def _is_there(path: Path, segmenter: Segmenter, source: Source, options: VideoOptions, flow: Any) -> str:
    """What is done of this very video: "all" that is wanted, its "overlay", or "" where that is to be written.

    Other files are not touched; one that was cut short is.
    """
    from deepmrf.video.recording import earlier, maps_there, note_of

    if not path.exists() or not path.stat().st_size:
        return ""
    note = note_of(segmenter, source, flow)
    made, limit = earlier(path, note), options.max_frames
    if made is None:
        other = f"{path} is there, and not of this video by this model with these settings"
        raise ValueError(f"{other}: --overwrite replaces it.")
    if not made.whole and (limit is None or made.frames < limit):
        return ""
    wanted = made.frames if limit is None else min(made.frames, limit)
    mapped = options.labels is None or maps_there(options.labels, note) >= wanted
    return "all" if mapped and not options.consistency else "overlay"


@contextmanager
def _bar(console: Console, name: str) -> Iterator[Callable[[int, int | None], None]]:
    """A bar that is told (frames done, frames in all or None)."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    start = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(plain(Path(name).name), total=None, speed="")

        def tell(done: int, whole: int | None) -> None:
            speed = f"{done / max(time.monotonic() - start, 1e-3):.1f} frames/s"
            progress.update(task, completed=done, total=whole, speed=speed)

        yield tell


def _report(source: Source, made: Recording, console: Console) -> int:
    if made.frames:
        console.print(_table(made))
    if made.consistency is not None:
        _say(console, f"Temporal consistency: {100 * made.consistency:.2f}% of pixels keep their label along the flow.")
    if made.skipped:
        were = "was" if made.skipped == 1 else "were"
        _say(console, f"{_count(made.skipped, 'frame')} could not be read and {were} left out.", "yellow")
    if made.missing:
        said = made.missing + made.frames + made.skipped
        says = f"says it has {said}" if source.counted else f"should have about {said}"
        text = f"{source.name} {says} frames, but {said - made.missing} were found: it may be cut off."
        _say(console, text, "yellow")
    if made.silent:
        _say(console, f"{source.name}: {made.silent}; the video is silent (.mkv holds every kind).", "yellow")
    place = made.path or made.labels
    held = f"{place} holds {_count(made.frames, 'frame')}" if made.frames and place else "nothing was written"
    if made.interrupted:
        _say(console, f"Interrupted: {held}.")
        return 130
    if made.failed:
        _say(console, f"{made.failed.rstrip('.')}; {held}.", "yellow")
        return 1
    maps = f"{_count(made.frames, 'label map')} in {made.labels}"
    video = f"{made.path} ({_count(made.frames, 'frame')})"
    parts = [video] * (made.path is not None) + [maps] * (made.labels is not None)
    _say(console, f"Wrote {' and '.join(parts)}." if parts else "The overlay is there already.")
    return 0


def _table(made: Recording) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in ("class", "pixels", "confidence", "frames"):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for found, frames in made.summary():
        share = f"{100 * found.share:.1f}%" if found.share >= 0.0005 else "<0.1%"
        table.add_row(Text(plain(found.name)), share, f"{100 * found.confidence:.0f}%", str(frames))
    return table


def _entry(source: Source, made: Recording) -> dict[str, Any]:
    found = [
        {"class": one.name, "share": round(one.share, 6), "confidence": round(one.confidence, 4), "frames": frames}
        for one, frames in made.summary()
    ]
    return {
        "video": source.name,
        "overlay": None if made.path is None else str(made.path),
        "labels": None if made.labels is None else str(made.labels),
        "frames": made.frames,
        "skipped": made.skipped,
        "complete": not (made.interrupted or made.failed or made.missing),
        "consistency": made.consistency,
        "seconds": {stage: round(value, 3) for stage, value in made.seconds.items()},
        "found": found,
    }


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(plain(text), style=style, markup=False, soft_wrap=True)
