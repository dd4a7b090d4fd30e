"""`deepmrf predict` on videos, folders of frames and cameras: which inputs they are, and what is printed of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from deepmrf.cli.console import Bars, class_table, count, percent, say, warn

if TYPE_CHECKING:
    from deepmrf.data.remote import URL
    from deepmrf.predict.segmenter import Segmenter
    from deepmrf.video import FrameSource, VideoReport

VIDEO_SUFFIXES = (
    *(".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".mpg", ".mpeg"),
    *(".mts", ".m2ts", ".wmv", ".flv", ".3gp", ".ogv"),
)
"""Files with these suffixes are videos."""
OVERLAY_SUFFIXES = ("_overlay.mp4", "_overlay.part.mp4")
"""How the names of our own videos end, finished and unfinished."""


def names_video(path: str | Path) -> bool:
    """Is this the name of a video file?"""
    return Path(path).suffix.lower() in VIDEO_SUFFIXES


def find_videos(inputs: Sequence[str], out: Path | URL, frames: bool) -> tuple[list[str], list[str]]:
    """(video files, cameras and folders of frames; the other inputs). frames: folders hold the frames of a video.

    Patterns that match videos, such as 'clips/*.mp4', are replaced by their matches. Our own videos with labels are
    left out, unless there is nothing else.
    """
    if not isinstance(out, Path) or any(map(_is_url, inputs)):
        for text in (*inputs, str(out)):
            if names_video(text):
                raise ValueError(f"{text} is a video, which is not read from or written to URLs: copy it.")
        return [], list(inputs)
    from deepmrf.predict.files import matches

    texts: list[str] = []
    for text in inputs:
        paths = matches(text)
        texts += paths if any(map(names_video, paths)) else [text]
    texts = [text for text in texts if not _is_overlay(text)] or texts
    videos = [text for text in texts if _is_video(text, frames or names_video(out))]
    return videos, [text for text in texts if text not in videos]


def _is_url(text: str) -> bool:
    if "://" not in text:
        return False
    from deepmrf.data.remote import URL, path_or_url

    return isinstance(path_or_url(text), URL)  # file:// is a path


def _is_overlay(text: str) -> bool:
    if not text.lower().endswith(OVERLAY_SUFFIXES):
        return False
    from deepmrf.video.earlier import is_recording

    with suppress(ImportError):  # without PyAV, every video is reported later
        return is_recording(Path(text))
    return False


def _is_video(text: str, frames: bool) -> bool:
    if os.path.isdir(text):
        return frames
    if os.path.isfile(text):
        return names_video(text)
    from deepmrf.video.reading import CAMERA_PREFIX

    return text.startswith(CAMERA_PREFIX)


def check(
    videos: Sequence[str], others: Sequence[str], out: Path | URL, overlay: bool, labels: Path | None, flow: str
) -> None:
    """Raise a ValueError where options do not fit the videos or the `others`, inputs that are no videos."""
    from deepmrf.predict.files import matches

    if labels is not None and not videos and all(os.path.lexists(text) for text in others):
        raise ValueError("--labels is for videos: the label maps of images are written into --out.")
    if flow not in ("dis-fast", "dis", "none"):
        raise ValueError(f"--flow {flow} is unknown: choose dis-fast, dis or none.")
    if videos and not overlay and labels is None:
        raise ValueError("Nothing would be written of the video: give --labels DIR, or leave out --no-overlay.")
    if len(videos) > 1 and labels is not None:
        raise ValueError(f"{labels} would get the label maps of {len(videos)} videos: give them in turn.")
    if len(videos) > 1 and names_video(out):
        raise ValueError(f"{out} is one video, but {len(videos)} were given: give a folder for them with --out.")
    if names_video(out) and not Path(out).is_dir():
        images = [path for text in others for path in matches(text)]
        if images:
            raise ValueError(f"{out} would be a video, but {images[0]} is an image: give a folder with --out.")
    if labels is not None and videos:
        from deepmrf.video.earlier import check_labels_folder

        check_labels_folder(labels, Path(videos[0]))
    stems = [Path(text).stem.casefold() for text in videos]
    for number, stem in enumerate(stems):
        if stem in stems[:number]:
            both = f"{videos[stems.index(stem)]} and {videos[number]}"
            target = Path(out) / f"{Path(videos[number]).stem}_overlay.mp4"
            raise ValueError(f"{both} would both be {target}: give them in turn.")


@dataclass
class Facts:
    """The part of the videos in --json."""

    videos: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    """Videos of which nothing, or only a part, was written; in the form of images that failed."""


def predict_videos(videos: Sequence[str], *arguments: Any, **options: Any) -> tuple[Facts, int]:
    """`predict_video` for each; return their part of --json and the exit code. Ctrl-C, code 130, means all of them."""
    facts, code = Facts(), 0
    for path in videos:
        code = max(code, predict_video(Path(path), *arguments, facts=facts, **options))
        if code == 130:
            break
    return facts, code


def predict_video(
    path: Path,
    segmenter: Segmenter,
    out: Path,
    overwrite: bool,
    *,
    overlay: bool,
    fps: float,
    console: Console,
    facts: Facts,
    **options: Any,
) -> int:
    """Segment one video and print what it shows; return the exit code, and add the video to the facts.

    options: those of `deepmrf.video.record`.
    """
    from deepmrf.video import ExistingFileError, open_source, record

    try:
        source = open_source(path, fps, segmenter.max_pixels)
        target = _target(source, out) if overlay else None
        with Bars(console) as bars:
            options["progress"] = bars.progress(Path(source.name).name, "frames")
            report = record(segmenter, source, target, overwrite=overwrite, resume=not overwrite, **options)
    except (ValueError, OSError, ImportError) as error:
        hint = " --overwrite replaces it." if isinstance(error, ExistingFileError) else ""
        reason = str(error).splitlines()[0] + hint
        facts.failed.append({"image": str(path), "why": reason})
        warn([reason], console)
        return 1
    facts.videos.append(report.to_dict(source))
    if report.failed:
        facts.failed.append({"image": str(path), "why": report.failed})
    if report.done_before == "all":
        say(f"{report.path} is there already: --overwrite does it again.", console)
        return 0
    return _print(source, report, console)


def _target(source: FrameSource, out: Path) -> Path:
    """The video to write: `out` itself, or one in the folder `out`."""
    if names_video(out):
        return out
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: give a folder for the results, or a video such as out.mp4, with --out.")
    return out / f"{source.stem}_overlay.mp4"


def _print(source: FrameSource, report: VideoReport, console: Console) -> int:
    """Print the classes, warnings and paths of a video; return the exit code."""
    if report.frames:
        console.print(class_table(report, "frames"))
    if report.consistency is not None:
        consistency = f"{percent(report.consistency)}% of pixels keep their label along the flow"
        say(f"Temporal consistency: {consistency}.", console)
    warn(report.warnings(source), console)
    path = report.path if report.done_before == "nothing" else None
    target = path or report.labels
    rest = f"{target} holds {count(report.frames, 'frame')}" if report.frames and target else "nothing was written"
    if report.interrupted:
        again = "; the same command begins it anew" if path is not None and report.frames else ""
        say(f"Interrupted: {rest}{again}.", console)
        return 130
    if report.failed:
        warn([f"{report.failed.rstrip('.')}; {rest}."], console)
        return 1
    written = []
    if path is not None:
        linked = ", linked along the flow" if report.linked else ""
        written.append(f"{path} ({count(report.frames, 'frame')}{linked})")
    if report.labels is not None:
        written.append(f"{count(report.frames, 'label map')} in {report.labels}")
    say(f"Wrote {' and '.join(written)}." if written else "The overlay is there already.", console)
    return 0
