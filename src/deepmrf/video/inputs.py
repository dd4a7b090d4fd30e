"""Which inputs are videos: files by their suffix, cameras, and folders of frames."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from deepmrf.video.earlier import is_recording
from deepmrf.video.reading import CAMERA_PREFIX

VIDEO_SUFFIXES = (
    *(".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".mpg", ".mpeg"),
    *(".mts", ".m2ts", ".wmv", ".flv", ".3gp", ".ogv"),
)
"""Files with these suffixes are videos."""
OVERLAY_SUFFIXES = ("_overlay.mp4", "_overlay.part.mp4")
"""How the names of our own videos end, finished and unfinished."""


def names_video(path: Path) -> bool:
    """Is this the name of a video file?"""
    return path.suffix.lower() in VIDEO_SUFFIXES


def is_video(text: str, folders_are_videos: bool) -> bool:
    """Is this input a video file, a camera, or a folder of frames?"""
    if Path(text).is_dir():
        return folders_are_videos
    return text.startswith(CAMERA_PREFIX) or (text.lower().endswith(VIDEO_SUFFIXES) and Path(text).is_file())


def expand_videos(inputs: Iterable[str]) -> list[str]:
    """Replace patterns that match videos, such as 'clips/*.mp4', by their matches.

    Our own videos with labels are left out, unless there is nothing else.
    """
    texts: list[str] = []
    for text in inputs:
        matches = [] if os.path.lexists(text) else sorted(glob.glob(text, recursive=True))
        texts += matches if any(match.lower().endswith(VIDEO_SUFFIXES) for match in matches) else [text]
    return [text for text in texts if not _is_overlay(text)] or texts


def _is_overlay(text: str) -> bool:
    with suppress(ImportError):  # without PyAV, every video is reported later
        return text.lower().endswith(OVERLAY_SUFFIXES) and is_recording(Path(text))
    return False
