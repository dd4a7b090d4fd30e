"""Two trainings in one folder: the second is refused while the first runs, whatever became of earlier ones."""

from __future__ import annotations

import os
import signal
import time

import pytest

from deepmrf.training.lock import folder_lock
from deepmrf.training.recipe import RecipeError


def hold(folder, writing):
    """Hold the lock until this process is killed, with a child of its own, as those that read images are."""
    with folder_lock(folder):
        child = os.fork()
        if child:
            os.write(writing, str(child).encode())
        time.sleep(60)
    os._exit(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_folder_has_one_training_at_a_time(tmp_path):
    folder = tmp_path / "run"
    reading, writing = os.pipe()
    owner = os.fork()
    if not owner:
        hold(folder, writing)
    grandchild = int(os.read(reading, 20))
    try:
        with pytest.raises(RecipeError) as caught, folder_lock(folder):
            raise AssertionError
        assert str(caught.value) == (
            f"{folder} is used by another training (process {owner}): wait for its end, or choose another folder."
        )
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        for _ in range(2):
            with folder_lock(folder):  # a killed process holds nothing, although its child lives on
                pass
    finally:
        os.kill(grandchild, signal.SIGKILL)
