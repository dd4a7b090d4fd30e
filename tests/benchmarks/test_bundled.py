"""What made the bundled models: the MRF from images held out, the mean of weights, the MRF's worth by stride."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import average
import coarser
import gpu_beside
import held_out
import mix_streets
import relabel
import sharpen_masks
import strides

from deepmrf.data import LabelSet, synthetic
from deepmrf.data.cityscapes import cityscapes
from deepmrf.data.dataset import Dataset, Item
from deepmrf.data.synthetic import LABELS
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.refine.settings import FitSettings


def network(seed: int) -> DeepParsingNetwork:
    """An untrained one for the labels of made-up scenes."""
    torch.manual_seed(seed)
    return DeepParsingNetwork.build("fast", LABELS, {"width": 8}, None).eval()


def test_an_mrf_learns_from_images_held_out():
    data, model = synthetic((48, 64), count=3), network(0)
    outputs = held_out.Outputs(model, data)
    assert len(outputs) == len(data)
    expected = model.log_unary(outputs[1].image[None])[0].half()
    torch.testing.assert_close(outputs[1].log_p, expected)
    settings = FitSettings(kernel="distance", window=9, gate=False, contexts=2, context_size=3, crop=32,
                           penalty_steps=2, contexts_steps=10)  # fmt: skip
    mrfs = held_out.learn(outputs, settings, 1.5)
    assert list(mrfs) == ["triple penalty", "label contexts"]
    assert {mrf.temperature for mrf in mrfs.values()} == {1.5}


def test_the_mean_of_weights_has_the_shares_and_keeps_what_does_not_fit():
    first, second = network(0), network(1)
    second.unary.classify[1] = torch.nn.Conv2d(first.unary.classify[1].in_channels, 2, 1)
    name = "encoder.stem.convolution.weight"
    a, b = first.unary.state_dict()[name].clone(), second.unary.state_dict()[name]
    kept = first.unary.classify[1].weight.clone()
    average.average([first, second], [0.75, 0.25])
    torch.testing.assert_close(first.unary.state_dict()[name], (0.75 * a + 0.25 * b).half().float())
    assert torch.equal(first.unary.classify[1].weight, kept)


def test_a_network_for_other_labels_starts_with_the_rows_of_those_most_like_them():
    colours = tuple((n, n, n) for n in range(20))
    ours, theirs = tuple(relabel.CITYSCAPES_OF_CAMVID), tuple(sorted(set(relabel.CITYSCAPES_OF_CAMVID.values())))
    image = torch.rand(1, 3, 32, 48)
    rows = [theirs.index(name) for name in relabel.CITYSCAPES_OF_CAMVID.values()]
    for network in ("fast", "strong"):
        street = DeepParsingNetwork.build(network, LabelSet(theirs, colours[: len(theirs)]), {"width": 8}, None).eval()
        camvid = relabel.relabelled(street, LabelSet(ours, colours[: len(ours)])).eval()
        torch.testing.assert_close(camvid.unary(image), street.unary(image)[:, rows])


def test_sharpened_masks_change_lines_of_wrong_labels_in_the_split_train_alone(tmp_path):
    picture = np.zeros((4, 7, 3), np.uint8)
    # Road (7), vegetation (21), and between them a line of wall (12), which only averaging can have left there.
    mask = np.array([[7, 7, 7, 12, 21, 21, 21]] * 4, np.uint8)
    for split in ("train", "val"):
        for folder, name, values in (("leftImg8bit", "leftImg8bit", picture), ("gtFine", "gtFine_labelIds", mask)):
            path = tmp_path / "data" / folder / split / "ulm" / f"ulm_000000_000001_{name}.png"
            path.parent.mkdir(parents=True)
            Image.fromarray(values).save(path)
    out = tmp_path / "sharp"
    for split, changed, expected in (("train", 4, [7, 7, 7, 7, 21, 21, 21]), ("val", 0, mask[0].tolist())):
        data = cityscapes(tmp_path / "data", split)
        assert sharpen_masks.write(data, data[0], out, split) == changed
        written = out / f"gtFine/{split}/ulm/ulm_000000_000001_gtFine_labelIds.png"
        assert np.asarray(Image.open(written))[0].tolist() == expected
        assert len(cityscapes(out, split)) == 1


def test_images_of_two_sets_get_the_labels_of_the_first(tmp_path):
    for kind in ("images", "masks"):
        (tmp_path / kind / "train").mkdir(parents=True)
    picture = np.zeros((4, 7), np.uint8)
    Image.fromarray(picture).save(tmp_path / "picture.png")
    # Road, and a line of its mean with vegetation (8 in the mask) between both: the nearer of the two is taken.
    mask = np.array([[0, 0, 0, 3, 8, 8, 255]] * 4, np.uint8)
    Image.fromarray(mask).save(tmp_path / "mask.png")
    names = ("road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation")
    theirs = LabelSet(names, tuple((n, 0, 0) for n in range(9)), 255)
    item = Item("a", tmp_path / "picture.png", tmp_path / "mask.png")
    ours = LabelSet(tuple(relabel.CITYSCAPES_OF_CAMVID), tuple((n, 0, 0) for n in range(11)), 255)
    mix_streets.write(Dataset([item], theirs), item, ["a_0", "a_1"], ours, tmp_path, "train")
    written = [np.asarray(Image.open(tmp_path / f"masks/train/a_{number}.png")) for number in (0, 1)]
    road, tree = ours.names.index("road"), ours.names.index("tree")
    assert written[0][0].tolist() == [road, road, road, road, tree, tree, 255]
    assert np.array_equal(*written)
    assert (tmp_path / "images/train/a_1.png").resolve() == (tmp_path / "picture.png").resolve()


def test_network_and_mrf_learn_together_as_long_as_the_network_alone():
    given = argparse.Namespace(
        data="cityscapes:PATH", start="street", steps=7, batch=2, rate=1e-3, mrf_rate=1e-2, lovasz=0.5, crop=[32, 64],
        iterations=1, window=25,
    )  # fmt: skip
    alone, joint = (coarser.recipe_for(given, 8, 3, with_mrf) for with_mrf in (False, True))
    assert alone.stage[0].learn == ("unary",)
    assert joint.stage[0].learn == ("unary", "triple_penalty", "label_contexts")
    assert alone == replace(joint, mean_field={}, stage=(replace(joint.stage[0], learn=("unary",)),))
    assert (alone.seed, alone.stage[0].steps, alone.unary.options["stride"]) == (3, 7, 8)


def test_the_report_by_stride_has_gains_with_intervals_and_their_mean(tmp_path):
    for seed, gain in ((0, 0.01), (1, 0.02)):
        rows = {
            strides.NETWORK: {"miou": 0.5},
            "an MRF": {"miou": 0.5 + gain, "gain": {"miou": gain, "low": gain - 0.005, "high": gain + 0.005}},
        }
        folder = tmp_path / f"stride-8-seed-{seed}"
        folder.mkdir()
        (folder / "rows.json").write_text(json.dumps({"rows": rows}))
    report = strides.report(tmp_path)
    assert "| stride 8 | seed 0 | seed 1 | mean |" in report
    assert "| network alone | 50.00 | 50.00 | 50.00 |" in report
    assert "| an MRF | 51.00  +1.00 (0.50 to 1.50) | 52.00  +2.00 (1.50 to 2.50) | 51.50  +1.50 |" in report


def test_a_gain_without_an_interval_is_shown_alone():
    row = strides.row("an MRF", {"miou": 0.5, "gain": {"miou": -0.01, "low": None, "high": None}})
    assert row.split() == ["an", "MRF", "50.00", "-1.00"]


def test_a_step_beside_other_programs_differs_by_nan_and_by_any_number():
    wanted = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
    assert not gpu_beside.differs([part.clone() for part in wanted], wanted)
    for wrong in (torch.nan, 2.0000002):
        assert gpu_beside.differs([torch.tensor([1.0, wrong]), wanted[1]], wanted)
