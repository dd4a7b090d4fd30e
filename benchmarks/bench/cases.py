"""One thing to measure, described by plain values so that a fresh process can do the same, and the call behind it."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.bench import peers
from benchmarks.bench.inputs import make_inputs
from deepmrf import ops
from deepmrf.layers import LabelContexts, MeanField, TriplePenalty, dense_crf
from deepmrf.ops import contexts, distance, gaussian

Kind = Literal[
    "distance",
    "gaussian",
    "step",
    "compressed",
    "dense_crf",
    "all_pairs",
    "direct_loop",
    "unfolded_crf",
    "pydensecrf2",
]
Call = Callable[[], Any]

LOOP_WORK = 1e9
"""Pairs of pixels times labels that a plain loop over offsets may take on the CPU: a few seconds."""
LOOP_SAMPLE = {"cpu": 48, "cuda": 2500}
"""Offsets of the direct loop that are timed; the others take as long."""
STRIDE = 2
"""Of the compressed contexts."""


@dataclass(frozen=True)
class Case:
    """What to measure. implementation: as deepmrf.ops.use takes it. backward: the gradient to q and parameters too."""

    name: str
    kind: Kind
    size: int
    labels: int
    batch: int = 1
    window: int = 50
    iterations: int = 1
    backward: bool = False
    implementation: str | None = None
    peer: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0
    image: str = "photo"


class Unavailable(Exception):
    """The case cannot run here; the message says why, and what to do."""


@dataclass(frozen=True)
class Prepared:
    """What to call. factor: the whole case takes so many times as long as the call, and `note` says why."""

    call: Call
    q_bytes: int
    chosen: str
    factor: float = 1.0
    note: str = ""


class Pool:
    """Inputs shared by the cases of one run: each is made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], tuple[Tensor, Tensor, Tensor]] = {}

    def get(self, case: Case) -> tuple[Tensor, Tensor, Tensor]:
        """(log_p, q = exp(log_p), image) on the case's device and in its dtype."""
        key = (case.batch, case.labels, case.size, case.seed, case.device, case.dtype, case.image)
        if key not in self._made:
            log_p, image = (
                x.to(case.device, getattr(torch, case.dtype))
                for x in make_inputs(case.batch, case.labels, case.size, case.seed, case.image)
            )
            self._made[key] = (log_p, log_p.exp(), image)
        return self._made[key]


def pairs(size: int, window: int) -> int:
    """How many (j, z), both inside a size x size image, a window x window sum visits."""
    before, after = window // 2, window - window // 2 - 1
    along = sum(max(size - abs(o), 0) for o in range(-before, after + 1))
    return along * along


