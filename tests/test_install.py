"""docs/install.md names every extra with what doctor says it is for."""

from __future__ import annotations

import re
from pathlib import Path

from deepmrf.data.extras import EXTRAS, install_line

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "install.md").read_text()


def test_the_table_of_extras():
    rows = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    assert rows == [*EXTRAS, "dev"]


def test_the_install_line_is_the_one_of_the_errors():
    assert install_line("train,video") in TEXT


def test_no_address_of_a_wheel_index_is_named():
    assert "http" not in TEXT
