"""The report of a recorded video: what was written, what it shows, and what was wrong with the source."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepmrf.predict.result import ClassTotals
from deepmrf.video.earlier import Done
from deepmrf.video.reading import FrameSource


@dataclass
class VideoReport(ClassTotals):
    """The result of recording a video; the totals are over all frames."""

    path: Path | None = None
    """The video with the labels. If recording was interrupted or failed, it is NAME.part.mp4."""
    labels: Path | None = None
    """The folder of label maps."""
    done_before: Done = "nothing"
    """What was finished before this call: "nothing", the "overlay" (the video at `path`), or "all"."""
    frames: int = 0
    """Number of frames that were segmented and written."""
    skipped: int = 0
    """Number of frames of the source that could not be read."""
    missing: int = 0
    """Number of frames that the source should have, by its header or its duration, and does not have."""
    interrupted: bool = False
    """True after Ctrl-C."""
    failed: str = ""
    """Why recording ended early, in one sentence; empty if it did not."""
    silent: str = ""
    """Why the sound was not copied; empty if it was."""
    linked: bool = False
    """Were frames linked along the optical flow? Otherwise each was segmented alone."""
    consistency: float | None = None
    """Share of the pixels with a reliable link that have the label of the frame before."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of work per stage; stages overlap."""

    def warnings(self, source: FrameSource) -> list[str]:
        """Sentences on frames that the source lacks and on sound that was not copied."""
        sentences = []
        if self.skipped:
            frames = "1 frame could not be read and was"
            if self.skipped > 1:
                frames = f"{self.skipped} frames could not be read and were"
            sentences.append(f"{frames} left out.")
        if self.missing:
            present = self.frames + self.skipped
            total = present + self.missing
            says = f"says it has {total}" if source.counted else f"should have about {total}"
            sentences.append(f"{source.name} {says} frames, but {present} were found: it may be cut off.")
        if self.silent:
            sentences.append(f"{source.name}: {self.silent}; the video is silent (.mkv holds every kind).")
        return sentences

    def to_dict(self, source: FrameSource) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        files = {
            "video": source.name,
            "overlay": None if self.path is None else str(self.path),
            "labels": None if self.labels is None else str(self.labels),
        }
        if self.done_before == "all":
            return files | {"there_already": True}
        return files | {
            "frames": self.frames,
            "skipped": self.skipped,
            "complete": not (self.interrupted or self.failed or self.missing),
            "linked": self.linked,
            "consistency": self.consistency,
            "seconds": {stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
            "found": [share.to_dict() | {"frames": frames} for share, frames in self.summary()],
        }
