"""Checkpoints: readable by others, named where they are damaged."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

from deepmrf.training.checkpoint import read_checkpoint, write_checkpoint


@pytest.mark.skipif(os.name != "posix", reason="needs file modes")
def test_others_may_read_a_checkpoint(tmp_path):
    before = os.umask(0o022)
    try:
        write_checkpoint(tmp_path / "state.safetensors", {"a": torch.ones(3)}, {"step": 1})
    finally:
        os.umask(before)
    assert (tmp_path / "state.safetensors").stat().st_mode & 0o777 == 0o644
    tensors, facts = read_checkpoint(tmp_path / "state.safetensors")
    assert torch.equal(tensors["a"], torch.ones(3))
    assert facts == {"step": 1}


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "no facts", "bad facts"])
def test_a_damaged_checkpoint_is_named(tmp_path, damage):
    path = tmp_path / "state.safetensors"
    write_checkpoint(path, {"a": torch.ones(300)}, {"step": 1})
    intact = path.read_bytes()
    if damage in ("no facts", "bad facts"):
        save_file({"a": torch.ones(3)}, path, None if damage == "no facts" else {"facts": "{"})
    else:
        path.write_bytes({"truncated": intact[:-100], "empty": b"", "text": b"no checkpoint at all"}[damage])
    with pytest.raises(ValueError, match=r"state\.safetensors is no whole checkpoint \(.+\): start again"):
        read_checkpoint(path)
