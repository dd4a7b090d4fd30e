"""The flow of a clip: trajectories over several frames, parts, mirrors and sizes, and what it says of bad shapes."""

from __future__ import annotations

import pytest
import torch

from deepmrf import ops
from deepmrf.flow import Flow, consistent, estimate, join, warp
from deepmrf.flow.clip import frames_at

SIZE = (10, 14)


def steady(velocity, frames=4, size=SIZE, **masks):
    """A picture that moves as a whole."""
    way = torch.tensor(velocity, dtype=torch.float64).view(1, 2, 1, 1, 1).expand(1, 2, frames - 1, *size).clone()
    return Flow(way, -way, **masks)


@pytest.mark.parametrize("velocity", [(0.0, 0.0), (2.0, 1.0), (-1.5, 0.25)])
def test_trajectories_of_a_steady_motion(velocity):
    links = steady(velocity, frames=4).trajectories(2, 3)
    assert sorted(links) == [-2, -1, 1, 2, 3]
    for step, (way, reliable) in links.items():
        assert way.shape == (1, 2, 4, *SIZE)
        assert reliable.shape == (1, 1, 4, *SIZE)
        for t in range(4):
            for y in range(SIZE[0]):
                for x in range(SIZE[1]):
                    # It is reliable as long as it is in the clip and in the picture, all the way.
                    there = 0 <= t + step < 4 and all(
                        -0.5 <= position + s * v * (1 if step > 0 else -1) <= n - 0.5
                        for s in range(1, abs(step) + 1)
                        for position, v, n in ((x, velocity[0], SIZE[1]), (y, velocity[1], SIZE[0]))
                    )
                    assert bool(reliable[0, 0, t, y, x]) == there, (step, t, y, x)
                    expected = [step * v if there else 0.0 for v in velocity]
                    assert way[0, :, t, y, x].tolist() == pytest.approx(expected, abs=1e-9)


