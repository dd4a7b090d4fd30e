"""The scribble experiment: strokes lie inside their regions, crops fit their labels, and a tiny run ends in a table."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("skimage")
from benchmarks import scribbles
from deepmrf.data.files import VOID
from deepmrf.data.labels import VOC


def scene(seed: int, height: int = 48, width: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """A cat beside a dog on noise, with a void border around both."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((height, width), np.uint8)
    for name, left in (("cat", 4), ("dog", 36)):
        top = int(rng.integers(4, 12))
        mask[top - 2 : top + 26, left - 2 : left + 22] = VOID
        mask[top : top + 24, left : left + 20] = VOC.names.index(name)
    image = rng.integers(0, 60, (height, width, 3)) + 10 * (mask % 16)[..., None]
    return image.astype(np.uint8), mask


@pytest.fixture
def voc(tmp_path):
    root = tmp_path / "VOC2012"
    for folder in ("JPEGImages", "SegmentationClassAug", "ImageSets/Segmentation"):
        (root / folder).mkdir(parents=True)
    for split, seeds in (("trainaug", range(4)), ("val", range(4, 6))):
        (root / "ImageSets/Segmentation" / f"{split}.txt").write_text("\n".join(f"scene{i}" for i in seeds) + "\n")
        for seed in seeds:
            image, mask = scene(seed)
            Image.fromarray(image).save(root / "JPEGImages" / f"scene{seed}.jpg")
            Image.fromarray(mask).save(root / "SegmentationClassAug" / f"scene{seed}.png")
    return root


def test_strokes_are_thin_lie_in_their_regions_and_depend_on_the_name_alone():
    _, mask = scene(0, 96, 128)
    drawn = scribbles.draw_scribbles(mask, "a")
    marked = drawn != VOID
    assert (drawn[marked] == mask[marked]).all()
    assert set(np.unique(drawn)) == set(np.unique(mask))
    assert 0.005 < marked.mean() < 0.1
    assert (scribbles.draw_scribbles(mask, "a") == drawn).all()
    assert (scribbles.draw_scribbles(mask, "b") != drawn).any()


def test_the_longest_path_follows_the_longer_branches():
    skeleton = np.zeros((9, 20), bool)
    skeleton[4, 1:19] = True
    skeleton[2:4, 10] = True
    path = scribbles.longest_path(skeleton)
    assert sorted(path[:, 1]) == list(range(1, 19))
    assert set(path[:, 0]) == {4}


def test_crops_move_images_and_labels_alike(monkeypatch):
    monkeypatch.setattr(scribbles, "SIDE", 32)
    ids = torch.randint(0, 7, (2, 4, 4)).repeat_interleave(8, 1).repeat_interleave(8, 2).to(torch.uint8)
    images = (ids * 30)[:, None].expand(-1, 3, -1, -1).contiguous()
    data = scribbles.Images(images, ids, ids, torch.tensor([[32, 32], [32, 24]]), [])
    draws = torch.rand(40, scribbles.DRAWS, generator=torch.Generator().manual_seed(0))
    _, plain, labels, inside = scribbles.crops(data, ids, draws)
    assert ((labels != VOID) == inside).all()
    expected = labels * 30 / 255
    near = (plain[:, 0] - expected).abs() < 0.02
    assert near[inside].float().mean() > 0.7  # elsewhere, two labels are mixed


def test_a_tiny_experiment_chooses_weights_resumes_and_prints_a_table(voc, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scribbles, "SIDE", 64)
    monkeypatch.setattr(scribbles, "CANDIDATES", {"partial": (0.0,), "gated": (0.01, 0.1), "dense": (1e-3,)})
    common = ["--data", str(voc), "--device", "cpu", "--quick"]
    scribbles.main([*common, "--out", str(tmp_path / "first"), "--runs", "choose*", "final gated*"])
    first = json.loads((tmp_path / "first/results.json").read_text())["runs"]
    choices = {0.01: first["choose gated 0.01"]["miou"], 0.1: first["choose gated 0.1"]["miou"]}
    assert choices[first["final gated seed 0"]["weight"]] == max(choices.values())
    assert "final partial seed 0" not in first
    capsys.readouterr()
    earlier = ["--earlier", str(tmp_path / "first/results.json")]
    scribbles.main([*common, *earlier, "--out", str(tmp_path / "second"), "--runs", "*gated*", "final [pdf]*"])
    printed = capsys.readouterr().out
    second = json.loads((tmp_path / "second/results.json").read_text())["runs"]
    assert {name: second[name] for name in first} == first
    assert {"final partial seed 0", "final dense seed 0", "final full seed 0"} <= set(second)
    assert all(0 <= row["miou"] <= 1 and row["images"] for row in second.values())
    assert "final gated seed 0:" not in printed
    assert [line.split()[0] for line in printed.splitlines()[-4:]] == ["partial", "gated", "dense", "full"]


def test_a_final_run_waits_for_all_weights_and_for_time(voc, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scribbles, "SIDE", 64)
    common = ["--data", str(voc), "--device", "cpu", "--quick", "--out", str(tmp_path)]
    scribbles.main([*common, "--runs", "final dense*"])
    assert "not all weights were tried" in capsys.readouterr().out
    scribbles.main([*common, "--runs", "final partial*", "--minutes", "0"])
    assert "no time is left" in capsys.readouterr().out
    assert not (tmp_path / "results.json").exists()
