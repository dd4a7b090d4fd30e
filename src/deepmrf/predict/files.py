"""Image files in, result files out: which images the inputs name, and where the results of each go.

For the image a/x.jpg, a folder OUT gets (a/ is kept where the inputs lie in several folders)

    OUT/a/x.png            the label map: 8-bit ids with a palette
    OUT/a/x_overlay.jpg    the image with its labels painted over it
    OUT/a/x.npz            probabilities (L, H, W) of float16, on request
    OUT/a/x_LABEL.png      on request, of each label in the image but the background: 255 inside, 0 outside
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Generic, TypeVar

from deepmrf.data.colours import BACKGROUND
from deepmrf.data.files import SUFFIXES
from deepmrf.data.labels import LabelSet
from deepmrf.data.remote import URL
from deepmrf.predict.notes import OVERLAY, image_key, is_result

IMAGE_ENDINGS = (*SUFFIXES, ".jfif", ".pgm", ".pbm", ".pnm", ".avif", ".jp2")
"""A file in a folder counts as an image by its ending; a file that is named is tried whatever its ending."""
MAX_NAME_BYTES = 200
"""Bytes of a result's name before its ending: file systems allow 255 in all."""
MAX_LABEL_BYTES = 24
"""Bytes of a label in the name of its mask."""
NOT_IN_NAMES = re.compile(r"""[\s/\\:*?"<>|\x00-\x1f]""")
"""Blanks, slashes, and what some systems do not take in the name of a file."""

Failure = tuple[Path | URL, str]
"""A file, and in one sentence why it could not be segmented."""
AnyPath = TypeVar("AnyPath", bound=Path | URL, covariant=True)


@dataclass(frozen=True)
class ResultFiles(Generic[AnyPath]):
    """The result files of one image; None for those that are not wanted."""

    labels: AnyPath
    overlay: AnyPath | None
    probabilities: AnyPath | None
    masks: Mapping[str, AnyPath] = field(default_factory=dict)
    """By label: of all labels but the background, until it is known which are in the image; see `showing`."""

    def all(self) -> list[AnyPath]:
        """The files that are wanted."""
        single = [path for path in (self.labels, self.overlay, self.probabilities) if path is not None]
        return [*single, *self.masks.values()]

    def beside(self) -> tuple[str, ...]:
        """The kinds that are wanted beside the label map."""
        return tuple(name for name in ("overlay", "probabilities", "masks") if getattr(self, name))

    def showing(self, names: Container[str]) -> ResultFiles[AnyPath]:
        """The files of an image that shows these labels: the others have no mask."""
        return replace(self, masks={name: path for name, path in self.masks.items() if name in names})


@dataclass(frozen=True)
class ImageFile:
    """An image file and the name of its results, relative to the output folder and without an ending."""

    path: Path
    target: str
    version: str = ""
    """The key of a file that was fetched from a URL."""

    def key(self) -> str:
        """A few letters that differ for other files, and for this one once it has changed."""
        return self.version or image_key(self.path)

    def results(
        self, folder: Path, overlay: bool, probabilities: bool, masks: Mapping[str, str] | None = None
    ) -> ResultFiles[Path]:
        """Where its results go; masks: the endings of those that are wanted, by label."""
        labels, painted, numbers = (folder / f"{self.target}{ending}" for ending in (".png", OVERLAY, ".npz"))
        of_labels = {name: folder / f"{self.target}{ending}" for name, ending in (masks or {}).items()}
        return ResultFiles(labels, painted if overlay else None, numbers if probabilities else None, of_labels)


def mask_endings(labels: LabelSet) -> dict[str, str]:
    """How the name of each label's mask ends, such as "_traffic-light.png"; the background has none."""
    endings: dict[str, str] = {}
    used: set[str] = set()
    for name in labels.names:
        if name == BACKGROUND:
            continue
        ending = unnumbered = _shortened(NOT_IN_NAMES.sub("-", name), MAX_LABEL_BYTES)
        number = 1
        while ending.casefold() in used:
            number += 1
            ending = f"{unnumbered}-{number}"
        used.add(ending.casefold())
        endings[name] = f"_{ending}.png"
    return endings


def matches(text: str) -> list[str]:
    """The paths that a text names: itself if it exists, brackets and stars included; only then is it a pattern."""
    return [text] if os.path.lexists(text) else sorted(glob.glob(text, recursive=True))


def find_images(
    inputs: Iterable[str | os.PathLike[str]], recursive: bool = False, out: Path | None = None
) -> tuple[list[ImageFile], list[Failure]]:
    """List the images that files, folders and patterns name, each once, and the inputs that name none.

    Folders are searched without the folders in them unless `recursive`. Hidden files, links to folders, the folder
    `out` and results of earlier runs are left out. No two images get results of the same name.
    """
    paths: dict[str, Path] = {}  # by absolute path: each image once
    roots: set[str] = set()
    failed: list[Failure] = []
    results: list[Path] = []
    for text in [os.fspath(path) for path in inputs]:
        named = [Path(path) for path in matches(text)]
        if not named:
            problem = "matches nothing" if glob.has_magic(text) else "is missing"
            failed.append((Path(text), f"{text} {problem}: give a file, a folder or a pattern such as 'photos/*.jpg'."))
        for path in named:
            if path.is_dir():
                images = list(_in_folder(path, recursive, out, failed, results))
                if out is not None and out.is_dir() and path.samefile(out):
                    if images:
                        raise ValueError(
                            f"The results would be written among the images in {path}: choose another folder."
                        )
                    results.append(path)  # a pattern that also matches the output folder
                    continue
                if not images:
                    deeper = "" if recursive else "; the option recursive also searches the folders in it"
                    failed.append((path, f"{path} is a folder without images{deeper}."))
                roots.add(os.path.abspath(path))
            elif is_result(path):
                results.append(path)
                continue
            else:
                images = [path]
                roots.add(os.path.dirname(os.path.abspath(path)))
            for image in images:
                paths.setdefault(os.path.abspath(image), image)
    if results and not paths and not failed:
        failed.append((results[0], f"{results[0]} is a result of deepmrf: give the images themselves."))
    return _named(paths, roots), failed


