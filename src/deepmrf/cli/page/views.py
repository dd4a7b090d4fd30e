"""What the browser gets of a result: the picture, maps of labels and confidences to hover over, and what changed."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from deepmrf.data.files import Bytes
from deepmrf.data.labels import LabelSet
from deepmrf.predict.result import legend_colours
from deepmrf.predict.scales import Labels

MAX_CHANGES = 8
"""Pairs of labels (from, to) that are listed."""
PNG_LEVEL = 1
"""Compression of the maps: sending them must not take longer than computing them."""


def picture_url(image: Bytes) -> str:
    """A picture (H, W, 3) as the address of a JPEG file that holds it."""
    return _url(Image.fromarray(image), "jpeg", quality=88)


def maps_url(labels: Labels) -> str:
    """Labels and confidences (H, W) as the address of a PNG file: red is the label, green its confidence of 255."""
    ids, confidence = labels
    pixels = np.zeros((*ids.shape, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = ids, np.round(255 * confidence.astype(np.float32))
    return _url(Image.fromarray(pixels), "png", compress_level=PNG_LEVEL)


def _url(picture: Image.Image, kind: str, **options: Any) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, format=kind.upper(), **options)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def palette(labels: LabelSet) -> list[list[int] | None]:
    """The colour of each label; None for the background, which stays unpainted."""
    return [None if colour is None else list(colour) for colour in legend_colours(labels).values()]


def compare(count: int, before: Labels, after: Labels) -> dict[str, Any]:
    """What the MRF has changed, as plain JSON; `count` is the number of labels.

    classes: {label, before, after: shares of all pixels, confidence} of those that are there, the largest first.
    changes: {from, to, share}, the largest first. changed: the share of all pixels that have another label.
    """
    size = max(before[0].size, 1)
    pairs = np.bincount(before[0].ravel().astype(np.int64) * count + after[0].ravel(), minlength=count * count)
    table = pairs.reshape(count, count)
    shares = np.stack([table.sum(1), table.sum(0)]) / size  # (2, L): before, after
    sums = np.bincount(after[0].ravel(), after[1].ravel().astype(np.float64), minlength=count)
    order = sorted(np.flatnonzero(shares.any(0)).tolist(), key=lambda label: (-shares[1, label], -shares[0, label]))
    classes = [
        {
            "label": label,
            "before": float(shares[0, label]),
            "after": float(shares[1, label]),
            "confidence": float(sums[label] / max(table[:, label].sum(), 1)),
        }
        for label in order
    ]
    moved = table * (1 - np.eye(count, dtype=np.int64))
    largest = [int(index) for index in np.argsort(-moved, axis=None, kind="stable")[:MAX_CHANGES]]
    changes = [
        {"from": index // count, "to": index % count, "share": float(moved.flat[index] / size)}
        for index in largest
        if moved.flat[index]
    ]
    return {"classes": classes, "changes": changes, "changed": float(moved.sum() / size)}
