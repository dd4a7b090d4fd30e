"""Image files in numbers: finding them, and a line of reading, network and writing that works on several at once.

    pictures, missing = find(["photos", "more/*.jpg"])
    report = run(deepmrf.load("animals"), pictures, Path("segmented"))

For the image a/x.jpg, a folder OUT gets (a/ being kept where the inputs lie in several folders)

    OUT/a/x.png            the label map: 8-bit ids with a palette
    OUT/a/x_overlay.jpg    the image with its labels painted over it
    OUT/a/x.npz            probabilities (L, H, W) of float16, on request

each written aside and put in place whole, the label map last: where it is, all is.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from deepmrf.data.files import SUFFIXES
from deepmrf.predict.notes import OVERLAY, is_result

ENDINGS = (*SUFFIXES, ".jfif", ".pgm", ".pbm", ".pnm", ".avif", ".jp2")
"""By which a file in a folder counts as an image; a file that is named is tried whatever its ending."""
LONGEST = 200
"""Bytes of a result's name before its ending: file systems allow 255 in all."""

Failure = tuple[Path, str]
"""A file and why it could not be done, in one sentence."""


@dataclass(frozen=True)
class Files:
    """The results of one image."""

    labels: Path
    overlay: Path | None
    probabilities: Path | None

    def all(self) -> list[Path]:
        """Those that are wanted."""
        return [path for path in (self.labels, self.overlay, self.probabilities) if path is not None]

    def beside(self) -> tuple[str, ...]:
        """What is wanted beside the label map."""
        return tuple(name for name in ("overlay", "probabilities") if getattr(self, name) is not None)


@dataclass(frozen=True)
class Picture:
    """An image file and the name of its results, relative to the folder they go to and without an ending."""

    path: Path
    target: str

    def files(self, out: Path, overlay: bool, probabilities: bool) -> Files:
        """Where its results go."""
        made = {ending: out / f"{self.target}{ending}" for ending in (".png", OVERLAY, ".npz")}
        return Files(made[".png"], made[OVERLAY] if overlay else None, made[".npz"] if probabilities else None)


def find(
    inputs: Iterable[str | os.PathLike[str]], recursive: bool = False, out: Path | None = None
) -> tuple[list[Picture], list[Failure]]:
    """The images that files, folders and patterns name, each once, with results that do not collide; and what failed.

    A name that exists is taken as it is, brackets and stars included; only then is it a pattern. Folders are searched
    without their own folders unless `recursive`; hidden files, links to folders, the folder `out` and what earlier runs
    wrote are passed over.
    """
    paths: dict[str, Path] = {}
    anchors: set[str] = set()
    failed: list[Failure] = []
    results: list[Path] = []
    for given in inputs:
        text = os.fspath(given)
        matches = [text] if os.path.lexists(text) else sorted(glob.glob(text, recursive=True))
        if not matches:
            what = "matches nothing" if glob.has_magic(text) else "is missing"
            failed.append((Path(text), f"{text} {what}: give a file, a folder or a pattern such as 'photos/*.jpg'."))
        for match in matches:
            path = Path(match)
            if not path.is_dir() and is_result(path):
                results.append(path)
                continue
            if not path.is_dir():
                anchors.add(os.path.dirname(os.path.abspath(match)))
                paths.setdefault(os.path.abspath(match), path)
                continue
            held = list(_in_folder(path, recursive, out, failed, results))
            if out is not None and out.is_dir() and path.samefile(out):
                if held:
                    raise ValueError(f"The results would be written among the images in {path}: choose another folder.")
                results.append(path)  # a pattern that matches what an earlier run wrote, too
                continue
            anchors.add(os.path.abspath(match))
            for one in held:
                paths.setdefault(os.path.abspath(one), one)
            if not held:
                deeper = "" if recursive else ", and --recursive was not given"
                failed.append((path, f"{path} is a folder without images{deeper}."))
    if results and not paths and not failed:
        failed.append((results[0], f"{results[0]} is a result of deepmrf: give the images themselves."))
    return _named(paths, anchors), failed


def _in_folder(
    folder: Path, recursive: bool, out: Path | None, failed: list[Failure], results: list[Path]
) -> Iterator[Path]:
    def report(why: OSError) -> None:
        place = Path(why.filename or folder)
        failed.append((place, f"{place} cannot be listed ({why.strerror}): allow reading it."))

    for top, folders, names in os.walk(folder, onerror=report):  # links to folders are not followed: no circles
        kept = sorted(name for name in folders if not name.startswith("."))
        if out is not None and out.is_dir():
            kept = [name for name in kept if not os.path.samefile(os.path.join(top, name), out)]
        folders[:] = kept if recursive else []
        for name in sorted(names):
            path = Path(top, name)
            if name.startswith(".") or os.path.splitext(name)[1].lower() not in ENDINGS:
                continue
            if is_result(path):
                results.append(path)
            else:
                yield path


def _named(paths: dict[str, Path], anchors: set[str]) -> list[Picture]:
    """Results lie as the images do below their common folder; of x.jpg and x.png there, both keep their ending."""
    try:
        root = os.path.commonpath(anchors) if anchors else ""
    except ValueError:  # several drives
        root = ""
    places = [os.path.relpath(path, root) if root else os.path.basename(path) for path in paths]
    stems = [os.path.splitext(place)[0] if place.lower().endswith(ENDINGS) else place for place in places]
    shared = Counter(stem.casefold() for stem in stems)
    used: set[str] = set()
    made = []
    for path, place, stem in zip(paths.values(), places, stems, strict=True):
        target = name = _short(stem if shared[stem.casefold()] == 1 else place)
        number = 1
        while target.casefold() in used:
            number += 1
            target = f"{name}-{number}"
        used.add(target.casefold())
        made.append(Picture(path, target))
    return made


def _short(target: str) -> str:
    """A name that leaves room for an ending; one that is too long ends in a few digits of its own."""
    folder, name = os.path.split(target)
    if len(os.fsencode(name)) <= LONGEST:
        return target
    digest = blake2b(os.fsencode(name), digest_size=4).hexdigest()
    while len(os.fsencode(name)) > LONGEST:
        name = name[:-1]
    return os.path.join(folder, f"{name}-{digest}")


def as_file(pictures: Sequence[Picture], out: Path) -> tuple[list[Picture], Path]:
    """The pictures and the folder for `out`, which may name the label map (NAME.png) where there is one picture."""
    ending = out.suffix.lower()
    if out.is_dir() or ending not in (*ENDINGS, ".npz", ".npy"):
        return list(pictures), out
    if ending != ".png":
        raise ValueError(f"{out} is no PNG file, which label maps are: say {out.with_suffix('.png')}, or a folder.")
    if len(pictures) != 1:
        raise ValueError(f"{out} is one label map, but there are {len(pictures)} images: give a folder for them.")
    return [replace(pictures[0], target=out.stem)], out.parent


def check_targets(pictures: Sequence[Picture], out: Path) -> None:
    """No result may take the place of an image."""
    sources = {os.path.realpath(picture.path) for picture in pictures}
    for picture in pictures:
        for path in picture.files(out, True, True).all():
            if os.path.realpath(path) in sources:
                raise ValueError(f"{path} is one of the images, and would be overwritten: choose another folder.")
