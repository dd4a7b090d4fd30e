"""What a model folder says of its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepmrf.data.labels import ANIMALS
from deepmrf.models.folder import CONFIG, WEIGHTS
from deepmrf.models.names import PRETRAINED, bundled, find_folder, summarise
from deepmrf.models.parsing_network import DeepParsingNetwork, write_model
from deepmrf.unary import build


@pytest.mark.parametrize("name", bundled())
def test_bundled_models_tell_their_scores(name):
    summary = summarise(name)
    stages = json.loads((PRETRAINED / name / CONFIG).read_text())["metrics"]["val"]
    assert summary.miou == list(stages.values())[-2]["miou"]  # the last one is that of the network alone
    assert summary.miou_network_alone == list(stages.values())[-1]["miou"]
    assert summary.iou.keys() == set(summary.labels.names)
    assert summary.bytes == sum((PRETRAINED / name / file).stat().st_size for file in (CONFIG, WEIGHTS))
    assert summary.network == "fast"
    mean_fields = {
        "animals": "global kernel, all pairs of pixels, 1 context of 1",
        "camvid": "gaussian kernel, window 21, 5 contexts of 9",
        "street": "distance kernel, window 51, 3 contexts of 9",
    }
    assert summary.mean_field == mean_fields[name]


def test_paths_of_data_are_not_told():
    assert summarise("animals").data == "animals val"
    assert summarise("animals").images == 180


@pytest.mark.parametrize(
    "metrics, recipe", [({}, {}), ({"val": {}}, {"data": {}}), ({"val": {"joint": 3}}, {"data": 1})]
)
def test_a_model_that_tells_nothing(tmp_path, metrics, recipe):
    config = json.loads((PRETRAINED / "animals" / CONFIG).read_text()) | {"metrics": metrics, "recipe": recipe}
    config |= {"mean_field": None, "unary": {"network": None, "options": {}}}
    folder = tmp_path / "run" / "model"
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / WEIGHTS).write_bytes(b"")
    summary = summarise(tmp_path / "run")  # the folder of a run holds that of its model
    assert summary.folder == folder
    assert summary.labels == ANIMALS
    assert (summary.miou, summary.images, summary.data, summary.iou) == (None, None, None, {})
    assert summary.mean_field is summary.network is None


def test_a_folder_without_labels_is_damaged(tmp_path):
    config = json.loads((PRETRAINED / "animals" / CONFIG).read_text()) | {"labels": {"names": []}}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    (tmp_path / WEIGHTS).write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be used"):
        summarise(tmp_path)


def test_the_folder_of_a_model_goes_before_a_bundled_one_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "street").mkdir()  # of data
    assert find_folder("street") == PRETRAINED / "street"
    write_model(DeepParsingNetwork(build("fast", 2), None, ["a", "b"]), tmp_path / "street" / "model")
    assert find_folder("street") == Path("street/model")
