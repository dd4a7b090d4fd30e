"""Soft masks are told from label maps, and their shades are probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from deepmrf.data.files import DataError
from deepmrf.refine.label_ids import SOFT
from deepmrf.refine.predictions import PredictionFolder, open_prediction
from deepmrf.refine.soft_masks import are_soft, open_soft_mask

RAMP = np.arange(256, dtype=np.uint8).reshape(8, 32)


def files_of(folder):
    index = PredictionFolder(folder)
    return [index.find(stem) for stem in index.stems()]


def write(folder, **maps):
    for name, values in maps.items():
        if values.dtype.kind == "f":
            np.save(folder / f"{name}.npy", values)
        else:
            Image.fromarray(values).save(folder / f"{name}.png")
    return files_of(folder)


def test_shades_are_probabilities(tmp_path):
    [files] = write(tmp_path, a=RAMP)
    log_p, kind = open_prediction(files, 2, None, SOFT)
    p = log_p.tensor().exp()
    assert "soft masks" in kind
    torch.testing.assert_close(p[1], torch.from_numpy(RAMP / 255).float().clamp(1e-6, 1 - 1e-6), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(p.sum(0), torch.ones(8, 32))
    part = log_p[:, 2:4, 5:9]
    assert torch.equal(part, log_p.tensor()[:, 2:4, 5:9])


def test_a_limit_makes_certain_pixels_less_so(tmp_path):
    [files] = write(tmp_path, a=RAMP)
    p = open_soft_mask(files, 0.8)[0].tensor().exp()[1]
    assert float(p.min()) == pytest.approx(0.2)
    assert float(p.max()) == pytest.approx(0.8)


def test_pictures_of_16_bits_and_floats_are_soft(tmp_path):
    wide = (RAMP.astype(np.uint16) * 257)[:, ::-1].copy()
    files = write(tmp_path, a=wide, b=(RAMP / 255).astype(np.float32))
    assert are_soft(files)
    first, second = (open_soft_mask(f)[0].tensor() for f in files)
    torch.testing.assert_close(first.flip(2), second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "soft"),
    [
        (RAMP, True),
        (np.uint8(RAMP // 12), False),  # 22 ids
        (np.where(RAMP > 150, 255, RAMP).astype(np.uint8), False),  # 151 ids and void
        (np.where(RAMP > 181, 255, RAMP).astype(np.uint8), False),  # 182 ids and void
        (np.where(RAMP > 128, 255, 0).astype(np.uint8), False),  # binary
        (np.full((4, 5), 0.3, np.float32), True),
        (np.full((4, 5), 1.3, np.float32), False),
        (np.full((2, 4, 5), 0.5, np.float32), False),  # both labels
    ],
)
def test_they_are_told_from_label_maps(tmp_path, values, soft):
    assert are_soft(write(tmp_path, a=values)) is soft


def test_palettes_and_confidences_are_of_label_maps(tmp_path):
    picture = Image.fromarray(RAMP)
    picture.putpalette(bytes(768))
    picture.save(tmp_path / "a.png")
    assert not are_soft(files_of(tmp_path))
    Image.fromarray(RAMP).save(tmp_path / "a.png")
    assert are_soft(files_of(tmp_path))
    Image.fromarray(RAMP).save(tmp_path / "a_confidence.png")
    assert not are_soft(files_of(tmp_path))


def test_other_predictions_are_refused_in_one_sentence(tmp_path):
    [files] = write(tmp_path, a=np.full((2, 4, 5), 0.5, np.float32))
    with pytest.raises(DataError, match=r"a\.npy is no soft mask: save a grey picture of 8 or 16 bits, or floats"):
        open_soft_mask(files)
