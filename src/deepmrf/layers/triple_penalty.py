"""b12, the triple penalty: what label v costs at pixel j, given the pixels z around j.

    t[v, j] = lin( q[v, j] * sum over z in N(j) of d(j, z) q[v, z] ),     lin(x) = scale x + shift

kernel="distance"  the paper's d(j, z) = w1 |I_j - I_z|^2 + w2 |j - z|^2; w1 is `colour`, w2 is `position`.
                   Exact, at a cost that does not depend on the window.
kernel="gaussian"  dense CRF's d(j, z) = exp(-|I_j - I_z|^2 / 2 a^2 - |j - z|^2 / 2 b^2), z != j; a and b are learned.
                   `smoothness` adds smooth_weight exp(-|j - z|^2 / 2 c^2).
kernel="global"    the same between all pairs of pixels of the image, z = j included, without a window (all_pairs.py).
kernel="learned"   one learned filter per position (the paper's footnote), for aligned images of one fixed size.

The factor q[v, j] is the gate; gate=False drops it. `average` divides the sum by the number of pixels in the window and
|j - z|^2 by its value at the window's corner: then t is of order one for every window, and all parameters start near 1.
`weights` returns w1, w2 and b as they enter the plain sum.

In clips (`temporal`, the first axis is time), a pixel dt frames away has the weight frame_weights[|dt| - 1]. `links`
bring the frames of a window onto j's trajectory (linking.py). The first number of `spacing` is the distance of two
frames, in pixels.

The operators and their slow references: ops/distance, ops/gaussian, ops/learned.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Literal

import torch
from torch import Tensor, nn

from deepmrf import ops
from deepmrf.layers.all_pairs import AllPairs
from deepmrf.layers.inputs import check_count, check_image, check_maps, check_real
from deepmrf.layers.linking import Links, weigh
from deepmrf.ops.window import reaches, sizes

Kernel = Literal["distance", "gaussian", "global", "learned"]
KERNELS = ("distance", "gaussian", "global", "learned")
Norms = tuple[Tensor, Tensor | None] | AllPairs
"""1 / sqrt(sum of the weights at each pixel) (B, 1, *S), of the Gaussian kernel and of its smoothness term; or the
edges of the global kernel."""
DEFAULT_GLOBAL_WIDTHS = (80.0, 3.0)
"""Pixels: the widths of the position and of the smoothness term that the global kernel starts with."""
SMALLEST_NORM_SUM = 1e-20
SMALLEST_NORM_SUM_ELSEWHERE = 1e-4
"""Smaller sums of weights count as this in `normalize`: such a pixel is unlike all around it. The second is for GPUs,
which multiply in half precision, where the root of a smaller sum, as large as 1e10, would leave nothing of all other
pixels; and for windows over frames, where a pixel may see another one that does not see it."""


def default_window(dims: int, temporal: bool = False) -> int | tuple[int, ...]:
    """The paper's 50 x 50 for images and 3 x 50 x 50 for clips; 9 along each axis of volumes."""
    if temporal:
        return (3, 50, 50)
    return 50 if dims in (1, 2) else 9


