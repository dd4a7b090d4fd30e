"""Reports: the results of one image, and of all images of a run together."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepmrf.data.remote import URL
from deepmrf.predict.files import Failure, ResultFiles
from deepmrf.predict.result import ClassShare, ClassTotals


@dataclass(frozen=True)
class ImageReport:
    """The result of one image."""

    path: Path | URL
    files: ResultFiles[Path | URL]
    size: tuple[int, int]
    """(height, width)."""
    classes: list[ClassShare]
    """The classes in the image, the largest first."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        single = ("labels", "overlay", "probabilities")
        files: dict[str, Any] = {name: str(path) for name in single if (path := getattr(self.files, name)) is not None}
        if self.files.masks:
            files["masks"] = {name: str(path) for name, path in self.files.masks.items()}
        (height, width), classes = self.size, [share.to_dict() for share in self.classes]
        return {"image": str(self.path), "height": height, "width": width, **files, "found": classes}


@dataclass
class PredictReport(ClassTotals):
    """The results of all images; the totals are over those that are done, now or earlier."""

    done: list[ImageReport] = field(default_factory=list)
    earlier: list[ImageReport] = field(default_factory=list)
    """Images that an earlier run has done."""
    failed: list[Failure] = field(default_factory=list)
    animated: list[Path | URL] = field(default_factory=list)
    """Files of several frames, of which the first was taken."""
    interrupted: bool = False

    @property
    def skipped(self) -> list[Path | URL]:
        """The images whose results were there already."""
        return [image.path for image in self.earlier]

    @property
    def images(self) -> list[ImageReport]:
        """The images that are done, now or earlier."""
        return [*self.earlier, *self.done]

    def merge(self, other: PredictReport) -> None:
        """Add the results of other images."""
        self.pixels += other.pixels
        self.confidences += other.confidences
        self.images_with_label += other.images_with_label
        for name in ("done", "earlier", "failed", "animated"):
            getattr(self, name).extend(getattr(other, name))
        self.interrupted |= other.interrupted

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "classes": list(self.names),
            "found": [share.to_dict() for share, _ in self.summary()],
            "images": [image.to_dict() for image in self.images],
            "skipped": [str(path) for path in self.skipped],
            "failed": [{"image": str(path), "why": reason} for path, reason in self.failed],
        }
