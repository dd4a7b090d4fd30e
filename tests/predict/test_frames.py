"""Sliding windows over frames."""

from __future__ import annotations

import pytest
import torch

from deepmrf import MeanField
from deepmrf.predict.frames import frame_reach, windows


@pytest.mark.parametrize("count", [0, 1, 2, 5, 6, 7, 8, 23])
@pytest.mark.parametrize("step", [1, 3, 4])
@pytest.mark.parametrize("reach", [0, 1, 2, 6])
def test_every_frame_is_wanted_once_with_its_surroundings(count, step, reach):
    wanted = []
    for window in windows(iter(range(count)), reach, step):
        frames = window.frames
        assert frames == list(range(frames[0], frames[-1] + 1))
        assert len(frames) <= 2 * reach + step
        assert frames[0] <= max(0, window.wanted[0] - reach)
        assert frames[-1] >= min(count - 1, window.wanted[-1] + reach)
        wanted += window.wanted
    assert wanted == list(range(count))


def test_frames_come_as_they_are_needed_and_are_forgotten():
    taken = []

    def frames():
        for number in range(100):
            taken.append(number)
            yield number

    stream = windows(frames(), reach=2, step=4)
    assert next(stream).wanted == [0, 1, 2, 3]
    assert taken == list(range(6))
    assert next(stream).frames == [2, 3, 4, 5, 6, 7, 8, 9]
    assert taken == list(range(10))


def test_a_window_stays_as_it_was():
    first, second, *_ = windows(range(9), reach=1, step=2)
    assert (first.frames, second.frames) == ([0, 1, 2], [1, 2, 3, 4])


@pytest.mark.parametrize("options", [{}, {"iterations": 2}, {"window": (2, 3, 3), "context_size": (4, 3, 3)}], ids=str)
@torch.no_grad()
def test_windows_give_what_the_whole_clip_gives(options, agree):
    settings = {"window": 3, "contexts": 2, "context_size": 3, "kernel": "gaussian", "gate": False, **options}
    mrf = MeanField(3, dims=3, temporal=True, **settings)
    torch.nn.init.normal_(mrf.label_contexts.weight)
    torch.nn.init.ones_(mrf.triple_penalty.frame_weights)
    log_p, clip = torch.randn(3, 14, 6, 7).log_softmax(0), torch.rand(3, 14, 6, 7)
    parts = []
    for window in windows(range(14), frame_reach(mrf), 3):
        log_q = mrf(log_p[None, :, window.frames], clip[None, :, window.frames])[0]
        parts.append(log_q[:, window.inner])
    agree(torch.cat(parts, 1), mrf(log_p[None], clip[None])[0])


def test_the_reach_by_hand():
    assert frame_reach(None) == frame_reach(MeanField(3, window=5)) == 0
    assert frame_reach(MeanField(3, dims=3, window=(3, 9, 9), context_size=(5, 9, 9), temporal=True)) == 1 + 2
    assert frame_reach(MeanField(3, dims=3, window=(3, 9, 9), contexts=0, iterations=2, temporal=True)) == 2
