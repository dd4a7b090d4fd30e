"""Segment images in Python: `deepmrf.load(name)` returns a Segmenter, which takes images of every kind.

    segment = deepmrf.load("animals")      # or Segmenter(model), of a DeepParsingNetwork
    result = segment("cat.jpg")            # or a PIL image, a numpy array, a tensor: a Segmentation (result.py)

Large photographs are shrunk to about the size that the network was trained on, and their labels enlarged again
(`size`). Images that are still larger, or that are not to be shrunk (`tile`, or size=0), are computed in tiles.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmrf.data.files import Bytes
from deepmrf.data.images import as_image, shrunk
from deepmrf.data.labels import LabelSet
from deepmrf.data.progress import Progress, no_progress
from deepmrf.models.names import open_model
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.predict.result import Segmentation, check_cleaning
from deepmrf.predict.scales import combined, enlarged_labels, enlarged_probabilities, grid, margin, tiled, tiled_labels
from deepmrf.unary.network import NO_ZOOM, Network
from deepmrf.unary.own import OwnNetwork

TILE_SIDE = {"cpu": 1024, "cuda": 2048}
"""The side of the tiles, in pixels, where none is given."""
MAX_PIXELS_AT_ONCE = {"cpu": 2**22, "cuda": 2**24}
"""Images of more pixels are computed in tiles."""
MAX_PIXELS = 250_000_000
"""Larger images are refused unless told otherwise: at about 9 bytes a pixel, this many take about 2.6 GB."""
MAX_PROBABILITIES = 2**29
"""The most probabilities (labels times pixels) of one result: 2 GiB."""
MAX_REPR_NAMES = 60
"""Characters of label names that a repr shows."""
MAX_SIZE_BY_CROP = 1.25
"""Images are shrunk to this many times the side of the crops that the model was trained on."""


def load(
    name: str | os.PathLike[str] = "animals",
    *more: str | os.PathLike[str],
    device: str | torch.device | None = None,
    scales: Sequence[float] = (1.0,),
    flip: bool = False,
    tile: int | None = None,
    size: int | None = None,
    max_pixels: int = MAX_PIXELS,
    network: OwnNetwork | None = None,
    min_area: float = 0,
    min_confidence: float = 0.0,
) -> Segmenter:
    """A trained model, ready for images: "animals", "street", "camvid", a folder, a hub id; several are averaged.

    device: "cpu", "cuda"; the GPU if there is one. scales, flip: average over resized and mirrored images.
    tile: side of the tiles in pixels, at full resolution. size: shrink images to this many pixels on the longer side
    first; 0 never does, None takes 1.25 times the side of the model's training crops. max_pixels: refuse larger images.
    network: for folders saved around a network of your own, that network, a function that builds it, or
    "package.module:function", which imports and runs that code.
    min_area, min_confidence: every result is `Segmentation.cleaned` by these.
    """
    if isinstance(scales, int | float):
        scales = (float(scales),)
    models = [open_model(name, network), *[open_model(path, copy.deepcopy(network)) for path in more]]
    for other, model in zip(more, models[1:], strict=True):
        model.labels.check_same(other, models[0].labels, name, "only models of equal labels can be averaged")
    return Segmenter(
        models,
        device=device,
        scales=scales,
        flip=flip,
        tile=tile,
        size=size,
        max_pixels=max_pixels,
        min_area=min_area,
        min_confidence=min_confidence,
    )


class Segmenter:
    """A model, or several to average, and how to apply them: segmenter(image) -> Segmentation."""

    def __init__(
        self,
        models: DeepParsingNetwork | Sequence[DeepParsingNetwork],
        *,
        device: str | torch.device | None = None,
        scales: Sequence[float] = (1.0,),
        flip: bool = False,
        tile: int | None = None,
        size: int | None = None,
        max_pixels: int = MAX_PIXELS,
        min_area: float = 0,
        min_confidence: float = 0.0,
    ) -> None:
        for what, value, least in (("tile", tile, 64), ("size", size or None, 64), ("max_pixels", max_pixels, 1)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{what}={value!r} must be a whole number of pixels, at least {least}.")
        check_cleaning(min_area, min_confidence)
        models = [models] if isinstance(models, torch.nn.Module) else list(models)
        if not models or not all(isinstance(model, DeepParsingNetwork) for model in models):
            kinds = ", ".join(type(model).__name__ for model in models) or "nothing"
            raise TypeError(
                f"A Segmenter was given {kinds}: pass a DeepParsingNetwork(network, mean_field, labels), or load(name)."
            )
        self.device = chosen_device(device)
        self.models = [model.to(self.device).eval() for model in models]
        self.scales, self.flip, self.tile, self.max_pixels = tuple(scales), flip, tile, max_pixels
        self.min_area, self.min_confidence = min_area, min_confidence
        self.predict = combined(self.models, self.scales, flip)
        self.size = trained_size(self.models) if size is None and tile is None else size or None
        fields = [model.mean_field for model in self.models]
        zooms = [getattr(model.unary, "zoom", NO_ZOOM) for model in self.models]
        self.margin, self.step = margin(fields, self.scales), grid(fields, zooms, self.scales)

    def __repr__(self) -> str:
        models = ", ".join(model.summary() for model in self.models)
        names = ", ".join(self.labels.names)
        names = names if len(names) <= MAX_REPR_NAMES else names[:MAX_REPR_NAMES].rsplit(", ", 1)[0] + ", ..."
        settings = [f"{len(self.labels)} labels: {names}", f"on {self.device}"]
        settings += [f"size={self.size}"] * bool(self.size) + [f"tile={self.tile}"] * bool(self.tile)
        settings += [f"scales={self.scales}"] * (self.scales != (1.0,)) + ["flip"] * self.flip
        settings += [f"min_area={self.min_area}"] * bool(self.min_area)
        settings += [f"min_confidence={self.min_confidence}"] * bool(self.min_confidence)
        return f"Segmenter({models}; {'; '.join(settings)})"

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: everything but `predict`, which is made of functions."""
        return {name: value for name, value in vars(self).items() if name != "predict"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.predict = combined(self.models, self.scales, self.flip)

    def to(self, device: str | torch.device | None) -> Segmenter:
        """Move the models to a device, and return this segmenter."""
        self.device = chosen_device(device)
        for model in self.models:
            model.to(self.device)
        return self

    def for_video(self, full_precision: bool = False) -> Segmenter:
        """This segmenter with models that see frames together, where they have a part for video; else this one.

        Their networks compute in bfloat16 where their part for video allows it and the processor is faster so, unless
        `full_precision`.
        """
        models = [model.for_video() for model in self.models]
        if all(model is own for model, own in zip(models, self.models, strict=True)):
            return self
        if not full_precision and is_fast_in_bfloat16(self.device):
            for model, own in zip(models, self.models, strict=True):
                if own.video is not None and own.video.allows_bfloat16 and isinstance(own.unary, Network):
                    model.unary = own.unary.in_bfloat16()
        return Segmenter(
            models,
            device=self.device,
            scales=self.scales,
            flip=self.flip,
            tile=self.tile,
            size=self.size or 0,
            max_pixels=self.max_pixels,
            min_area=self.min_area,
            min_confidence=self.min_confidence,
        )

    @property
    def model(self) -> DeepParsingNetwork:
        """The first of the models."""
        return self.models[0]

    @property
    def labels(self) -> LabelSet:
        """Names and colours."""
        return self.model.labels

    @cached_property
    def identity(self) -> str:
        """A short name of models and settings together: results of equal identity are equal."""
        digest = blake2b(digest_size=8)
        for model in self.models:
            config = model.config()
            digest.update(repr([config[part] for part in ("unary", "mean_field", "labels")]).encode())
            of_images = getattr(model, "of_images", None)  # of a model whose frames are segmented, and then linked
            digest.update(b"" if of_images is None else repr(of_images.settings).encode())
            for name, value in model.state_dict().items():
                if name.startswith("video."):  # of no use to this model: `for_video` gives the one that uses it
                    continue
                digest.update(f"{name} {tuple(value.shape)}".encode())
                digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        digest.update(repr((self.scales, self.flip, self.tile, self.size)).encode())
        if self.min_area or self.min_confidence:
            digest.update(repr((self.min_area, self.min_confidence)).encode())
        return digest.hexdigest()

    def __call__(self, image: Any, *, probabilities: bool | None = None) -> Segmentation:
        """The labels of one image: a path, a PIL image, (H, W), (H, W, 3 or 4) numpy, or a tensor (3, H, W).

        probabilities: keep those of every label, (L, H, W); None keeps them for images that are not shrunk or tiled.
        """
        if isinstance(image, np.ndarray | Tensor):  # the result keeps the image
            image = image.copy() if isinstance(image, np.ndarray) else image.clone()
        return self.batch([image], probabilities=probabilities)[0]

    def batch(
        self, images: Sequence[Any], *, probabilities: bool | None = None, progress: Progress = no_progress
    ) -> list[Segmentation]:
        """The labels of images of one size, computed together where they are small; each as for a single one.

        progress: called after every tile of an image that is computed in tiles.
        """
        if not len(images):
            return []
        images = [as_image(image, self.max_pixels) for image in images]
        height, width = images[0].shape[:2]
        if any(image.shape != images[0].shape for image in images):
            raise ValueError(f"A batch has images of sizes {sorted({i.shape[:2] for i in images})}: give equal ones.")
        if probabilities and len(self.labels) * height * width > MAX_PROBABILITIES:
            raise ValueError(
                f"The probabilities of {width} x {height} pixels and {len(self.labels)} labels would take "
                f"{len(self.labels) * height * width * 4 / 2**30:.1f} GiB: leave them out, or cut the image up."
            )
        try:
            return self._segment(images, probabilities, progress)
        except torch.cuda.OutOfMemoryError:
            raise ValueError(
                f"{width} x {height} pixels do not fit into the GPU's memory: use smaller tiles, such as tile=512."
            ) from None

    def _segment(self, images: Sequence[Bytes], probabilities: bool | None, progress: Progress) -> list[Segmentation]:
        height, width = images[0].shape[:2]
        small = [self.shrunk(image) for image in images]
        tile, shrunk = self._tile_for(*small[0].shape[:2]), small[0] is not images[0]
        if tile is not None and not shrunk:
            return [self._in_tiles(image, tile, bool(probabilities), progress) for image in images]
        batch = torch.from_numpy(np.stack([image.transpose(2, 0, 1) for image in small])).to(self.device)
        predict = self.predict if tile is None else tiled(self.predict, tile, self.margin, self.step)
        keep = probabilities if probabilities is not None else not shrunk
        results = []
        for image, values in zip(images, predict(batch), strict=True):  # (L, h, w)
            labels, confidence = enlarged_labels(values, height, width)
            large = enlarged_probabilities(values, height, width) if keep else None
            results.append(self.result(labels, confidence, image, large))
        return results

    def _tile_for(self, height: int, width: int) -> int | None:
        """The side of the tiles for an image of this size; None for the image as a whole."""
        if self.tile is not None:
            return self.tile if max(height, width) > self.tile else None
        kind = self.device.type if self.device.type in TILE_SIDE else "cpu"
        largest = max(1.0, *self.scales)  # tiles are cut before they are enlarged
        if height * width * largest**2 <= MAX_PIXELS_AT_ONCE[kind]:
            return None
        return max(64, int(TILE_SIDE[kind] / largest))

    def shrunk(self, image: Bytes) -> Bytes:
        """The image as the network sees it: at most `size` pixels on the longer side."""
        return image if self.size is None else shrunk(image, self.size)

    def _in_tiles(self, image: Bytes, tile: int, keep: bool, progress: Progress) -> Segmentation:
        probabilities = np.empty((len(self.labels), *image.shape[:2]), np.float32) if keep else None
        labels, confidence = tiled_labels(
            self.predict,
            image,
            tile,
            self.margin,
            step=self.step,
            device=self.device,
            probabilities=probabilities,
            progress=progress,
        )
        return self.result(labels, confidence, image, probabilities)

    def result(
        self,
        labels: NDArray[np.uint8],
        confidence: NDArray[np.float16],
        image: Bytes,
        probabilities: NDArray[np.float32] | None = None,
    ) -> Segmentation:
        """The Segmentation of an image, cleaned as this segmenter is set to."""
        result = Segmentation(labels, confidence, image, self.labels, probabilities)
        if self.min_area or self.min_confidence:
            return result.cleaned(self.min_area, self.min_confidence)
        return result


def chosen_device(name: str | torch.device | None = None) -> torch.device:
    """Return the device of that name, or for None the GPU if there is one; raise a ValueError if it cannot be used."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"device={name!r} is unknown: choose 'cpu' or 'cuda'.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(name)!r} was asked for, but PyTorch finds no GPU here: choose 'cpu'.")
    try:
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"device={str(name)!r} cannot be used here: choose 'cpu' or 'cuda'.") from None
    return device


def is_fast_in_bfloat16(device: torch.device) -> bool:
    """Does the processor multiply bfloat16 by itself (AVX-512 BF16, AMX)? Others imitate it, and are slower so."""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return device.type == "cpu" and any(check() for check in checks if check is not None)


def trained_size(models: Sequence[DeepParsingNetwork]) -> int | None:
    """The longer side to shrink images to: MAX_SIZE_BY_CROP times that of training crops, if a model's card tells.

    Where the network was trained before the MRF, by another recipe ("network" on the card), its crops count.
    """
    sides = []
    for model in models:
        recipe = model.card.recipe if isinstance(model.card.recipe, dict) else {}
        recipe = recipe["network"] if isinstance(recipe.get("network"), dict) else recipe
        augment = recipe.get("augment")
        crop = augment.get("crop") if isinstance(augment, dict) else None
        if isinstance(crop, list | tuple) and crop and all(isinstance(n, int) and 0 < n <= MAX_PIXELS for n in crop):
            sides.append(round(MAX_SIZE_BY_CROP * max(crop)))
    return max(*sides, 64) if sides else None
