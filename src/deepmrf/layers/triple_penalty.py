"""The triple penalty (b12): what label v costs at pixel j, given the pixels z around j.

    t[v, j] = lin( q[v, j] * sum over z in N(j) of d(j, z) q[v, z] ),     lin(x) = scale x + shift

kernel="distance"  d(j, z) = colour |I_j - I_z|^2 + position |j - z|^2: the paper's, exact at a cost that does not
                   depend on the window. colour and position are the paper's w1 and w2.
kernel="gaussian"  d(j, z) = exp(-|I_j - I_z|^2 / 2 a^2 - |j - z|^2 / 2 b^2), z != j: what dense CRFs use. a and b are
                   learned. With `smoothness`, plus smooth_weight exp(-|j - z|^2 / 2 c^2).
kernel="learned"   one learned filter per position (the paper's footnote): for aligned images of one fixed size.

The factor q[v, j] is the gate; without it the sum stands alone. With `average`, the sum is divided by the number of
pixels in the window, and distances by the distance to its corner, so that t is of order one whatever the window and
every parameter starts near 1 (`weights` gives the paper's w1, w2 and b as they enter the sum).
With `temporal`, the first axis is time, and pixels dt frames away weigh frame_weights[|dt| - 1] times as much, learned.
With `links`, they are those around j's trajectory: linking.py. A frame's distance is the first of `spacing`, in pixels.
The pixel on the trajectory itself, j moved by dt frames, is one of hundreds there, yet it shows the same thing as j; so
it weighs more by link_weights[|dt| - 1], learned: scale link_weights[|dt| - 1] q[v, j moved] is added to t, divided by
the number of frames with `average`.
Functions and their slow references: ops/distance.py, ops/gaussian.py, ops/local.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from deepmrf import ops
from deepmrf.layers.inputs import check_image, check_maps, check_real
from deepmrf.layers.linking import Links
from deepmrf.ops.window import reaches, sizes

Kernel = Literal["distance", "gaussian", "learned"]
KERNELS = ("distance", "gaussian", "learned")
Norms = tuple[Tensor, Tensor | None]
"""1 / sqrt(what each pixel receives) for the Gaussian kernel and for its smoothness term."""


class TriplePenalty(nn.Module):
    """b12 as a layer: q (B, L, *S), image (B, F, *S) -> t (B, L, *S), for any number of labels.

    window: pixels along each axis, one int or one per axis; an even m covers -m/2 .. m/2 - 1.
    dims: how many spatial axes. features: F; 0 for positions alone (then no image is needed).
    gate: multiply by q[v, j]. spacing: distance between pixels along each axis, in the unit you like.
    average: the window's average instead of its sum.
    smoothness, normalize: for the Gaussian kernel; `normalize` divides s(j, z) by the root of what j and z receive in
    all, as dense CRF implementations do. size: the image's size, for learned filters only.
    temporal: the first of three axes is time, and frames have weights of their own.
    """

    def __init__(
        self,
        window: int | Sequence[int] = 50,
        *,
        dims: int = 2,
        kernel: Kernel = "distance",
        gate: bool = True,
        features: int = 3,
        spacing: Sequence[float] | None = None,
        average: bool = True,
        smoothness: bool = False,
        normalize: bool = False,
        size: int | Sequence[int] | None = None,
        temporal: bool = False,
    ) -> None:
        super().__init__()
        if kernel not in KERNELS:
            raise ValueError(f"kernel={kernel!r} is unknown: choose one of {', '.join(map(repr, KERNELS))}.")
        if isinstance(dims, bool) or not isinstance(dims, int) or dims < 1:
            raise ValueError(f"dims={dims!r} must be the number of spatial axes: 1, 2, 3 or more.")
        if isinstance(features, bool) or not isinstance(features, int) or features < 0:
            raise ValueError(f"features={features!r} must be how many channels the image has: 3 for RGB, 0 for none.")
        if (smoothness or normalize) and kernel != "gaussian":
            raise ValueError(f"smoothness and normalize belong to kernel='gaussian', but kernel={kernel!r}.")
        if (size is None) == (kernel == "learned"):
            raise ValueError(f"size={size!r} with kernel={kernel!r}: kernel='learned' needs it, the others take none.")
        if temporal and (dims != 3 or kernel == "learned"):
            raise ValueError(
                f"temporal is for clips (dims=3) and kernels 'distance' and 'gaussian', but dims={dims}, "
                f"kernel={kernel!r}: leave it out."
            )
        self.dims, self.kernel, self.gate, self.temporal = dims, kernel, gate, temporal
        self.features = 0 if kernel == "learned" else features
        self.window = sizes(window, dims, "window")
        given = spacing if spacing is not None else (1.0,) * dims
        if not isinstance(given, Sequence) or len(given) != dims or not all(0 < s < math.inf for s in given):
            raise ValueError(f"spacing={spacing!r} must be {dims} positive numbers, one per axis.")
        self.spacing = tuple(float(s) for s in given)
        self.average, self.smoothness, self.normalize = average and not normalize, smoothness, normalize
        self.size = sizes(size, dims, "size") if size is not None else None
        self._make_parameters()

    def _make_parameters(self) -> None:
        def scalar(value: float) -> nn.Parameter:
            return nn.Parameter(torch.tensor(float(value)))

        radii = [max(m // 2, 1) * s for m, s in zip(self.window, self.spacing, strict=True)]
        corner = sum(r * r for r in radii)  # |j - z|^2 at the window's corner
        self.share, self.per_distance = (1 / math.prod(self.window), 1 / corner) if self.average else (1.0, 1.0)
        self.largest = self.share * self.per_distance * math.prod(self.window) * corner
        """How much larger t can be than with `average`."""
        self.link_share = 1 / self.window[0] if self.average else 1.0  # a frame of the window, as `share` is a pixel
        self.scale, self.shift = scalar(1), scalar(0)
        if self.temporal:
            self.frame_weights = nn.Parameter(torch.ones(max(reaches(self.window)[0])))  # of |dt| = 1, 2, ...
            self.link_weights = nn.Parameter(torch.zeros_like(self.frame_weights))
        if self.kernel == "distance":
            self.colour, self.position = scalar(1), scalar(1)
        elif self.kernel == "gaussian":
            self.log_colour_width = scalar(math.log(0.1))  # of RGB in [0, 1]
            self.log_position_width = scalar(math.log(max(radii) / 2))
            if self.smoothness:
                self.smooth_weight, self.log_smooth_width = scalar(1), scalar(math.log(max(radii) / 8))
        else:
            assert self.size is not None  # checked by the constructor
            steps = [
                (torch.arange(-before, after + 1) * s) ** 2
                for (before, after), s in zip(reaches(self.window), self.spacing, strict=True)
            ]
            distance = sum(torch.meshgrid(*steps, indexing="ij"), torch.zeros(self.window)) / corner
            whole = distance.view(*self.window, *[1] * self.dims).expand(*self.window, *self.size)
            self.filters = nn.Parameter(whole.clone())

    def forward(
        self, q: Tensor, image: Tensor | None = None, norms: Norms | None = None, links: Links | None = None
    ) -> Tensor:
        check_maps("q", q, q.shape[1] if isinstance(q, Tensor) and q.dim() > 1 else 1, self.dims, "labels")
        check_real("q", q)
        features = check_image(image if self.features else None, q, self.features, self.dims)
        if self.normalize and norms is None:
            norms = self.norms(q, features, links)
        if links is None and not self.temporal:
            return self._penalty(q, features, norms)
        return self._linked(q, features, norms, links or Links(q.shape[2]), self._penalty, self.temporal)

    def _linked(
        self,
        q: Tensor,
        features: Tensor,
        norms: Norms | None,
        links: Links,
        run: Callable[..., Tensor],
        straight: bool = False,
    ) -> Tensor:
        """run(q, features, norms, frame) on the stack of each frame, for that frame. (B, L, T, H, W)

        straight: and what the pixels on the trajectory add.
        """
        before, after = reach = links.reach(reaches(self.window)[0])
        if features.dtype == torch.uint8:
            features = features.to(q.dtype) / 255
        apart = torch.arange(-before, after + 1, device=q.device).abs()

        def one(span: slice) -> Tensor:
            near = weighed = links.stack(q, reach, span)
            if self.temporal:
                weights = torch.cat([torch.ones_like(self.scale)[None], self.frame_weights])
                weighed = near * weights[apart].view(-1, 1, 1)
            stacked = None
            if norms is not None:
                stacked = tuple(None if n is None else links.stack(n, reach, span) for n in norms)
            found = run(weighed, links.stack(features, reach, span, keep=True), stacked, before)
            return found + self._straight(near, before) if straight and before + after else found

        return links.over(q, (q.shape[1] + features.shape[1]) * len(apart), one)

    def _straight(self, near: Tensor, frame: int) -> Tensor:
        """What the stack's pixels at the same place add to t of one frame: (B, L, R, H, W) -> (B, L, H, W)."""
        here = near[:, :, frame]
        total = torch.zeros_like(here)
        for at in range(near.shape[2]):
            if at != frame:
                total = total + self.link_weights[abs(at - frame) - 1] * near[:, :, at]
        return self.scale * self.link_share * (here * total if self.gate else total)

    def _penalty(self, q: Tensor, features: Tensor, norms: Norms | None, frame: int | None = None) -> Tensor:
        """t at every pixel, or, in a stack of frames, at the pixels of one."""
        if self.kernel == "distance":
            return ops.distance_penalty(q, features, self.weights(), self.window, self.spacing, self.gate, frame)
        if self.kernel == "learned":
            total = ops.local_sum(q, self._filters_for(q))
        elif self.smoothness or self.normalize:
            total = self._mixture(q, features, norms, frame)
        else:
            return ops.gaussian_penalty(
                q, features, self.weights(), self.widths(), self.window, self.spacing, self.gate, frame
            )
        return (_at(q, frame) * total if self.gate else total) * (self.scale * self.share) + self.shift

    def weights(self) -> Tensor:
        """What multiplies each term of the plain sum, and what is added: (w1, w2, b), or (w, b) for the Gaussian."""
        scale = self.scale * self.share
        if self.kernel == "distance":
            return torch.stack([scale * self.colour, scale * self.position * self.per_distance, self.shift])
        return torch.stack([scale, self.shift])

    def over_time(self) -> list[nn.Parameter]:
        """With `temporal`, the parameters that only other frames have a part in."""
        return [self.frame_weights, self.link_weights] if self.temporal else []

    def widths(self) -> Tensor:
        """The Gaussian kernel's bandwidths (a, b)."""
        return torch.stack([self.log_colour_width, self.log_position_width]).exp()

    def norms(self, q: Tensor, image: Tensor | None = None, links: Links | None = None) -> Norms | None:
        """What `normalize` divides by: it depends on the image alone, so iterations share it."""
        if not self.normalize:
            return None
        features = check_image(image if self.features else None, q, self.features, self.dims)
        ones = torch.ones_like(q[:, :1])
        found = []
        for term in (self._gaussian, self._blur) if self.smoothness else (self._gaussian,):
            if links is None and not self.temporal:
                total = term(ones, features)
            else:
                total = self._linked(
                    ones, features, None, links or Links(q.shape[2]), lambda q, f, _, at, term=term: term(q, f, at)
                )
            found.append(total.clamp_min(1e-20).rsqrt())
        return found[0], found[1] if self.smoothness else None

    def _mixture(self, q: Tensor, features: Tensor, norms: Norms | None, frame: int | None) -> Tensor:
        """The Gaussian sum, normalised if asked, plus the smoothness term's. (B, L, *S)"""
        across, around = norms or (None, None)
        total = self._gaussian(q if across is None else across * q, features, frame)
        total = total if across is None else _at(across, frame) * total
        if self.smoothness:
            blurred = self._blur(q if around is None else around * q, features, frame)
            total = total + self.smooth_weight * (blurred if around is None else _at(around, frame) * blurred)
        return total

    def _gaussian(self, q: Tensor, features: Tensor, frame: int | None = None) -> Tensor:
        plain = torch.stack([torch.ones_like(self.scale), torch.zeros_like(self.shift)])
        return ops.gaussian_penalty(q, features, plain, self.widths(), self.window, self.spacing, False, frame)

    def _blur(self, q: Tensor, features: Tensor, frame: int | None = None) -> Tensor:
        return ops.gaussian_blur(q, self.log_smooth_width.exp(), self.window, self.spacing, frame)

    def _filters_for(self, q: Tensor) -> Tensor:
        if tuple(q.shape[2:]) != self.size:
            raise ValueError(
                f"The learned filters are for images of size {self.size}, but q has {tuple(q.shape[2:])}: resize it."
            )
        return self.filters

    def extra_repr(self) -> str:
        parts = [f"window={self.window}", f"dims={self.dims}", f"kernel={self.kernel!r}", f"gate={self.gate}"]
        parts += [f"features={self.features}"] if self.kernel != "learned" else [f"size={self.size}"]
        return ", ".join(
            parts + [f"{name}=True" for name in ("smoothness", "normalize", "temporal") if getattr(self, name)]
        )


def _at(maps: Tensor, frame: int | None) -> Tensor:
    """The pixels that are asked for."""
    return maps if frame is None else maps.select(2, frame)
