"""Files of a run: readable by others, named where they are damaged, and never written over a file of another kind."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

from deepmrf.data import writing as checkpoint


@pytest.mark.skipif(os.name != "posix", reason="needs file modes")
def test_others_may_read_a_checkpoint(tmp_path):
    before = os.umask(0o022)
    try:
        checkpoint.write(tmp_path / "state.safetensors", {"a": torch.ones(3)}, {"step": 1})
    finally:
        os.umask(before)
    assert (tmp_path / "state.safetensors").stat().st_mode & 0o777 == 0o644
    tensors, facts = checkpoint.read(tmp_path / "state.safetensors")
    assert torch.equal(tensors["a"], torch.ones(3))
    assert facts == {"step": 1}


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "no facts", "bad facts"])
def test_a_damaged_checkpoint_is_named(tmp_path, damage):
    path = tmp_path / "state.safetensors"
    checkpoint.write(path, {"a": torch.ones(300)}, {"step": 1})
    whole = path.read_bytes()
    if damage in ("no facts", "bad facts"):
        save_file({"a": torch.ones(3)}, path, None if damage == "no facts" else {"facts": "{"})
    else:
        path.write_bytes({"truncated": whole[:-100], "empty": b"", "text": b"no checkpoint at all"}[damage])
    with pytest.raises(ValueError, match=r"state\.safetensors is no whole checkpoint \(.+\): start again"):
        checkpoint.read(path)


def test_a_file_is_no_place_for_a_folder(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for place in (file, file / "new", file / "new" / "newer"):
        with pytest.raises(ValueError, match=r"file is a file: give a folder for the run\."):
            checkpoint.check_place(place, "the run")
    checkpoint.check_place(tmp_path, "the run")
    checkpoint.check_place(tmp_path / "new" / "newer", "the run")
