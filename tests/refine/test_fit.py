"""An MRF learned from saved predictions helps images it never saw, and says so when it does not."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from deepmrf.data import DataError, synthetic
from deepmrf.models.folder import read_mrf
from deepmrf.refine import learn as learning
from deepmrf.refine.examples import open_examples
from deepmrf.refine.fit import best_stage, fit
from deepmrf.refine.learn import Learner
from deepmrf.refine.matching import match_files
from deepmrf.refine.settings import FitSettings

QUICK = FitSettings(
    window=7, contexts=2, context_size=3, folds=2, crop=48, batch=2, penalty_steps=20, contexts_steps=20
)


def _write(root, stem, image, mask, log_p):
    for name in ("images", "masks", "predictions"):
        (root / name).mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(root / "images" / f"{stem}.png")
    Image.fromarray(mask).save(root / "masks" / f"{stem}.png")
    np.save(root / "predictions" / f"{stem}.npy", log_p.numpy())


def scenes(root, count=8, noise=1.5, sharpness=1.0):
    """Scenes whose predictions are the truth, blurred and noisy."""
    data = synthetic((48, 64), count=count, noise=10.0)
    random = torch.Generator().manual_seed(0)
    for item in data:
        image, mask = data.read(item)
        truth = functional.one_hot(torch.from_numpy(mask).long(), 6).permute(2, 0, 1)[None].float()
        logits = 4 * functional.avg_pool2d(truth, 5, 1, 2) + noise * torch.randn(truth.shape, generator=random)
        _write(root, item.name, image, mask, (sharpness * logits[0]).log_softmax(0))
    return root / "predictions", root / "images", root / "masks"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def report(folders):
    torch.manual_seed(0)
    calls = []
    report = fit(*folders, QUICK, lambda name: lambda done, total: calls.append((name, done, total)))
    assert calls[0] == ("reading", 1, 8)
    assert any("fold 2, label contexts, step 20" in name and (done, total) == (20, 20) for name, done, total in calls)
    return report


def test_held_out_images_gain(report):
    assert report.stage != "nothing"
    assert report.after.miou > report.before.miou + 0.05
    assert report.after.pixel_accuracy > report.before.pixel_accuracy
    assert all(fold.scores[report.stage].miou > fold.scores["nothing"].miou for fold in report.folds)
    assert report.before.images == report.after.images == 8
    assert report.kind == "log-probabilities"
    assert "to" in report.verdict


def test_every_image_is_held_out_once(report, folders):
    held_out = [stem for fold in report.folds for stem in fold.held_out]
    assert sorted(held_out) == sorted(path.stem for path in folders[1].iterdir())


def test_saved_and_loaded(report, tmp_path):
    loaded, _ = read_mrf(report.save(tmp_path / "mrf"))
    log_p, image = torch.randn(1, 6, 20, 20), torch.rand(1, 3, 20, 20)
    assert torch.equal(loaded(log_p, image), report.mean_field(log_p, image))
    config = json.loads((tmp_path / "mrf" / "config.json").read_text())
    assert config["labels"]["names"][0] == "label 0"
    assert config["metrics"]["kept"] == report.stage
    assert config["settings"]["window"] == 7
    with pytest.raises(FileNotFoundError, match="deepmrf fit"):
        read_mrf(tmp_path)
    (tmp_path / "mrf" / "config.json").write_text(json.dumps(config | {"unary": {}}))
    with pytest.raises(ValueError, match="MRF alone"):
        read_mrf(tmp_path / "mrf")
    (tmp_path / "mrf" / "config.json").write_text(json.dumps(config | {"format": 9}))
    with pytest.raises(ValueError, match="newer"):
        read_mrf(tmp_path / "mrf")


def test_overconfident_predictions_are_corrected_and_not_just_doubted(tmp_path):
    folders = scenes(tmp_path, count=4, sharpness=4.0)
    report = fit(*folders, replace(QUICK, contexts=0))
    assert report.stage == "triple penalty"
    assert report.after.miou > report.before.miou + 0.05
    assert report.mean_field.triple_penalty.scale < 0  # pixels that agree cost less


def test_perfect_predictions_are_left_alone(tmp_path):
    data = synthetic((32, 48), count=4, noise=40.0)
    for item in data:
        image, mask = data.read(item)
        truth = functional.one_hot(torch.from_numpy(mask).long(), 6).permute(2, 0, 1).float()
        _write(tmp_path, item.name, image, mask, (0.94 * truth + 0.01).log())
    settings = FitSettings(window=5, contexts=1, context_size=3, folds=2, crop=32, penalty_steps=4, contexts_steps=4)
    report = fit(tmp_path / "predictions", tmp_path / "images", tmp_path / "masks", settings)
    assert report.stage == "nothing"
    assert report.verdict.startswith("No gain")
    log_p = torch.randn(1, 6, 9, 9).log_softmax(1)
    torch.testing.assert_close(report.mean_field(log_p, torch.rand(1, 3, 9, 9)), log_p)


def test_the_simplest_of_equals_is_kept():
    def of(*values):
        return dict(zip(("nothing", "triple penalty", "label contexts"), values, strict=False))

    assert best_stage({"nothing": 0.5, "label scaling": 0.6, "triple penalty": 0.6001}) == "label scaling"

    assert best_stage(of(0.5, 0.5001, 0.5002)) == "nothing"
    assert best_stage(of(0.5, 0.6, 0.6001)) == "triple penalty"
    assert best_stage(of(0.5, 0.4, 0.7)) == "label contexts"
    assert best_stage(of(0.5, 0.6)) == "triple penalty"
    one_fold_alone = [of(0.5, 0.9), of(0.5, 0.4), of(0.5, 0.49)]
    assert best_stage(of(0.5, 0.6), one_fold_alone) == "nothing"
    assert best_stage(of(0.5, 0.6), [*one_fold_alone, of(0.5, 0.6), of(0.5, 0.6)]) == "triple penalty"


@pytest.fixture
def marked(tmp_path):
    """Six images of one grey each, the marker; the network takes label 1 for label 2 in the last, and only there."""
    for number in range(6):
        mask = np.zeros((24, 24), np.uint8)
        mask[:, 12:] = 1 if number == 5 else 1 + number % 2
        seen = np.where(mask == 1, 2, mask) if number == 5 else mask
        truth = functional.one_hot(torch.from_numpy(seen).long(), 3).permute(2, 0, 1).float()
        _write(tmp_path, f"{number}", np.full((24, 24, 3), 40 * number, np.uint8), mask, (0.7 * truth + 0.1).log())
    return tmp_path / "predictions", tmp_path / "images", tmp_path / "masks"


MARKED = FitSettings(
    window=3,
    contexts=1,
    context_size=1,
    folds=6,
    crop=24,
    batch=8,
    penalty_steps=10,
    penalty_rate=0.3,
    contexts_steps=20,
    contexts_rate=0.3,
)


def test_training_never_sees_the_fold_it_is_scored_on(marked, monkeypatch):
    crop, score = learning.crop, Learner.labels
    seen, rounds = {}, []

    def number(example):
        return int(example.image[0, 0, 0]) // 40

    def spy_crop(example, *rest):
        seen.setdefault(frozenset(current[0].indices.tolist()), set()).add(number(example))
        return crop(example, *rest)

    def spy_draw(self, *rest):
        current[:] = [self]
        return draw(self, *rest)

    def spy_labels(self, index):
        rounds.append((frozenset(self.indices.tolist()), number(self.examples[index])))
        return score(self, index)

    current, draw = [], Learner._draw
    monkeypatch.setattr(learning, "crop", spy_crop)
    monkeypatch.setattr(Learner, "_draw", spy_draw)
    monkeypatch.setattr(Learner, "labels", spy_labels)
    fit(*marked, replace(MARKED, folds=3, batch=4, penalty_steps=2, contexts_steps=2, groups=".+"))
    assert {held_out for _, held_out in rounds} == set(range(6))
    for indices, held_out in rounds:
        assert seen[indices] <= indices
        assert held_out not in seen[indices]


def test_what_only_a_held_out_image_teaches_is_not_known(marked):
    settings = replace(MARKED, kernel="distance", gate=True, temperature=1.0, groups=".+")
    report = fit(*marked, settings)
    with_marker = next(fold for fold in report.folds if "5" in fold.held_out)
    assert with_marker.scores["label contexts"].pixel_accuracy == pytest.approx(0.5, abs=0.01)
    examples = open_examples(match_files(*marked)[0], marked[2])
    learner = Learner(examples, [5], settings, report.search.choice)
    learner.learn_contexts(20)
    mrf, example = learner.models()["label contexts"], examples[5]
    labels = mrf(example.log_p[None].float(), example.image[None]).argmax(1)[0]
    assert (labels == example.mask).float().mean() > 0.9  # from the image itself it is learned at once


def test_labels_json_names_the_labels(folders, tmp_path):
    predictions, images, masks = folders
    text = json.dumps({"names": ["ground", "head", "hat", "body", "ball", "shadow"]})
    path = masks.parent / "labels.json"
    path.write_text(text)
    try:
        examples = open_examples(match_files(predictions, images, masks)[0], masks)
    finally:
        path.unlink()
    assert examples.labels.names[2] == "hat"
    assert examples[0].log_p.shape[0] == 6


def test_bad_inputs_are_named(tmp_path):
    folders = scenes(tmp_path, count=3)
    np.save(folders[0] / "00001.npy", np.zeros((6, 10, 10), np.float32))
    with pytest.raises(DataError, match=r"10 x 10 pixels but its image .* is 64 x 48"):
        fit(*folders, QUICK)
    np.save(folders[0] / "00001.npy", np.zeros((6, 48, 64), np.float32))
    Image.fromarray(np.full((48, 64), 9, np.uint8)).save(folders[2] / "00001.png")
    with pytest.raises(DataError, match="the id 9"):
        fit(*folders, QUICK)
    for stem in ("00000", "00001"):
        Image.fromarray(np.full((48, 64), 255, np.uint8)).save(folders[2] / f"{stem}.png")
    with pytest.raises(ValueError, match="1 images"):
        fit(*folders, QUICK)


@pytest.mark.parametrize(
    "wrong", [{"window": 1}, {"folds": 1}, {"crop": 0}, {"penalty_rate": 0.0}, {"kernel": "learned"}, {"batch": True}]
)
def test_bad_settings_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FitSettings(**wrong)
