"""Training samples: which images are held out."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from deepmrf.data.dataset import Dataset, Item
from deepmrf.data.labels import LabelSet
from deepmrf.training.samples import hold_out


@pytest.mark.parametrize(("count", "share", "held"), [(100, 0.1, 10), (2975, 0.12, 357), (11, 0.5, 5), (7, 0.3, 2)])
def test_held_out_images_lie_in_five_stretches(count, share, held):
    items = [Item(f"{index:04}", Path("x.png"), Path("x.png")) for index in range(count)]
    rest, out = hold_out(Dataset(items, LabelSet(["a", "b"])), share)
    assert abs(len(out) - held) <= 3
    assert {*rest, *out} == {*items}
    assert not {*rest} & {*out}
    numbers = [int(item.name) for item in out]
    assert sum(b - a > 1 for a, b in itertools.pairwise(numbers)) <= 4
    assert list(rest) == [item for item in items if item not in {*out}]


def test_too_few_images_to_hold_out():
    items = [Item("a", Path("x.png"), Path("x.png"))]
    with pytest.raises(ValueError, match="cannot be held out"):
        hold_out(Dataset(items, LabelSet(["a", "b"])), 0.1)


def test_reading_processes_start_after_opencv_took_threads():
    """Forked processes lack the threads of OpenCV, and would wait for them for ever: so OpenCV gives them up before."""
    program = """
import cv2, numpy as np, torch
from torch.utils.data import DataLoader
from deepmrf.training.samples import opencv_on_one_thread

image = np.zeros((512, 512, 3), np.uint8)
cv2.setNumThreads(4)
cv2.GaussianBlur(cv2.resize(image, (1024, 1024)), (9, 9), 2)  # starts the threads

class Threads(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        cv2.GaussianBlur(image, (9, 9), 2)
        return cv2.getNumThreads()

with opencv_on_one_thread():
    batches = iter(DataLoader(Threads(), num_workers=1, batch_size=2, multiprocessing_context="fork"))
print(next(batches).tolist(), cv2.getNumThreads())
"""
    pytest.importorskip("cv2")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[0] == "[1, 1] 4", done.stderr
