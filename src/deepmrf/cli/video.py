"""`deepmrf predict` on videos, folders of frames and cameras."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from deepmrf.cli.console import Bars, count, percent, say, share, table, warn

if TYPE_CHECKING:
    from deepmrf.predict.segmenter import Segmenter
    from deepmrf.video import FrameSource, VideoReport


@dataclass(frozen=True)
class VideoOptions:
    """The options of `deepmrf predict` that concern videos."""

    overlay: bool = True
    """Write the video with its labels painted over it."""
    labels: Path | None = None
    """A folder for label maps, one PNG per frame."""
    frames: bool = False
    """Folders hold the frames of a video."""
    fps: float = 25.0
    """Frames per second of such folders."""
    max_frames: int | None = None
    """Stop after this many frames."""
    flow: str = "dis-fast"
    """"dis-fast", "dis" or "none"."""
    consistency: bool = False
    """Measure temporal consistency also for models of single frames."""
    probabilities: bool = False
    """Given, but only possible for images."""
    legend: bool = True
    """Draw the classes and their colours below or beside the frames."""
    coco: bool = False
    """Given, but only possible for images."""
    frame_by_frame: bool = False
    """Do not link frames, also where the model has a part for video."""
    full_precision: bool = False
    """The network computes in float32 also where bfloat16 is faster."""


def check(videos: list[str], out: Path, options: VideoOptions, others: Sequence[str] = ()) -> None:
    """Raise a ValueError where options do not fit the videos or the `others`, inputs that are no videos."""
    from deepmrf.video.earlier import check_labels_folder
    from deepmrf.video.inputs import names_video

    if options.labels is not None and not videos and all(os.path.lexists(text) for text in others):
        raise ValueError("--labels is for videos: the label maps of images are written into --out.")
    if options.flow not in ("dis-fast", "dis", "none"):
        raise ValueError(f"--flow {options.flow} is unknown: choose dis-fast, dis or none.")
    if videos and not options.overlay and options.labels is None:
        raise ValueError("Nothing would be written of the video: give --labels DIR, or leave out --no-overlay.")
    if videos and options.probabilities:
        raise ValueError("--probabilities is for images: those of every frame of a video would fill a disk.")
    if videos and options.coco:
        raise ValueError("--coco is for images: give the frames as a folder of images, without a video for --out.")
    if len(videos) > 1 and options.labels is not None:
        raise ValueError(f"{options.labels} would get the label maps of {len(videos)} videos: give them in turn.")
    if len(videos) > 1 and names_video(out):
        raise ValueError(f"{out} is one video, but {len(videos)} were given: give a folder for them with --out.")
    if options.labels is not None and videos:
        check_labels_folder(options.labels, Path(videos[0]))
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
    """Segment one video and print what it shows; return the exit code, and append the video's part of --json."""
    from deepmrf.video import ExistingFileError, open_source, record

    console, options = console or Console(highlight=False), options or VideoOptions()
    try:
        source = open_source(path, options.fps, segmenter.max_pixels)
        with Bars(console) as bars:
            report = record(
                segmenter,
                source,
                _target(source, out) if options.overlay else None,
                labels=options.labels,
                flow=None if options.flow == "none" else "dis" if options.flow == "dis" else "dis-fast",
                consistency=options.consistency,
                max_frames=options.max_frames,
                frame_by_frame=options.frame_by_frame,
                full_precision=options.full_precision,
                legend=options.legend,
                overwrite=overwrite,
                resume=not overwrite,
                progress=bars.progress(Path(source.name).name, "frames"),
            )
    except (ValueError, OSError, ImportError) as error:
        hint = " --overwrite replaces it." if isinstance(error, ExistingFileError) else ""
        warn([str(error).splitlines()[0] + hint], console)
        return 1
    if entries is not None:
        entries.append(report.to_dict(source))
    if report.done_before == "all":
        say(f"{report.path} is there already: --overwrite does it again.", console)
        return 0
    return _print(source, report, console)


def _target(source: FrameSource, out: Path) -> Path:
    """The video to write: `out` itself, or one in the folder `out`."""
    from deepmrf.video.inputs import names_video

    if names_video(out):
        return out
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: give a folder for the results, or a video such as out.mp4, with --out.")
    return out / f"{source.stem}_overlay.mp4"


def _print(source: FrameSource, report: VideoReport, console: Console) -> int:
    """Print the classes, warnings and paths of a video; return the exit code."""
    if report.frames:
        rows = [
            (item.name, share(item.share), f"{percent(item.confidence, 0)}%", str(frames))
            for item, frames in report.summary()
        ]
        console.print(table(("class", "pixels", "confidence", "frames"), rows))
    if report.consistency is not None:
        consistency = f"{percent(report.consistency)}% of pixels keep their label along the flow"
        say(f"Temporal consistency: {consistency}.", console)
    warn(report.warnings(source), console)
    path = report.path if report.done_before == "nothing" else None
    target = path or report.labels
    rest = f"{target} holds {count(report.frames, 'frame')}" if report.frames and target else "nothing was written"
    if report.interrupted:
        say(f"Interrupted: {rest}.", console)
        return 130
    if report.failed:
        warn([f"{report.failed.rstrip('.')}; {rest}."], console)
        return 1
    written = []
    if path is not None:
        written.append(f"{path} ({count(report.frames, 'frame')})")
    if report.labels is not None:
        written.append(f"{count(report.frames, 'label map')} in {report.labels}")
    say(f"Wrote {' and '.join(written)}." if written else "The overlay is there already.", console)
    return 0
