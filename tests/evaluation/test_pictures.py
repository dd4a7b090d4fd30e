"""The page of evaluated images: planted gains and failures come first, in their colours."""

from __future__ import annotations

import re

import numpy as np
import torch
from PIL import Image

from deepmrf.data.dataset import Item
from deepmrf.data.labels import LabelSet
from deepmrf.evaluation.models import MODEL, NETWORK
from deepmrf.evaluation.pictures import BOTH_WRONG, GAINED, LOST, Gallery, difference


def labels_with(wrong, size=100):
    """Labels (10, 10) of zeros, the first `wrong` of which are 1."""
    return (torch.arange(size) < wrong).long().view(10, 10)


def test_gains_and_failures_come_first(tmp_path):
    gallery = Gallery(tmp_path / "seen", LabelSet(["a", "<b>"]))
    wrong = {f"even-{n:02d}": (20 + n, 20 + n) for n in range(12)} | {"gain": (50, 10), "worst": (70, 80)}
    for name, (network, model) in wrong.items():
        maps = {NETWORK: labels_with(network), MODEL: labels_with(model)}
        gallery.add(Item(name, tmp_path, None), torch.zeros(3, 10, 10, dtype=torch.uint8), labels_with(0), maps)
    gallery.add(Item("void", tmp_path, None), torch.zeros(3, 10, 10, dtype=torch.uint8), labels_with(0) + 255, maps)
    text = gallery.write("a & b").read_text()
    sections = re.split("<h2>", text)
    assert "14 images" in sections[0]
    assert "&lt;b&gt;" in sections[0]
    assert re.findall(r"<figcaption>(\S+):", sections[1]) == ["gain"]
    assert "gain: 90.00 % of pixels right, network 50.00 %, gain +40.00" in sections[1]
    failures = re.findall(r"<figcaption>(\S+):", sections[2])
    assert failures[:2] == ["worst", "even-11"]
    assert len(failures) == 10
    assert re.findall(r"<figcaption>(\S+):", sections[3]) == [f"even-{n:02d}" for n in range(3)]
    for file in re.findall(r"src='(\S+)'", text):
        assert Image.open(tmp_path / "seen" / file).width > 5 * 10


def test_the_difference_tells_gains_from_losses():
    truth = np.array([[0, 0, 0, 0, 255]])
    network, model = np.array([[0, 1, 0, 1, 0]]), np.array([[0, 0, 1, 1, 1]])
    picture = difference(np.full((1, 5, 3), 100, np.uint8), truth, network, model, 255)
    assert [tuple(colour) for colour in picture[0].tolist()] == [(200,) * 3, GAINED, LOST, BOTH_WRONG, (200,) * 3]
