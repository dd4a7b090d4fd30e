"""Estimated flow on known motion and on Middlebury's RubberWhale, the cache, and .flo files good and bad."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from deepmrf.flow import Flow, between, cached, estimate, read_flo, warp
from deepmrf.flow.estimation import UNKNOWN_FLOW

ROOT = Path(os.environ.get("DEEPMRF_DATA") or Path(__file__).parents[2].parent / "shared" / "data") / "flow"
need_whale = pytest.mark.skipif(not (ROOT / "RubberWhale.flo").is_file(), reason="RubberWhale is not here")


def moving(frames=3, size=(60, 80), velocity=(3, -2), seed=0):
    """A smooth random picture that moves (x, y) pixels a frame, cut out of a larger one."""
    torch.manual_seed(seed)
    picture = torch.nn.functional.interpolate(torch.rand(1, 3, 30, 30), (160, 160), mode="bicubic")[0]
    picture = (255 * picture.clamp(0, 1)).byte().permute(1, 2, 0).numpy()
    return np.stack(
        [
            picture[40 - t * velocity[1] :, 40 - t * velocity[0] :][: size[0], : size[1]]
            for t in range(frames)
        ]
    )  # fmt: skip


def test_dis_finds_a_known_motion():
    pytest.importorskip("cv2")
    flow = estimate(moving())
    assert flow.shape == (1, 3, 60, 80)
    inner = (..., slice(8, -8), slice(8, -8))
    expected = torch.tensor([3.0, -2.0]).view(2, 1, 1, 1)
    assert (flow.forward[0][inner] - expected).abs().mean() < 0.1
    assert (flow.backward[0][inner] + expected).abs().mean() < 0.1
    assert flow.forward_reliable[inner].float().mean() > 0.95
    assert not flow.forward_reliable[..., -2:].any()  # leaves to the right


@pytest.mark.parametrize("size", [(1, 1), (5, 7), (31, 33), (3, 120)])
def test_dis_takes_any_size(size):
    pytest.importorskip("cv2")
    flow = estimate(np.random.default_rng(0).integers(0, 256, (2, *size, 3), dtype=np.uint8))
    assert flow.forward.shape == (1, 2, 1, *size)
    assert flow.forward.isfinite().all()


def test_dis_takes_a_flipped_view():
    pytest.importorskip("cv2")
    frames = moving(2)[:, :, ::-1]
    np.testing.assert_allclose(between(*frames), between(*frames.copy()), atol=1e-6)


def test_frames_of_two_sizes():
    with pytest.raises(ValueError, match=r"pass two uint8 RGB frames \(H, W, 3\) of one size\.$"):
        between(np.zeros((4, 5, 3), np.uint8), np.zeros((5, 4, 3), np.uint8))


def ramp(first, second):
    """A flow that tells which frames it was called with."""
    flow = np.zeros((*first.shape[:2], 2))
    flow[..., 0] = first[0, 0, 0]
    flow[..., 1] = second[0, 0, 0]
    return flow


def test_any_function_may_replace_dis():
    frames = np.zeros((3, 4, 5, 3), np.uint8)
    frames[:, 0, 0, 0] = 1, 2, 3
    for given in (frames, torch.from_numpy(frames)):
        flow = estimate(given, ramp)
        assert flow.forward[0, :, :, 0, 0].T.tolist() == [[1, 2], [2, 3]]
        assert flow.backward[0, :, :, 0, 0].T.tolist() == [[2, 1], [3, 2]]


@pytest.mark.parametrize(
    ("frames", "method", "message"),
    [
        (np.zeros((2, 4, 5, 3), np.float32), ramp, r"pass uint8 RGB frames \(T, H, W, 3\)\.$"),
        (np.zeros((4, 5, 3), np.uint8), ramp, r"pass uint8 RGB frames \(T, H, W, 3\)\.$"),
        (np.zeros((0, 4, 5, 3), np.uint8), ramp, r"pass uint8 RGB frames \(T, H, W, 3\)\.$"),
        (np.zeros((2, 4, 5, 3), np.uint8), "raft", r"method='raft' is unknown: pass 'dis', 'dis-fast' or a function"),
        (np.zeros((2, 4, 5, 3), np.uint8), lambda a, b: a, r"method must return \(H, W, 2\)\.$"),
    ],
)
def test_estimate_says_what_it_wants(frames, method, message):
    with pytest.raises(ValueError, match=message):
        estimate(frames, method)


def test_importing_flow_brings_no_opencv_and_without_it_estimating_says_what_to_install(tmp_path):
    code = "import sys, numpy, deepmrf.flow, deepmrf.evaluation.metrics; print('cv2' in sys.modules)\n"
    code += "sys.modules['cv2'] = None; deepmrf.flow.estimate(numpy.zeros((2, 9, 9, 3), 'uint8'))"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "False"
    assert "ImportError: Optical flow by 'dis' needs opencv-python-headless: pip install 'deepmrf[video]'" in run.stderr


# The cache

CALLS = []


def counted(first, second):
    CALLS.append(1)
    return np.full((*first.shape[:2], 2), 0.1 * first[0, 0, 0])


@pytest.fixture
def calls():
    CALLS.clear()
    return CALLS


def test_the_second_time_is_free_and_the_same(tmp_path, calls):
    frames, names = moving(size=(9, 7)), ["seq/a 0001.png", "seq/a 0002.png", "seq/a 0003.png"]
    first = cached(tmp_path / "new", names, frames, counted)
    assert len(calls) == 4
    again = cached(tmp_path / "new", names, frames, counted)
    assert len(calls) == 4
    for name in ("forward", "backward", "forward_reliable", "backward_reliable"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    expected = estimate(frames, counted)
    torch.testing.assert_close(first.forward, expected.forward, rtol=1e-3, atol=1e-3)  # float16
    assert len(list((tmp_path / "new").iterdir())) == 2
    cached(tmp_path / "new", names[1:], frames[1:], counted)
    assert len(calls) == 4 + 4  # estimate's, and none more: the pair is known


def test_other_frames_sizes_methods_and_names_are_estimated(tmp_path, calls):
    frames = moving(2, (9, 7))
    cached(tmp_path, ["a", "b"], frames, counted)
    for names, given, count in (
        (["a", "c"], frames, 4),
        (["a", "b"], frames[:, :, ::-1], 6),  # other pixels under the old names
        (["a", "b"], frames[:, :, ::-1], 6),
        (["a", "b"], frames[:, :8], 8),
        (["x/a", "x/b"], frames, 10),
    ):
        flow = cached(tmp_path, names, given, counted)
        assert len(calls) == count
        torch.testing.assert_close(
            flow.forward, estimate(given, ramp).forward[:, :1].repeat(1, 2, 1, 1, 1) / 10, rtol=1e-3, atol=1e-3
        )
    assert cached(tmp_path, ["a", "b"], frames, ramp).forward[0, 0, 0, 0, 0] == frames[0, 0, 0, 0]
    assert len(calls) == 10


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 cut off", None])
def test_a_broken_file_is_written_again(tmp_path, calls, damage):
    frames = moving(2, (9, 7))
    first = cached(tmp_path, ["a", "b"], frames, counted)
    [path] = tmp_path.iterdir()
    if damage is None:
        np.savez(path, flow=np.zeros((2, 2, 3, 3)), checksum=np.zeros(2))
    else:
        path.write_bytes(damage)
    again = cached(tmp_path, ["a", "b"], frames, counted)
    assert len(calls) == 4
    assert torch.equal(first.forward, again.forward)
    cached(tmp_path, ["a", "b"], frames, counted)
    assert len(calls) == 4


def test_the_cache_says_what_it_wants(tmp_path):
    frames = moving(2, (9, 7))
    with pytest.raises(ValueError, match=r"There are 1 names for 2 frames"):
        cached(tmp_path, ["a"], frames)
    with pytest.raises(ValueError, match=r"cannot be cached by its name: pass a function defined with def\.$"):
        cached(tmp_path, ["a", "b"], frames, lambda a, b: counted(a, b))
    assert cached(tmp_path, ["a"], frames[:1]).shape == (1, 1, 9, 7)
    assert not list(tmp_path.iterdir())


# .flo


def test_read_flo(tmp_path):
    flow = np.random.default_rng(0).normal(size=(3, 5, 2)).astype("<f4")
    flow[0, 0] = 1.666e9
    (tmp_path / "a.flo").write_bytes(b"PIEH" + struct.pack("<ii", 5, 3) + flow.tobytes())
    assert np.array_equal(read_flo(str(tmp_path / "a.flo")), flow)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no .flo file: it does not begin with the number 202021.25"),
        (b"PIE", "is no .flo file"),
        (struct.pack("<fii", 1.0, 1, 1) + bytes(8), "is no .flo file"),
        (struct.pack("<fii", 202021.25, 2, 2) + bytes(31), r"says it holds 2 x 2 pixels, but has 43 bytes"),
        (struct.pack("<fii", 202021.25, 2, 2) + bytes(33), r"says it holds 2 x 2 pixels, but has 45 bytes"),
        (struct.pack("<fii", 202021.25, -1, -1) + bytes(8), r"says it holds -1 x -1 pixels"),
        (struct.pack("<fii", 202021.25, 2**30, 2**30), r"says it holds 1073741824 x"),
    ],
)
def test_bad_flo_files(tmp_path, content, message):
    (tmp_path / "bad.flo").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_flo(tmp_path / "bad.flo")


# RubberWhale


@pytest.fixture(scope="module")
def whale():
    """(both frames, the true flow from the first to the second, where it is known)."""
    image = pytest.importorskip("PIL.Image")
    frames = np.stack([np.asarray(image.open(ROOT / f"RubberWhale{i}.png").convert("RGB")) for i in (1, 2)])
    flow = read_flo(ROOT / "RubberWhale.flo")
    return frames, flow, (np.abs(flow) < UNKNOWN_FLOW).all(-1)


@need_whale
def test_warping_by_the_true_flow_gives_the_first_frame(whale):
    frames, truth, known = whale
    first, second = torch.from_numpy(frames).permute(0, 3, 1, 2).float().div(255).split(1)
    way = torch.from_numpy(np.where(known[..., None], truth, 0)).permute(2, 0, 1)[None]
    error = (warp(second, way) - first).abs().mean(1)[0][torch.from_numpy(known)]
    still = (second - first).abs().mean(1)[0][torch.from_numpy(known)]
    assert error.mean() < 0.012
    assert error.mean() < 0.5 * still.mean()
    assert (error < 0.05).float().mean() > 0.97  # the rest is hidden in the second frame, or on an edge


@need_whale
def test_average_end_point_error_of_dis(whale):
    pytest.importorskip("cv2")
    frames, truth, known = whale
    flow = estimate(frames)
    error = np.linalg.norm(flow.forward[0, :, 0].permute(1, 2, 0).numpy() - truth, axis=-1)
    sure = flow.forward_reliable[0, 0, 0].numpy()
    print(f"DIS on RubberWhale: end-point error {error[known].mean():.3f} pixels, {error[known & sure].mean():.3f} "
          f"where reliable ({sure[known].mean():.1%})")  # fmt: skip
    assert error[known].mean() < 0.3
    assert error[known & sure].mean() <= error[known].mean()
    assert sure[known].mean() > 0.9


@need_whale
def test_between_is_one_way_of_estimate(whale):
    pytest.importorskip("cv2")
    frames = whale[0][:, 100:200, 100:220]
    flow = estimate(frames)
    assert isinstance(flow, Flow)
    np.testing.assert_allclose(between(frames[1], frames[0]), flow.backward[0, :, 0].permute(1, 2, 0), atol=1e-6)
