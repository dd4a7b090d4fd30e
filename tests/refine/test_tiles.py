"""Images that are refined in tiles, from predictions that stay in their files, and several images at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from deepmrf.layers.crf import preset
from deepmrf.predict.ahead import Cores
from deepmrf.predict.tiles import in_tiles
from deepmrf.refine import apply, decode
from deepmrf.refine.apply import refine
from deepmrf.refine.opening import open_preset
from deepmrf.refine.predictions import PredictionFolder, open_prediction

H, W, L = 160, 200, 3


def pictures(random):
    """Smooth scores (L, H, W), and an image whose colours follow them, with noise."""
    coarse = torch.from_numpy(random.normal(size=(1, L, 5, 6)))
    scores = torch.nn.functional.interpolate(coarse, size=(H, W), mode="bicubic")[0].numpy()
    noise = random.normal(size=(H, W, 3))
    image = 60 * np.moveaxis(scores, 0, -1) + 10 * noise + 128
    return (2 * scores + random.normal(size=scores.shape)).astype(np.float32), image.clip(0, 255).astype(np.uint8)


@pytest.fixture
def folders(tmp_path):
    random = np.random.default_rng(0)
    for name in ("predictions", "images"):
        (tmp_path / name).mkdir()
    for stem in "abcde":
        scores, image = pictures(random)
        np.save(tmp_path / "predictions" / f"{stem}.npy", scores)
        Image.fromarray(image).save(tmp_path / "images" / f"{stem}.png")
    return tmp_path / "predictions", tmp_path / "images"


def label_maps(folder):
    return {path.stem: np.asarray(Image.open(path)) for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", ["irn", "deeplab"])
def test_tiles_of_the_global_kernel_agree_with_the_whole(name):
    scores, image = pictures(np.random.default_rng(1))
    # A small width, so that a tile with its surroundings is smaller than the image.
    mrf = preset(name, L, position_width=10).eval()
    log_p, image = torch.from_numpy(scores).log_softmax(0), torch.from_numpy(image).permute(2, 0, 1)
    expected = mrf(log_p[None], image[None])[0].argmax(0)
    labels = torch.full_like(expected, -1)
    for region, log_q in in_tiles(mrf, log_p, image, tile=(50, 60)):
        labels[region] = log_q.argmax(0)
    assert (expected != log_p.argmax(0)).float().mean() > 0.02
    assert (labels == expected).float().mean() > 0.999


def test_large_images_are_refined_in_tiles(folders, tmp_path, monkeypatch):
    mrf, labels, _ = open_preset("irn", *folders)
    mrf.triple_penalty.log_position_width.fill_(np.log(10))
    refine(mrf, labels, *folders, tmp_path / "whole", probabilities="npy")
    monkeypatch.setattr(apply, "MAX_IMAGE_BYTES", 1 << 22)
    refine(mrf, labels, *folders, tmp_path / "tiles", probabilities="npy")
    for stem in "abcde":
        at_once, tiles = (np.asarray(Image.open(tmp_path / name / f"{stem}.png")) for name in ("whole", "tiles"))
        assert (at_once == tiles).mean() > 0.999
        at_once, tiles = (np.load(tmp_path / name / f"{stem}.npy") for name in ("whole", "tiles"))
        assert np.abs(at_once.astype(np.float32) - tiles).mean() < 1e-3


@pytest.mark.parametrize("kind", ["logits", "probabilities", "log-probabilities", "8-bit probabilities", "label ids"])
def test_a_part_of_a_prediction_is_that_part_of_all(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(decode, "MAX_VALUES_CHECKED", 1000)
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(L, 33, 40)).astype(np.float32))
    values = {
        "logits": logits,
        "probabilities": logits.softmax(0),
        "log-probabilities": logits.log_softmax(0),
        "8-bit probabilities": (255 * logits.softmax(0)).to(torch.uint8),
        "label ids": logits.argmax(0),
    }[kind]
    np.save(tmp_path / "a.npy", values.numpy())
    files = PredictionFolder(tmp_path).find("a")
    log_p, read_kind = open_prediction(files, L)
    assert read_kind == kind
    assert log_p.shape == (L, 33, 40)
    part = (slice(None), slice(5, 20), slice(30, 40))
    assert torch.equal(log_p[part], log_p.tensor()[part])


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_several_workers_give_the_same(folders, tmp_path, workers):
    mrf, labels, _ = open_preset("voc", *folders)
    threads = torch.get_num_threads()
    refine(mrf, labels, *folders, tmp_path / "default")
    calls = []
    report = refine(
        mrf, labels, *folders, tmp_path / "out", workers=workers, progress=lambda *counts: calls.append(counts)
    )
    assert report.done == tuple("abcde")
    assert calls == [(count, 5) for count in range(1, 6)]
    assert torch.get_num_threads() == threads
    for stem, ids in label_maps(tmp_path / "out").items():
        assert (ids == label_maps(tmp_path / "default")[stem]).all()


def test_large_images_get_fewer_workers(folders, tmp_path, monkeypatch):
    mrf, labels, _ = open_preset("voc", *folders)
    counts = []

    class CountedCores(Cores):
        def __init__(self, workers):
            counts.append(workers)
            super().__init__(workers)

    monkeypatch.setattr(apply, "Cores", CountedCores)
    for limit in (apply.MAX_BYTES_AT_ONCE, 3 * H * W * 330, 1):
        monkeypatch.setattr(apply, "MAX_BYTES_AT_ONCE", limit)
        refine(mrf, labels, *folders, tmp_path / "out", workers=4, overwrite=True)
    assert counts == [4, 3, 1]
    with pytest.raises(ValueError, match="workers=0 must be at least 1"):
        refine(mrf, labels, *folders, tmp_path / "out", workers=0)
