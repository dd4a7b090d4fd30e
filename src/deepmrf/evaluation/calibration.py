"""Confidence: how sure a model is against how often it is right, and the temperature that brings the two together.

A network is surer of new images than it should be, and the mean field behind it was learned where it was right.
Divided by a temperature, ln p leaves more to the MRF. Which temperature, only labelled images can tell that were not
trained on.

    nll          mean over pixels of -ln q[truth]: the smaller, the better; what the temperature is chosen by.
    confidence   mean over pixels of the largest q.
    error        expected calibration error: pixels are sorted into 20 bins by their confidence, and the error is the
                 mean over pixels of |confidence of the bin - share of the bin that is right|.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepmrf.data.dataset import Dataset
from deepmrf.evaluation.evaluate import pairs
from deepmrf.evaluation.metrics import SegmentationMetrics
from deepmrf.layers.inputs import check_temperature
from deepmrf.models.parsing_network import DeepParsingNetwork

BINS = 20
TEMPERATURES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5)
"""Those that are tried."""


@dataclass(frozen=True)
class Calibrated:
    """What a model is at one temperature."""

    temperature: float
    miou: float
    accuracy: float
    """The share of pixels that are right."""
    confidence: float
    error: float
    nll: float


class Confidence:
    """Confidence, its error and nll, accumulated over images; void pixels do not count."""

    def __init__(self, ignore: int) -> None:
        self.ignore, self.nll = ignore, 0.0
        self.bins = torch.zeros(3, BINS, dtype=torch.float64)
        """Of each bin: how many pixels, the sum of their confidence, how many are right."""

    def update(self, log_q: Tensor, target: Tensor) -> None:
        """log_q (B, L, H, W), normalised; target (B, H, W)."""
        seen = target != self.ignore
        if not seen.any():
            return
        log_q, target = log_q.movedim(1, -1)[seen], target[seen]  # (N, L), (N,)
        self.nll -= float(log_q.gather(1, target[:, None]).double().sum())
        log_most, label = log_q.max(1)
        sure = log_most.double().exp()
        place = (sure * BINS).long().clamp(max=BINS - 1)
        values = torch.stack([torch.ones_like(sure), sure, (label == target).double()])
        self.bins += torch.zeros_like(self.bins, device=sure.device).index_add_(1, place, values).cpu()

    def compute(self) -> tuple[float, float, float]:
        """Confidence, error, nll; NaN before the first labelled pixel."""
        count, sure, right = self.bins
        pixels = float(count.sum()) or float("nan")
        return float(sure.sum()) / pixels, float((sure - right).abs().sum()) / pixels, self.nll / pixels


@torch.inference_mode()
def calibrate(
    model: DeepParsingNetwork,
    data: Dataset,
    temperatures: Sequence[float] = TEMPERATURES,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> list[Calibrated]:
    """The model's scores on `data` at each temperature; the model stays as it is. The network runs once per image."""
    mrf = model.mean_field
    if mrf is None:
        raise ValueError("This model has no mean field, which the temperature belongs to: it is the network alone.")
    tried = [check_temperature(value) for value in temperatures]
    if not tried:
        raise ValueError("There is no temperature to try: give at least one, such as 1.5.")
    labels, before = data.labels, mrf.temperature
    scores = [SegmentationMetrics(len(labels), labels.ignore, labels.names).to(device) for _ in tried]
    trust = [Confidence(labels.ignore) for _ in tried]
    model.eval()
    try:
        for done, (image, mask) in enumerate(pairs(data, range(len(data))), start=1):
            image, mask = image.to(device), mask.to(device)
            log_p = model.log_unary(image)
            for at, value in enumerate(tried):
                mrf.temperature = value
                log_q = model.refined(log_p, image)
                scores[at].update(log_q.argmax(1), mask)
                trust[at].update(log_q, mask)
            if progress is not None:
                progress(done, len(data))
    finally:
        mrf.temperature = before
    if not trust[0].bins.any():
        raise ValueError("No pixel of these images has a label: give a split with labelled images.")
    rows = []
    for value, score, found in zip(tried, scores, trust, strict=True):
        known = score.compute()
        rows.append(Calibrated(value, known.miou, known.pixel_accuracy, *found.compute()))
    return rows


def best(rows: Sequence[Calibrated]) -> Calibrated:
    """The row of the smallest nll."""
    return min(rows, key=lambda row: row.nll)
