"""The Python blocks of docs/densecrf.md run as printed, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

from deepmrf.layers.crf import PRESETS
from deepmrf.refine.opening import PARAMETERS, preset_values

TEXT = (Path(__file__).parents[2] / "docs" / "densecrf.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def test_the_blocks_run_and_agree():
    assert len(BLOCKS) > 5
    names: dict[str, object] = {}
    for number, block in enumerate(BLOCKS, start=1):
        exec(compile(block, f"block {number} of docs/densecrf.md", "exec"), names)
    assert (names["label_map"] == names["truth"]).mean() > 0.95


def test_presets_of_the_text_exist():
    for name in re.findall(r"--preset (\w+)", TEXT):
        assert name in [*PRESETS, "list"]


def test_the_table_of_presets():
    rows = {
        cells[1].strip("` "): cells[2:-2]
        for cells in (line.split("|") for line in TEXT.splitlines())
        if len(cells) == 10
    }
    assert [name.strip() for name in rows[""]] == list(PRESETS)
    for key, meaning in PARAMETERS.items():
        assert [float(number) for number in rows[key]] == [preset_values(name)[key] for name in PRESETS]
        assert f"| {meaning} |" in TEXT