def _in_folder(
    folder: Path, recursive: bool, out: Path | None, failed: list[Failure], results: list[Path]
) -> Iterator[Path]:
    def report(error: OSError) -> None:
        path = Path(error.filename or folder)
        failed.append((path, f"{path} cannot be listed ({error.strerror}): allow reading it."))

    for top, folders, names in os.walk(folder, onerror=report):  # does not follow links to folders: no circles
        searched = sorted(name for name in folders if not name.startswith("."))
        if out is not None and out.is_dir():
            searched = [name for name in searched if not os.path.samefile(os.path.join(top, name), out)]
        folders[:] = searched if recursive else []
        for name in sorted(names):
            path = Path(top, name)
            if name.startswith(".") or os.path.splitext(name)[1].lower() not in IMAGE_ENDINGS:
                continue
            if is_result(path):
                results.append(path)
            else:
                yield path


def _named(paths: dict[str, Path], roots: set[str]) -> list[ImageFile]:
    """Results lie as the images do below their common folder; of x.jpg and x.png there, both keep their ending."""
    try:
        root = os.path.commonpath(roots) if roots else ""
    except ValueError:  # several drives
        root = ""
    names = [os.path.relpath(path, root) if root else os.path.basename(path) for path in paths]
    stems = [os.path.splitext(name)[0] if name.lower().endswith(IMAGE_ENDINGS) else name for name in names]
    counts = Counter(stem.casefold() for stem in stems)
    used: set[str] = set()
    images = []
    for path, name, stem in zip(paths.values(), names, stems, strict=True):
        target = unnumbered = _shortened(stem if counts[stem.casefold()] == 1 else name)
        number = 1
        while target.casefold() in used:
            number += 1
            target = f"{unnumbered}-{number}"
        used.add(target.casefold())
        images.append(ImageFile(path, target))
    return images


def _shortened(target: str, max_bytes: int = MAX_NAME_BYTES) -> str:
    """Leave room for an ending: a name that is too long is cut, and ends in a few digits of its own."""
    folder, name = os.path.split(target)
    if len(os.fsencode(name)) <= max_bytes:
        return target
    digest = blake2b(os.fsencode(name), digest_size=4).hexdigest()
    while len(os.fsencode(name)) > max_bytes:
        name = name[:-1]
    return os.path.join(folder, f"{name}-{digest}")


def output_folder(images: Sequence[ImageFile], out: Path) -> tuple[list[ImageFile], Path]:
    """Return the images and the folder for their results; `out` may name the label map (NAME.png) of one image."""
    folder, ending = out, out.suffix.lower()
    if not out.is_dir() and ending in (*IMAGE_ENDINGS, ".npz", ".npy"):
        if ending != ".png":
            raise ValueError(f"{out} is no PNG file, which label maps are: say {out.with_suffix('.png')}, or a folder.")
        if len(images) != 1:
            raise ValueError(f"{out} is one label map, but there are {len(images)} images: give a folder for them.")
        images, folder = [replace(images[0], target=out.stem)], out.parent
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a folder for the results.")
    return list(images), folder


def check_targets(images: Sequence[ImageFile], folder: Path) -> None:
    """Raise a ValueError where a result would replace one of the images."""
    sources = {os.path.realpath(image.path) for image in images}
    for image in images:
        for path in image.results(folder, True, True).all():
            if os.path.realpath(path) in sources:
                raise ValueError(f"{path} is one of the images, and would be overwritten: choose another folder.")


def check_masks(images: Sequence[ImageFile], folder: Path, endings: Mapping[str, str]) -> None:
    """Raise a ValueError where a mask would replace one of the images, or another image's label map or mask."""
    sources = {os.path.realpath(image.path) for image in images}
    if any(path.endswith(tuple(endings.values())) for path in sources):
        for image in images:
            for path in image.results(folder, False, False, endings).masks.values():
                if os.path.realpath(path) in sources:
                    raise ValueError(f"{path} is one of the images, and would be overwritten: choose another folder.")
    tails = {ending.removesuffix(".png").casefold() for ending in endings.values()}
    # The masks x_a_b.png, of x, and x_a_b.png, of x_a, are one file where both "a_b" and "b" are labels.
    tails |= {tail.removesuffix(other) for tail in tails for other in tails if tail != other}
    targets = {image.target.casefold(): image for image in images}
    for target, image in targets.items():
        for tail in tails:
            if target.endswith(tail) and (other := targets.get(target.removesuffix(tail))) is not None:
                raise ValueError(
                    f"Masks of {other.path} would have names of results of {image.path}: segment them in turn, into "
                    "two folders."
                )
