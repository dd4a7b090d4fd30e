"""Decide what an earlier recording has done, and which files may be replaced.

A video is recorded as NAME.part.mp4, which becomes NAME.mp4 when it is finished: a file with the final name was never
interrupted. An unfinished video of deepmrf is replaced, and so is a NAME.part.mp4 that is no video. The comment of a
video, and the text in its label maps, identifies what wrote it:

    deepmrf MODEL FLOW SOURCE NAME [max_frames=N]      # MODEL and SOURCE are hashes, NAME is the source's file name

The FLOW of a video with a legend is written FLOW+legend.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from deepmrf.data.writing import is_special
from deepmrf.flow.estimation import Method
from deepmrf.predict.notes import has_content, is_label_map
from deepmrf.predict.segmenter import Segmenter
from deepmrf.video.reading import FrameFolder, FrameSource, import_av, seconds_of

Done = Literal["nothing", "overlay", "all"]
"""What need not be done again."""
LIMIT = " max_frames="


class ExistingFileError(ValueError):
    """A file is in the way that no recording with the same settings has written."""


def note_of(segmenter: Segmenter, source: FrameSource, flow: Method | None, legend: bool = False) -> str:
    """The text that identifies model, settings and source of a recording; `legend` is of its video alone."""
    name = os.fsencode(Path(source.name).name).decode(errors="replace")
    method = flow if isinstance(flow, str | None) else "custom"
    return f"deepmrf {segmenter.identity} {method}{'+legend' * legend} {source.key()} {name}"


def comment_of(note: str, max_frames: int | None) -> str:
    """The comment of a video that was recorded with this note."""
    return note if max_frames is None else f"{note}{LIMIT}{max_frames}"


def part_of(path: Path) -> Path:
    """The path at which a video is recorded until it is finished, beside the file that a link leads to."""
    path = path.resolve() if path.is_symlink() else path
    return path.with_name(f"{path.stem}.part{path.suffix}")


def is_recording(path: Path, otherwise: bool = False) -> bool:
    """Was this video recorded by deepmrf? `otherwise` is the answer for a file that is no video."""
    av = import_av()
    with contextlib.suppress(av.FFmpegError, ValueError), av.open(str(path), metadata_errors="replace") as file:
        return any(comment.startswith("deepmrf ") for comment in _comments(file))
    return otherwise


def check_out(path: Path, source: FrameSource) -> None:
    """Raise a ValueError where a video cannot be written to `path`."""
    for target in (path, part_of(path)):
        if is_special(target):
            raise ValueError(f"{target} is a device or a pipe, which cannot hold a video: choose another file.")
        if target.exists() and Path(source.name).exists() and target.samefile(source.name):
            raise ValueError(f"{target} is the video itself, which the result would replace: choose another file.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give a video file, such as out.mp4.")


def done_before(
    path: Path, labels: Path | None, video_note: str, note: str, max_frames: int | None, consistency: bool
) -> Done:
    """What earlier recordings have finished; raises ExistingFileError if another file would be replaced."""
    if has_content(path):
        frames, complete = _read_earlier(path, video_note)
        if complete or (max_frames is not None and frames >= max_frames):
            frames = frames if max_frames is None else min(frames, max_frames)
            has_labels = labels is None or sum(is_label_map(file, note) for file in labels.glob("*.png")) >= frames
            return "all" if has_labels and not consistency else "overlay"
    part = part_of(path)
    if has_content(part) and not is_recording(part, otherwise=True):  # a killed process may leave a few bytes
        raise _other_file(part)
    return "nothing"


def _read_earlier(path: Path, note: str) -> tuple[int, bool]:
    """(the frames of a video with this note, are they all of its source?).

    Raise ExistingFileError if it is unreadable or has another note.
    """
    av = import_av()
    try:
        with av.open(str(path), metadata_errors="replace") as file:
            comment = next((text for text in _comments(file) if text == note or text.startswith(note + LIMIT)), None)
            if comment is not None and file.streams.video:
                frames, intact = _count_frames(file)
                limit = comment.removeprefix(note).removeprefix(LIMIT)
                return frames, intact and (not limit or frames < int(limit))
    except (av.FFmpegError, ValueError):
        raise ExistingFileError(f"{path} is unfinished or damaged: choose another file.") from None
    raise _other_file(path)


def _count_frames(file: Any) -> tuple[int, bool]:
    """(the number of frames, are all there that the file says it has?).

    A closed MP4 file states the number of frames. A closed Matroska file states the duration of its stream.
    """
    stream = file.streams.video[0]
    if stream.frames:
        return int(stream.frames), True
    frames, last = 0, None
    for packet in file.demux(stream):
        if packet.size:
            frames, last = frames + 1, packet
    stated = seconds_of(stream.metadata.get("DURATION", ""))
    if last is None or last.pts is None or not stated:
        return frames, False
    return frames, (last.pts + Fraction(3, 2) * (last.duration or 0)) * last.time_base >= stated


def _comments(file: Any) -> Iterator[str]:
    return (value for key, value in file.metadata.items() if key.lower() == "comment")


def _other_file(path: Path) -> ExistingFileError:
    return ExistingFileError(
        f"{path} exists, and is not of this video by this model with these settings: choose another name."
    )


def check_labels_folder(labels: Path, frames: Path) -> None:
    """Raise a ValueError if label maps would go to the folder of their frames, whose names they have."""
    if labels.is_dir() and frames.is_dir() and labels.samefile(frames):
        raise ValueError(f"{labels} is the folder of the frames, which label maps would replace: choose another one.")


def check_label_maps(folder: Path, source: FrameSource, max_frames: int | None, note: str | None) -> None:
    """Raise an error if label maps would replace frames or, with a note, files without this note."""
    frames: list[Path] = []
    if isinstance(source, FrameFolder):
        check_labels_folder(folder, Path(source.name))
        frames = source.paths
        _check_stems(frames)
    stems, real_paths = {path.stem for path in frames}, {os.path.realpath(path) for path in frames}
    for path in sorted(folder.glob("*.png")):
        if path.stem not in stems and (frames or not _is_frame_number(path.stem, max_frames)):
            continue
        if os.path.realpath(path) in real_paths:
            raise ValueError(f"{path} is a frame, which its label map would replace: choose another folder for them.")
        if note is not None:
            check_label_map(path, note)


def _check_stems(frames: Sequence[Path]) -> None:
    """Raise a ValueError where two frames would have the same label map."""
    earlier: dict[str, Path] = {}
    for path in frames:
        other = earlier.setdefault(path.stem.casefold(), path)
        if other is not path:
            raise ValueError(f"{other} and {path} would have the same label map, {path.stem}.png: rename one of them.")


def _is_frame_number(stem: str, max_frames: int | None) -> bool:
    """Can a frame of a video have this name?"""
    return len(stem) >= 6 and stem.isascii() and stem.isdigit() and (max_frames is None or int(stem) < max_frames)


def check_label_map(path: Path, note: str) -> None:
    """Raise ExistingFileError if `path` is a file without this note."""
    if has_content(path) and not is_label_map(path, note):
        raise _other_file(path)
