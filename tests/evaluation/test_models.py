"""Models by the names that a user gives them."""

from __future__ import annotations

import pytest

from deepmrf.data import synthetic
from deepmrf.evaluation.models import NETWORK, open_models, score_videos
from deepmrf.models.parsing_network import DeepParsingNetwork, write_model


@pytest.mark.parametrize(
    ("here", "name", "row"),
    [
        ("run", "model", "run"),
        ("run/model", ".", "run"),
        (".", "run/model", "run"),
        (".", "run", "run"),
        ("run", "../run/", "run"),
    ],
)
def test_rows_are_called_after_the_run(tmp_path, monkeypatch, here, name, row):
    data = synthetic((16, 24), "val", count=1, frames=2)
    settings = {"window": 3, "contexts": 2, "context_size": 3}
    model = DeepParsingNetwork.build("fast", data.labels, {"width": 8}, settings)
    write_model(model.eval(), tmp_path / "run" / "model")
    monkeypatch.chdir(tmp_path / here)
    models, _ = open_models([name], "synthetic:16x24", "val")
    assert {score.split(",")[0] for score in score_videos([name], models, data)} == {row, NETWORK}
