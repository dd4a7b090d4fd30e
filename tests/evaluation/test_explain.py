"""The report of a model: its sections and files, of models of every kind."""

from __future__ import annotations

import base64
import re

import numpy as np
import pytest
import torch

from deepmrf.data import synthetic
from deepmrf.data.labels import CAMVID, LabelSet
from deepmrf.evaluation.explain import Picture, _changed_pixel, explain, parse_pairs, pictures_of
from deepmrf.evaluation.steps import LayerSteps
from deepmrf.figures.contexts import strongest_pairs
from deepmrf.models.parsing_network import DeepParsingNetwork, read_model

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.usefixtures("plain_torch")
MET = np.repeat([[1] * 8 + [2] * 16 + [3] * 8], 24, axis=0).astype(np.uint8)
"""Labels (24, 32) where 1 meets 2, and 2 meets 3."""
IMAGE = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Figures of few dots: these tests look at their files."""
    monkeypatch.setattr("deepmrf.figures.drawing.DOTS_PER_INCH", 50)


def stems(report):
    return [path.stem for path in report.figures]


def test_the_page_holds_its_figures_and_needs_no_network(model_folder, tmp_path):
    model, done = read_model(model_folder), []
    truth = np.zeros((24, 32), np.uint8)
    pictures = [Picture("<cat>.jpg", IMAGE, truth)]
    report = explain(model, "tiny", pictures, tmp_path, (31, 23), [(1, 0)], progress=lambda *step: done.append(step))
    assert stems(report) == ["compatibility", "patterns", "steps-1", "contexts-1", "window-1"]
    text = report.page.read_text()
    assert "<h2>&lt;cat&gt;.jpg</h2>" in text
    assert "&quot;pixel&quot;: [31, 23]" in text
    assert not re.findall(r"(?:src|href)=.\w+://", text)
    for path in report.figures:
        assert base64.b64encode(path.read_bytes()).decode() in text
        assert f"href='{path.stem}.svg'" in text
        assert path.with_suffix(".svg").is_file()
    assert done == [(1, 3), (2, 3), (3, 3)]


def test_models_of_clips_show_the_frame_before(model_folder, tmp_path):
    model = read_model(model_folder).inflate()
    model.card.metrics = {"val": {"unary": {"ta": 0.5, "la": 0.5, "ba": 0.5}}}
    model.card.recipe = {"stage": [{"name": "unary"}]}
    report = explain(model, "clips", [], tmp_path)
    assert stems(report) == ["compatibility", "patterns", "compatibility-before", "patterns-before", "stages"]
    assert "Give a picture" in report.page.read_text()


def test_a_model_of_one_label_has_no_pairs(tmp_path):
    mrf = {"window": 3, "contexts": 2, "context_size": 3}
    model = DeepParsingNetwork.build("fast", LabelSet(("road",), ((1, 2, 3),)), {"width": 8}, mrf).eval()
    report = explain(model, "one", [Picture("a.jpg", IMAGE)], tmp_path)
    assert stems(report) == ["compatibility", "steps-1", "contexts-1", "window-1"]


def test_a_network_alone_has_one_step(model_folder, tmp_path):
    model = read_model(model_folder)
    model.mean_field = None
    assert stems(explain(model, "alone", [Picture("a", IMAGE)], tmp_path)) == ["steps-1"]


def test_the_window_is_where_the_pixel_is_in_the_smaller_image(model_folder, tmp_path):
    """The longer side of a model without a card is at most 640 pixels."""
    model = read_model(model_folder)
    model.mean_field.label_contexts = None
    large = np.zeros((100, 1280, 3), np.uint8)
    report = explain(model, "tiny", [Picture("wide", large)], tmp_path, (801, 61))
    assert "&quot;pixel&quot;: [400, 30]" in report.page.read_text()


def test_without_a_pixel_one_that_changed_is_shown(model_folder, tmp_path):
    model = read_model(model_folder)
    model.mean_field.label_contexts = None
    torch.nn.init.zeros_(model.mean_field.triple_penalty.scale)
    report = explain(model, "tiny", [Picture("a", IMAGE)], tmp_path)
    assert "&quot;pixel&quot;: [16, 12]" in report.page.read_text()  # nothing changed: the centre
    before, after = np.zeros((9, 9), np.uint8), np.zeros((9, 9), np.uint8)
    after[0, 3], after[8, 0] = 1, 1
    assert _changed_pixel(LayerSteps([("a", before), ("b", after)], None)) == (3, 0)


@pytest.mark.parametrize("pixel", [(32, 0), (0, 24), (-1, 0)])
def test_a_pixel_outside_is_one_sentence(model_folder, tmp_path, pixel):
    with pytest.raises(ValueError, match=r"is outside a: give a column below 32 and a row below 24\.$"):
        explain(read_model(model_folder), "tiny", [Picture("a", IMAGE)], tmp_path, pixel)
    assert not list(tmp_path.iterdir())


def test_pairs_are_read():
    assert parse_pairs("car:road, sky : tree", CAMVID) == [(8, 3), (0, 5)]
    for text, message in (
        ("car", "must be two labels and a colon"),
        ("car:bus", "has no label 'bus': give two of sky"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_pairs(text, CAMVID)


def test_pictures_are_spread_over_a_data_set():
    data = synthetic((24, 32), "val", 9)
    assert [picture.name for picture in pictures_of(data)] == ["00000", "00004", "00008"]
    assert len(pictures_of(data[:2])) == 2
    assert pictures_of(data)[0].truth.shape == (24, 32)


def test_pairs_that_meet_go_before_stronger_ones(model_folder, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("deepmrf.figures.contexts.patterns", lambda gains, pairs, *rest: drawn.append((gains, pairs)))
    monkeypatch.setattr("deepmrf.evaluation.explain.Report._figure", lambda *_: "")
    monkeypatch.setattr(
        "deepmrf.evaluation.explain.layer_steps",
        lambda model, image: LayerSteps([("network", MET), ("model", MET)], np.zeros_like(MET)),
    )
    explain(read_model(model_folder), "tiny", [Picture("a", IMAGE)], tmp_path)
    explain(read_model(model_folder), "tiny", [], tmp_path)
    (gains, met), (_, strongest) = drawn
    assert {*map(frozenset, met)} == {frozenset((1, 2)), frozenset((2, 3))}
    assert strongest == strongest_pairs(gains)[:4]
