"""docs/paper.md maps the paper to files: each of them exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [line for line in (ROOT / "docs" / "paper.md").read_text().splitlines() if line.startswith("| ")]
HEADINGS = ("Looking for", "Paper", "Row")


@pytest.mark.parametrize("row", [row for row in ROWS if not row.startswith(tuple(f"| {name} |" for name in HEADINGS))])
def test_every_file_of_the_table_exists(row):
    _, code, test = re.split(r"(?<!\\) \| ", row.strip("| "))
    for cell, folders in ((code, ("src/deepmrf", ".")), (test, ("tests",))):
        for path in re.findall(r"`([\w/]+(?:\.py|/))`", cell):
            assert any((ROOT / folder / path).exists() for folder in folders), path
    for name in re.findall(r"class `(\w+)`", code):
        assert f"class {name}" in (ROOT / "src/deepmrf" / re.findall(r"`([\w/]+\.py)`", code)[0]).read_text()


def test_the_table_starts_with_what_readers_of_the_paper_look_for():
    first = "\n".join(ROWS[:11])
    for name in ("b12", "b13", "b14", "b15", "node linking", "four stages", "TA, LA, BA", "checkpoint"):
        assert name in first
