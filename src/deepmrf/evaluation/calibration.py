"""Calibration: how sure a model is against how often it is right, and the temperature that makes the two agree.

A network is surer of new images than it should be. Dividing ln p by a temperature above 1 leaves more to the MRF. The
temperature is chosen on labelled images that the model was not trained on.

    nll          mean over pixels of -ln q[truth]: the temperature with the smallest one is best.
    confidence   mean over pixels of the largest q.
    error        expected calibration error: pixels are sorted into 20 bins by their confidence, and the error is the
                 mean over pixels of |confidence of the bin - share of the bin that is right|.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepmrf.data.dataset import Dataset
from deepmrf.data.progress import Progress, no_progress
from deepmrf.evaluation.evaluate import computed, labelled_images, new_metrics
from deepmrf.layers.inputs import check_temperature
from deepmrf.models.parsing_network import DeepParsingNetwork

BINS = 20
TEMPERATURES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5)
"""Temperatures that `calibrate` tries by default."""


@dataclass(frozen=True)
class Calibration:
    """Scores of a model at one temperature."""

    temperature: float
    miou: float
    accuracy: float
    """Share of pixels that are right."""
    confidence: float
    error: float
    nll: float


class Confidence:
    """Confidence, its error and nll, accumulated over images. Void pixels do not count."""

    def __init__(self, ignore: int) -> None:
        self.ignore, self.nll = ignore, 0.0
        self.bins = torch.zeros(3, BINS, dtype=torch.float64)
        """(3, BINS): number of pixels, sum of their confidence, and number of right ones in each bin."""

    def update(self, log_q: Tensor, target: Tensor) -> None:
        """Add images: log_q (B, L, H, W), normalised; target (B, H, W)."""
        labelled = target != self.ignore
        if not labelled.any():
            return
        log_q, target = log_q.movedim(1, -1)[labelled], target[labelled]  # (N, L), (N,)
        self.nll -= float(log_q.gather(1, target[:, None]).double().sum())
        log_confidence, labels = log_q.max(1)
        confidence = log_confidence.double().exp()
        indices = (confidence * BINS).long().clamp(max=BINS - 1)
        values = torch.stack([torch.ones_like(confidence), confidence, (labels == target).double()])
        self.bins += torch.zeros_like(self.bins, device=log_q.device).index_add_(1, indices, values).cpu()

    def compute(self) -> tuple[float, float, float]:
        """Return (confidence, error, nll); NaN before the first labelled pixel."""
        count, confidence, right = self.bins
        pixels = float(count.sum()) or float("nan")
        return float(confidence.sum()) / pixels, float((confidence - right).abs().sum()) / pixels, self.nll / pixels


@torch.inference_mode()
def calibrate(
    model: DeepParsingNetwork,
    data: Dataset,
    temperatures: Sequence[float] = TEMPERATURES,
    device: torch.device | str = "cpu",
    progress: Progress = no_progress,
) -> list[Calibration]:
    """Score the model on `data` at each temperature. The network runs once per image; the model does not change."""
    mrf = model.mean_field
    if mrf is None:
        raise ValueError("This model has no mean field, which the temperature belongs to: it is the network alone.")
    parts = [(check_temperature(t), new_metrics(data, device), Confidence(data.labels.ignore)) for t in temperatures]
    if not parts:
        raise ValueError("There is no temperature to try: give at least one, such as 1.5.")
    temperature_before = mrf.temperature
    model.eval()
    try:
        for done, (_, image, mask) in enumerate(labelled_images(data), start=1):
            image, mask = image.to(device), mask.to(device)
            log_p = model.log_unary(image)
            for temperature, metrics, confidence in parts:
                mrf.temperature = temperature
                log_q = model.refined(log_p, image)
                metrics.update(log_q.argmax(1), mask)
                confidence.update(log_q, mask)
            progress(done, len(data))
    finally:
        mrf.temperature = temperature_before
    calibrations = []
    for temperature, metrics, confidence in parts:
        scores = computed(metrics)
        calibrations.append(Calibration(temperature, scores.miou, scores.pixel_accuracy, *confidence.compute()))
    return calibrations


def best(calibrations: Sequence[Calibration]) -> Calibration:
    """Return the calibration with the smallest nll."""
    return min(calibrations, key=lambda calibration: calibration.nll)