def _smooth_contexts(layer: LabelContexts, seed: int) -> None:
    """Patterns as training leaves them, smooth and distinct; the untrained layer's are all but zero."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(layer.labels * layer.contexts, layer.labels, 3, 3, generator=generator)
    with torch.no_grad():
        smooth = functional.interpolate(coarse, size=layer.size, mode="bilinear", align_corners=True)
        layer.weight.copy_(smooth / (layer.labels * layer.weight[0, 0].numel()))


def _layer(case: Case) -> torch.nn.Module:
    """The layer of a case of ours, with parameters in float32 (float64 for float64 maps)."""
    layer: torch.nn.Module
    if case.kind == "distance" or case.kind == "gaussian":
        layer = TriplePenalty(case.window, kernel=case.kind)
    elif case.kind == "dense_crf":
        layer = dense_crf(case.labels, window=case.window, iterations=case.iterations)
    else:
        layer = MeanField(case.labels, window=case.window, iterations=case.iterations)
        assert layer.label_contexts is not None  # MeanField's default is 5 contexts
        _smooth_contexts(layer.label_contexts, case.seed)
    parameters = torch.float64 if case.dtype == "float64" else torch.float32
    return layer.to(case.device, parameters)


def _chosen(case: Case, layer: torch.nn.Module, q: Tensor, image: Tensor) -> str:
    """The implementations that run, as the operators choose them: "numba", or "numba, torch" for b12 and b13."""
    window, spacing, weights = [case.window] * 2, [1.0] * 2, q.new_ones(3, dtype=torch.float32)
    with ops.use(case.implementation):
        if case.kind in ("gaussian", "dense_crf"):
            pairwise = gaussian.Arguments(q, image, weights, weights[:2], window, spacing, gate=True, keep=False)
            names = [gaussian.operator.choose(pairwise).name]
        else:
            names = [distance.operator.choose(distance.Arguments(q, image, weights, window, spacing, True, False)).name]
        if case.kind == "step" and isinstance(layer, MeanField) and layer.label_contexts is not None:
            own = layer.label_contexts
            arguments = contexts.Arguments(q, own.weight, own.bias, own.contexts)
            names.append(contexts.operator.choose(arguments).name)
    return ", ".join(dict.fromkeys(names))


def _affordable(case: Case, chosen: str) -> tuple[Case, float, str]:
    """A smaller case where a plain loop over offsets would take minutes, with the factor between the two."""
    if chosen != "torch" or case.kind not in ("gaussian", "dense_crf") or case.device != "cpu":
        return case, 1.0, ""

    def work(sized: Case) -> float:
        return pairs(sized.size, sized.window) * sized.labels * sized.batch * sized.iterations

    small = case
    while work(small) > LOOP_WORK and small.size > 64:
        small = dataclasses.replace(small, batch=1, size=small.size // 2)
    factor = work(case) / work(small)
    return small, factor, "" if small == case else f"extrapolated from {small.size} x {small.size}, as pairs of pixels"


def _ours(case: Case, pool: Pool) -> Prepared:
    layer, note = _layer(case), ""
    if case.kind == "compressed":
        layer, note = _compressed(layer, *pool.get(case)[::2])
    _, whole_q, whole_image = pool.get(case)
    chosen = _chosen(case, layer, whole_q, whole_image)
    small, factor, why = _affordable(case, chosen)
    log_p, q, image = pool.get(small)
    given = q if isinstance(layer, TriplePenalty) else log_p
    return Prepared(
        partial(_backward if case.backward else _forward, layer, given, image, case.implementation),
        q.numel() * q.element_size(),
        chosen,
        factor,
        "; ".join(part for part in (note, why) if part),
    )


@torch.no_grad()
def _compressed(layer: torch.nn.Module, log_p: Tensor, image: Tensor) -> tuple[torch.nn.Module, str]:
    """The step with cheaper contexts in place of its own, and by how much log-probabilities differ on average."""
    assert isinstance(layer, MeanField)
    own = layer.label_contexts
    assert own is not None
    penalty = own(layer.triple_penalty(log_p.exp(), image))
    own.weight.div_(penalty.std())  # contexts that matter: penalties that differ by 1
    cheaper = layer.compress(stride=STRIDE)
    difference = (layer(log_p, image) - cheaper(log_p, image)).abs().mean()
    return cheaper, f"stride {STRIDE}, log-probabilities differ by {float(difference):.3f} on average"


def _forward(layer: torch.nn.Module, given: Tensor, image: Tensor, implementation: str | None) -> Tensor:
    with torch.no_grad(), ops.use(implementation):
        result: Tensor = layer(given, image)
        return result


def _backward(layer: torch.nn.Module, given: Tensor, image: Tensor, implementation: str | None) -> Tensor | None:
    leaf = given.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    with ops.use(implementation):
        result: Tensor = layer(leaf, image)
        torch.autograd.backward([result], [given])  # any gradient of full size will do
    return leaf.grad


def _direct_loop(case: Case, pool: Pool) -> Prepared:
    _, q, image = pool.get(case)
    weights = torch.tensor([1.0, 2 / case.window**2, 0.0], device=q.device, dtype=q.dtype)
    reach = [min(side, case.size - 1) for side in (case.window // 2, case.window - case.window // 2 - 1)]
    total, sample = (sum(reach) + 1) ** 2, LOOP_SAMPLE.get(case.device, LOOP_SAMPLE["cpu"])
    note = f"extrapolated from {sample} of {total} offsets" if sample < total else ""
    call = partial(peers.direct_loop, q, image, weights, case.window, sample=sample)
    return Prepared(torch.no_grad()(call), q.numel() * q.element_size(), "torch", max(total / sample, 1.0), note)


def _unfolded_crf(case: Case, pool: Pool) -> Prepared:
    log_p, q, image = pool.get(case)
    call = partial(peers.unfolded_crf, log_p, image, case.window, case.iterations)
    return Prepared(torch.no_grad()(call), q.numel() * q.element_size(), "torch")


def _all_pairs(case: Case, pool: Pool) -> Prepared:
    """The dense CRF over the whole image; the note compares its label map with pydensecrf2's."""
    log_p, q, image = pool.get(case)
    photo = _bytes(image)
    layer = dense_crf(case.labels, iterations=case.iterations).to(case.device)
    call = partial(_forward, layer, log_p, photo, case.implementation)
    note = ""
    if case.device == "cpu" and peers.pydensecrf_installed():
        labels = call()[0].argmax(0)
        expected = torch.from_numpy(_pydensecrf2(case, pool).call().argmax(0)).view(labels.shape)
        note = f"{(labels == expected).float().mean():.3%} of the labels are pydensecrf2's"
    compiled = "triton" if case.device == "cuda" else "numba"
    chosen = compiled if importlib.util.find_spec(compiled) is not None else "torch"
    return Prepared(call, q.numel() * q.element_size(), chosen, note=note)


def _bytes(image: Tensor) -> Tensor:
    """The image as uint8."""
    return (image.float() * 255).round().byte()


def _pydensecrf2(case: Case, pool: Pool) -> Prepared:
    if case.device != "cpu":
        raise Unavailable("pydensecrf2 runs on the CPU only: compare with --device cpu.")
    if not peers.pydensecrf_installed():
        raise Unavailable("pydensecrf2 is not installed: pip install pydensecrf2 (it compiles for a minute or two).")
    log_p, q, image = pool.get(case)
    energy = np.ascontiguousarray(-log_p[0].float().flatten(1).numpy())
    photo = np.ascontiguousarray(_bytes(image[0]).movedim(0, -1).numpy())
    call = partial(peers.pydensecrf, energy, photo, case.iterations)
    return Prepared(call, q[:1].numel() * q.element_size(), "C++", note="one image, one thread, float32")


def prepare(case: Case, pool: Pool) -> Prepared:
    """The call of a case with its inputs made; raises Unavailable where it cannot run."""
    makers = {
        "all_pairs": _all_pairs,
        "direct_loop": _direct_loop,
        "unfolded_crf": _unfolded_crf,
        "pydensecrf2": _pydensecrf2,
    }
    try:
        return makers.get(case.kind, _ours)(case, pool)
    except RuntimeError as error:  # a forced implementation that this operator does not have, or no memory
        raise Unavailable(str(error).splitlines()[0]) from error