class TriplePenalty(nn.Module):
    """b12 as a layer: q (B, L, *S), image (B, F, *S) -> t (B, L, *S), for any number of labels L.

    window: pixels along each axis, an int or one per axis; an even m covers -m/2 .. m/2 - 1. None: `default_window`.
    dims: number of spatial axes. features: F; 0 uses positions alone, and no image is needed.
    gate: multiply by q[v, j]. spacing: distance between pixels along each axis, in any unit.
    average: the window's average instead of its sum.
    smoothness, normalize: for the Gaussian kernel; `normalize` divides d(j, z) by the root of the sums of all weights
    at j and at z, as dense CRF implementations do. size: the image's size, for learned filters only.
    temporal: the first of three axes is time, and frames have weights of their own.
    """

    def __init__(
        self,
        window: int | Sequence[int] | None = None,
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
        check_count("features", features, least=0)
        flags = {"gate": gate, "average": average, "smoothness": smoothness, "normalize": normalize}
        for name, flag in {**flags, "temporal": temporal}.items():
            if not isinstance(flag, bool):
                raise ValueError(f"{name}={flag!r} must be True or False.")
        if (smoothness or normalize) and kernel not in ("gaussian", "global"):
            raise ValueError(f"smoothness and normalize are for kernel='gaussian' and 'global', not kernel={kernel!r}.")
        if kernel == "global" and window not in (None, 1):
            raise ValueError(f"window={window!r} with kernel='global', which has none: leave it out.")
        if (size is None) == (kernel == "learned"):
            raise ValueError(f"size={size!r} with kernel={kernel!r}: kernel='learned' needs it, the others take none.")
        if temporal and (dims != 3 or kernel in ("learned", "global")):
            raise ValueError(
                f"temporal is for clips (dims=3) and kernels 'distance' and 'gaussian', but dims={dims}, "
                f"kernel={kernel!r}: leave it out."
            )
        steps = spacing if spacing is not None else (1.0,) * dims
        if not isinstance(steps, Sequence) or len(steps) != dims or not all(map(_is_distance, steps)):
            raise ValueError(f"spacing={spacing!r} must be {dims} positive numbers, one per axis.")
        self.dims, self.kernel, self.gate, self.temporal = dims, kernel, gate, temporal
        self.features = 0 if kernel == "learned" else features
        window = 1 if kernel == "global" else default_window(dims, temporal) if window is None else window
        self.window = sizes(window, dims, "window")
        self.spacing = tuple(float(step) for step in steps)
        self.origin: tuple[int, ...] | None = None
        """Position of the image's first pixel where it is a tile of a larger image, for kernel="global"."""
        self.smoothness, self.normalize = smoothness, normalize
        self.average = average and not normalize and kernel != "global"
        self.size = sizes(size, dims, "size") if size is not None else None
        self._make_parameters()

    def _make_parameters(self) -> None:
        def scalar(value: float) -> nn.Parameter:
            return nn.Parameter(torch.tensor(float(value)))

        radii = [max(m // 2, 1) * step for m, step in zip(self.window, self.spacing, strict=True)]
        pixels, corner = math.prod(self.window), sum(radius * radius for radius in radii)
        # What `average` multiplies the sum and |j - z|^2 by.
        self.pixel_share, self.corner_share = (1 / pixels, 1 / corner) if self.average else (1.0, 1.0)
        self.gain = 1.0 if self.average else pixels * corner
        """How much larger t can be than with `average`."""
        self.scale, self.shift = scalar(1), scalar(0)
        if self.temporal:
            self.frame_weights = nn.Parameter(torch.ones(max(reaches(self.window)[0])))  # of |dt| = 1, 2, ...
        if self.kernel == "distance":
            self.colour, self.position = scalar(1), scalar(1)
        elif self.kernel in ("gaussian", "global"):
            wide = (max(radii) / 2, max(radii) / 8) if self.kernel == "gaussian" else DEFAULT_GLOBAL_WIDTHS
            self.log_colour_width = scalar(math.log(0.1))  # for RGB in [0, 1]
            self.log_position_width = scalar(math.log(wide[0]))
            if self.smoothness:
                self.smooth_weight, self.log_smooth_width = scalar(1), scalar(math.log(wide[1]))
        else:
            assert self.size is not None  # the constructor checks it
            squares = [
                (torch.arange(-before, after + 1) * step) ** 2
                for (before, after), step in zip(reaches(self.window), self.spacing, strict=True)
            ]
            distance = sum(torch.meshgrid(*squares, indexing="ij"), torch.zeros(self.window)) / corner
            filters = distance.view(*self.window, *[1] * self.dims).expand(*self.window, *self.size)
            self.filters = nn.Parameter(filters.clone())

    def forward(
        self, q: Tensor, image: Tensor | None = None, norms: Norms | None = None, links: Links | None = None
    ) -> Tensor:
        check_maps("q", q, None, self.dims, "labels")
        check_real("q", q)
        if self.normalize and q.dtype == torch.float16:  # its smallest number is larger than some sums of weights
            image = image.float() if image is not None and image.is_floating_point() else image
            return self.forward(q.float(), image, norms, links).half()
        features = check_image(image if self.features else None, q, self.features, self.dims)
        if (self.normalize or self.kernel == "global") and norms is None:
            norms = self.norms(q, features, links)
        if links is None and not self.temporal:
            return self._penalty(q, features, norms)
        return self._over_stacks(self._penalty, q, features, norms, links)

    def weights(self) -> Tensor:
        """What multiplies each term of the plain sum, and what is added: (w1, w2, b), or (w, b) for the Gaussian."""
        scale = self.scale * self.pixel_share
        if self.kernel == "distance":
            return torch.stack([scale * self.colour, scale * self.position * self.corner_share, self.shift])
        return torch.stack([scale, self.shift])

    def widths(self) -> Tensor:
        """The Gaussian kernel's bandwidths (a, b)."""
        return torch.stack([self.log_colour_width, self.log_position_width]).exp()

    def _penalty(self, q: Tensor, features: Tensor, norms: Norms | None, frame: int | None = None) -> Tensor:
        """t at every pixel or, in a stack of frames, at the pixels of `frame`."""
        if self.kernel == "distance":
            return ops.distance_penalty(q, features, self.weights(), self.window, self.spacing, self.gate, frame)
        if self.kernel == "learned":
            total = ops.local_sum(q, self._filters_for(q))
        elif isinstance(norms, AllPairs):
            total = norms.sums(q, self.smooth_weight if self.smoothness else None)
        elif self.smoothness or self.normalize:
            total = self._two_gaussians(q, features, norms, frame)
        else:
            return ops.gaussian_penalty(
                q, features, self.weights(), self.widths(), self.window, self.spacing, self.gate, frame
            )
        return (_at(q, frame) * total if self.gate else total) * (self.scale * self.pixel_share) + self.shift

    def _filters_for(self, q: Tensor) -> Tensor:
        if tuple(q.shape[2:]) != self.size:
            raise ValueError(
                f"The learned filters are for images of size {self.size}, but q has {tuple(q.shape[2:])}: resize it."
            )
        return self.filters

    def _two_gaussians(self, q: Tensor, features: Tensor, norms: Norms | None, frame: int | None) -> Tensor:
        """The Gaussian sum plus that of the smoothness term, each normalised if asked. (B, L, *S)"""
        assert not isinstance(norms, AllPairs)  # _penalty tells them apart
        norm, smooth_norm = norms or (None, None)
        total = self._gaussian(q if norm is None else norm * q, features, frame)
        total = total if norm is None else _at(norm, frame) * total
        if self.smoothness:
            smooth = self._smooth(q if smooth_norm is None else smooth_norm * q, features, frame)
            total = total + self.smooth_weight * (smooth if smooth_norm is None else _at(smooth_norm, frame) * smooth)
        return total

    def _gaussian(self, q: Tensor, features: Tensor, frame: int | None = None) -> Tensor:
        plain = torch.stack([torch.ones_like(self.scale), torch.zeros_like(self.shift)])
        return ops.gaussian_penalty(q, features, plain, self.widths(), self.window, self.spacing, False, frame)

    def _smooth(self, q: Tensor, features: Tensor, frame: int | None = None) -> Tensor:
        return ops.gaussian_blur(q, self.log_smooth_width.exp(), self.window, self.spacing, frame)

    def norms(self, q: Tensor, image: Tensor | None = None, links: Links | None = None) -> Norms | None:
        """What `normalize` multiplies by, or the global edges: of the image alone, so that all iterations share it."""
        if not self.normalize and self.kernel != "global":
            return None
        features = check_image(image if self.features else None, q, self.features, self.dims)
        if self.kernel == "global":
            smooth_width = self.log_smooth_width.exp() if self.smoothness else None
            return AllPairs.of(features, self.widths(), smooth_width, self.spacing, self.normalize, self.origin)
        ones = torch.ones_like(q[:, :1])
        of_clip = links is not None or self.temporal
        over_frames = of_clip and self.sees_windows_of_other_frames()
        smallest = SMALLEST_NORM_SUM_ELSEWHERE if q.is_cuda or over_frames else SMALLEST_NORM_SUM

        def norm(term: Callable[..., Tensor]) -> Tensor:
            def total(q: Tensor, features: Tensor, _: None = None, frame: int | None = None) -> Tensor:
                return self._sum_both_ways(term, q, features, frame)

            sums = self._over_stacks(total, ones, features, None, links, True) if of_clip else total(ones, features)
            return sums.clamp_min(smallest).rsqrt()

        return norm(self._gaussian), norm(self._smooth) if self.smoothness else None

    def _sum_both_ways(self, term: Callable[..., Tensor], ones: Tensor, features: Tensor, frame: int | None) -> Tensor:
        """The sum of the weights of all that a pixel sees or, where even windows make that more, of all that see it."""
        sums = term(ones, features, frame)
        axes = [axis - self.dims for axis, (before, after) in enumerate(reaches(self.window)) if before != after]
        axes = [axis for axis in axes if frame is None or axis > -self.dims]  # along frames, a window is as it is
        if not axes:
            return sums
        return torch.maximum(sums, term(ones, features.flip(axes), frame).flip(axes))

    def _over_stacks(
        self,
        penalty: Callable[..., Tensor],
        q: Tensor,
        features: Tensor,
        norms: Norms | None,
        links: Links | None,
        sizes_of_weights: bool = False,
    ) -> Tensor:
        """penalty(q, features, norms, frame) on the stack around every frame.

        sizes_of_weights: take the frames' weights without their signs.
        """
        links = links or Links(q.shape[2])
        before, after = reach = links.reach(reaches(self.window)[0]) if self.sees_windows_of_other_frames() else (0, 0)
        if features.dtype == torch.uint8 and reach != (0, 0):
            features = features.to(q.dtype) / 255
        distances = torch.arange(-before, after + 1, device=q.device).abs()  # |dt| of each frame of a stack

        def run(span: slice) -> Tensor:
            weighted = links.stack(q, reach, span)
            if self.temporal and before + after:
                weights = torch.cat([torch.ones_like(self.scale)[None], self.frame_weights])
                weights = weights.abs() if sizes_of_weights else weights
                weighted = weighted * weights[distances].view(-1, 1, 1)
            stacked_norms = None
            if norms is not None:
                assert not isinstance(norms, AllPairs)  # the global kernel has no frames
                stacked_norms = tuple(None if norm is None else links.stack(norm, reach, span) for norm in norms)
            return penalty(weighted, links.stack(features, reach, span, keep=True), stacked_norms, before)

        return links.over(q, (q.shape[1] + features.shape[1]) * len(distances), run)

    def of_frame(self, q: Tensor, image: Tensor | None) -> Tensor:
        """t (B, L, 1, H, W) of a frame (B, L, 1, H, W), where windows of other frames weigh nothing."""
        features = check_image(image if self.features else None, q, self.features, self.dims)
        return self._penalty(q, features, self.norms(q, features), 0)[:, :, None]

    def sees_windows_of_other_frames(self) -> bool:
        """Do windows in other frames weigh anything, or may training change that?"""
        return not self.temporal or weigh(self.frame_weights)

    def extra_repr(self) -> str:
        parts = [f"window={self.window}", f"dims={self.dims}", f"kernel={self.kernel!r}", f"gate={self.gate}"]
        parts += [f"features={self.features}"] if self.kernel != "learned" else [f"size={self.size}"]
        return ", ".join(
            parts + [f"{name}=True" for name in ("smoothness", "normalize", "temporal") if getattr(self, name)]
        )


def _is_distance(step: object) -> bool:
    try:
        return isinstance(step, Real) and 0 < float(step) < math.inf
    except OverflowError:
        return False


def _at(maps: Tensor, frame: int | None) -> Tensor:
    """The maps of one frame of a stack, or all."""
    return maps if frame is None else maps.select(2, frame)
