"""The folds of a cross-validation: images that belong together are held out together.

The frames of a video are nearly alike, so a fold that holds a few of them out beside their neighbours tests nothing.
Groups are what a pattern finds in the names, or videos: at least MIN_FRAMES names that differ in one number alone, and
whose images resemble the next ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.data.files import shortened

THUMBNAIL_SIDE = 8
"""Side of the thumbnails that are compared, pixels."""
MIN_RESEMBLANCE = 0.7
"""Correlation of the thumbnails of successive images, their median, from which on images are frames of one video.

CamVid's frames have 0.999 at 15 and 0.95 at 1 a second, unrelated photographs of VOC 0.02, Cityscapes 0.4.
"""
MIN_FRAMES = 4
"""Fewer images are not taken for a video."""


def groups_by_name(stems: Sequence[str], pattern: str) -> list[str]:
    """The group of each name: what the first pair of parentheses of a regular expression matches, or all of it."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"The pattern of groups {pattern!r} is no regular expression: {error}; correct it.") from error
    matches = [expression.search(stem) for stem in stems]
    names = [match[1] if match and expression.groups else match[0] if match else None for match in matches]
    missing = [stem for stem, name in zip(stems, names, strict=True) if not name]
    if missing:
        raise ValueError(f"The pattern of groups {pattern!r} finds nothing in the name {missing[0]}; correct it.")
    groups = [str(name) for name in names]
    if len(set(groups)) < 2:
        raise ValueError(f"The pattern of groups {pattern!r} finds one group alone, {groups[0]}; 2 or more are needed.")
    return groups


def thumbnail(image: Tensor) -> Tensor:
    """What is compared of an image (3, H, W)."""
    return functional.adaptive_avg_pool2d(image.float(), (THUMBNAIL_SIDE, THUMBNAIL_SIDE)).flatten()


def groups_by_video(stems: Sequence[str], thumbnails: Sequence[Tensor], folds: int) -> tuple[list[str], str]:
    """The group of each image, and a note on what videos were detected.

    The frames of a video are one group. Where that gives fewer groups than folds, each video is cut into as many
    stretches as there are folds.
    """
    videos = find_videos(stems, thumbnails)
    groups = list(stems)
    for prefix, frames in videos.items():
        for index in frames:
            groups[index] = f"video {prefix}"
    if not videos:
        return groups, ""
    count = sum(map(len, videos.values()))
    kind = "one video" if len(videos) == 1 else f"{len(videos)} videos"
    names = shortened([prefix or "numbers" for prefix in videos])
    message = f"{count} of {len(stems)} images are frames of {kind} ({names}), by their names and looks"
    remedy = "if they are not, --groups '.+' takes each by itself"
    if len(set(groups)) >= folds:
        return groups, f"{message}: frames of one video are held out together; {remedy}."
    for prefix, frames in videos.items():
        for number, stretch in enumerate(np.array_split(frames, folds)):
            for index in stretch.tolist():
                groups[index] = f"video {prefix}, part {number}"
    return groups, f"{message}: each was cut into {folds} stretches, and each stretch is held out as a whole; {remedy}."


def split(groups: Sequence[str], folds: int, seed: int) -> list[list[int]]:
    """Every index once, in folds that share no group; the largest groups first, each into the smallest fold."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    names = sorted(members)
    order = np.random.default_rng([seed, 0]).permutation(len(names)).tolist()
    parts: list[list[int]] = [[] for _ in range(min(folds, len(names)))]
    for name in sorted((names[i] for i in order), key=lambda name: -len(members[name])):
        min(parts, key=len).extend(members[name])
    return [sorted(part) for part in parts]


def find_videos(
    stems: Sequence[str], thumbnails: Sequence[Tensor], least: float = MIN_RESEMBLANCE
) -> dict[str, list[int]]:
    """The indices of the frames of each video, in order, by what their names have in common.

    least: the resemblance of successive thumbnails from which on they are frames of one video.
    """
    numbers = [list(re.finditer(r"\d+", stem))[::-1] for stem in stems]  # the last one first
    shared = Counter(_around(match) for matches in numbers for match in matches)
    by_rest: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for index, matches in enumerate(numbers):
        number = next((match for match in matches if shared[_around(match)] >= MIN_FRAMES), None)
        if number is not None:
            by_rest.setdefault(_around(number), []).append((int(number[0]), index))
    videos = {}
    for (before, after), numbered in by_rest.items():
        frames = [index for _, index in sorted(numbered)]
        if len(frames) >= MIN_FRAMES and _resemblance([thumbnails[index] for index in frames]) >= least:
            videos[f"{before}*{after}" if after else before] = frames
    return videos


def _around(number: re.Match[str]) -> tuple[str, str]:
    """What stands before and after a number in a name."""
    return number.string[: number.start()], number.string[number.end() :]


def _resemblance(thumbnails: Sequence[Tensor]) -> float:
    """The median correlation of each thumbnail with the next."""
    values = torch.stack(list(thumbnails))
    centred = functional.normalize(values - values.mean(1, keepdim=True), dim=1)
    return float((centred[1:] * centred[:-1]).sum(1).median())