def test_a_break_breaks_what_goes_through_it():
    sure = torch.ones(1, 1, 2, 1, 5, dtype=torch.bool)
    sure[0, 0, 1, 0, 3] = False  # from frame 1 to 2, at x = 3
    flow = steady((1.0, 0.0), frames=3, size=(1, 5), forward_reliable=sure)
    one_step, two_steps = (flow.trajectories(0, 2)[step][1][0, 0, :, 0].int().tolist() for step in (1, 2))
    assert one_step == [[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    assert two_steps == [[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]  # from frame 0, x = 2 arrives at the break


def test_half_way_to_a_break_is_broken():
    sure = torch.ones(1, 1, 2, 1, 5, dtype=torch.bool)
    sure[0, 0, 1, 0, 3] = False
    flow = steady((0.5, 0.0), frames=3, size=(1, 5), forward_reliable=sure)
    assert flow.trajectories(0, 2)[2][1][0, 0, 0, 0].int().tolist() == [1, 1, 0, 0, 0]  # x = 4 leaves at 5


def test_given_masks_are_kept_but_for_what_leaves():
    way = torch.zeros(1, 2, 1, 2, 3)
    way[0, 0, 0, 0, 0] = -2.0
    back = torch.full((1, 2, 1, 2, 3), 9.0)  # nothing would be consistent with it
    flow = Flow(way, back, torch.ones(1, 1, 1, 2, 3), torch.ones(1, 1, 1, 2, 3))
    assert flow.forward_reliable.flatten().tolist() == [False, True, True, True, True, True]
    assert not flow.backward_reliable.any()


def test_masks_are_found_out():
    forward, backward = torch.randn(2, 2, 3, 4, 5), torch.randn(2, 2, 3, 4, 5)
    flow = Flow(forward, backward)
    assert flow.shape == (2, 4, 4, 5)
    for b in range(2):
        for t in range(3):
            ways = forward[b : b + 1, :, t], backward[b : b + 1, :, t]
            assert torch.equal(flow.forward_reliable[b, :, t], consistent(*ways)[0])
            assert torch.equal(flow.backward_reliable[b, :, t], consistent(*reversed(ways))[0])


def test_cut_and_join():
    flow = Flow(torch.randn(1, 2, 5, 4, 5), torch.randn(1, 2, 5, 4, 5))
    again = join([flow.cut(0, 2), flow.cut(1, 5), flow.cut(4, 6)])
    for name in ("forward", "backward", "forward_reliable", "backward_reliable"):
        assert torch.equal(getattr(again, name), getattr(flow, name))
    assert flow.cut(2, 3).shape == (1, 1, 4, 5)
    with pytest.raises(ValueError, match=r"Frames 4 \.\. 6 are not in this clip: it has 6"):
        flow.cut(4, 7)
    with pytest.raises(ValueError, match="nothing to join"):
        join([])


def test_crop_flip_and_resize_go_with_the_picture(agree):
    """The warped picture changes as the picture does."""
    size = (12, 16)
    way = torch.nn.functional.interpolate(torch.randn(1, 2, 3, 3, dtype=torch.float64), size, mode="bicubic")
    flow = Flow(way[:, :, None], -way[:, :, None])
    picture = torch.rand(1, 1, *size, dtype=torch.float64)
    moved = warp(picture, way)
    agree(warp(picture.flip(-1), flow.flip().forward[:, :, 0]), moved.flip(-1))
    assert torch.equal(flow.flip().forward_reliable, flow.forward_reliable.flip(-1))

    part = flow.crop(3, 4, 6, 8)
    sure = part.forward_reliable[0, 0, 0]
    inner = warp(picture[..., 3:9, 4:12], part.forward[:, :, 0])[0, 0]
    deep = warp(torch.nn.functional.pad(torch.ones(1, 1, 4, 6).double(), (1, 1, 1, 1)), part.forward[:, :, 0])[0, 0]
    deep = sure & (deep > 0.999)  # no pixel of the part's border is mixed in
    assert 5 < deep.sum() < 48
    agree(inner[deep], moved[0, 0, 3:9, 4:12][deep])
    with pytest.raises(ValueError, match="are not all in"):
        flow.crop(7, 0, 6, 4)

    large = steady((3.0, -2.0), frames=2).resize(20, 42)
    assert large.shape == (1, 2, 20, 42)
    agree(large.forward, torch.tensor([9.0, -4.0]).double().view(1, 2, 1, 1, 1).expand(1, 2, 1, 20, 42))


def test_devices(device):
    moved = steady((1.0, 0.0)).to(device)
    assert moved.forward.device.type == moved.backward_reliable.device.type == device.type
    assert moved.trajectories(1, 1)[1][0].device.type == device.type


@pytest.mark.parametrize("start", [-4, -3, -1, 0, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_frames_that_are_not_there_are_zero(start, count):
    maps = torch.rand(2, 1, 3, 2, 2)
    expected = torch.zeros(2, 1, count, 2, 2)
    for t in range(count):
        if 0 <= start + t < 3:
            expected[:, :, t] = maps[:, :, start + t]
    assert torch.equal(frames_at(maps, start, start + count), expected)


def test_one_frame_has_no_flow():
    flow = estimate(torch.zeros(1, 6, 7, 3, dtype=torch.uint8), method=None)
    assert flow.shape == (1, 1, 6, 7)
    [(way, reliable)] = flow.trajectories(1, 0).values()
    assert way.shape == (1, 2, 1, 6, 7)
    assert not reliable.any()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 2, 4, 5), (1, 2, 4, 5)), r"pass both as \(B, 2, T - 1, H, W\)\.$"),
        (((1, 2, 3, 4, 5), (1, 2, 2, 4, 5)), r"pass both as \(B, 2, T - 1, H, W\)\.$"),
        (((1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (1, 1, 2, 4, 5)), r"forward_reliable has shape .* pass \(B, 1, T - 1"),
    ],
)
def test_bad_shapes(shapes, message):
    with pytest.raises(ValueError, match=message):
        Flow(*(torch.zeros(shape) for shape in shapes))


def test_whole_numbers_are_no_flow():
    with pytest.raises(TypeError, match=r"pass flows in pixels as floats\.$"):
        Flow(*(torch.zeros(1, 2, 1, 3, 3, dtype=torch.int64),) * 2)


def test_kernels_follow_and_check_as_pytorch_does():
    """Fractions of pixels, flows that leave the image, gaps, NaN, on odd sizes: the same links, but for rounding."""
    generator = torch.Generator().manual_seed(0)
    ways = [
        2 * torch.randn(2, 2, 4, 1, 1, generator=generator) + 0.1 * torch.randn(2, 2, 4, 17, 23, generator=generator)
        for _ in range(2)
    ]
    ways[1] = -ways[0] + 0.3 * torch.randn(ways[0].shape, generator=generator)  # some of it leads back
    ways[0][0, 0, 0, 3, 4] = torch.nan
    with ops.use("torch"):
        expected = Flow(*ways)
        links = expected.trajectories(2, 3)
    flow = Flow(*ways)
    assert 0.1 < expected.forward_reliable.float().mean() < 0.9
    assert (flow.forward_reliable == expected.forward_reliable).float().mean() > 0.999
    assert (flow.backward_reliable == expected.backward_reliable).float().mean() > 0.999
    for step, (way, reliable) in (
        Flow(*ways, expected.forward_reliable, expected.backward_reliable).trajectories(2, 3).items()
    ):
        same = reliable == links[step][1]
        assert same.float().mean() > 0.995, step
        torch.testing.assert_close(way * same, links[step][0] * same, atol=1e-4, rtol=1e-4)
