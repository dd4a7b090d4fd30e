"""Warping by hand and against loops, which flows are reliable, and flows one after the other."""

from __future__ import annotations

import math

import pytest
import torch

from deepmrf.flow import compose, consistent, inside, warp


def bilinear(picture, x, y):
    """picture (C, H, W) at a place between pixels, the outer pixels repeated outside."""
    height, width = picture.shape[1:]
    x, y = min(max(x, 0.0), width - 1.0), min(max(y, 0.0), height - 1.0)
    left, top = min(math.floor(x), width - 1), min(math.floor(y), height - 1)
    right, bottom = min(left + 1, width - 1), min(top + 1, height - 1)
    a, b = x - left, y - top
    upper = (1 - a) * picture[:, top, left] + a * picture[:, top, right]
    return (1 - b) * upper + b * ((1 - a) * picture[:, bottom, left] + a * picture[:, bottom, right])


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (4, 3), (7, 9)])
def test_warp_by_loops(size, agree):
    maps = torch.rand(2, 3, *size, dtype=torch.float64)
    flow = 3 * torch.randn(2, 2, *size, dtype=torch.float64)
    expected = torch.zeros_like(maps)
    for b in range(2):
        for y in range(size[0]):
            for x in range(size[1]):
                dx, dy = flow[b, :, y, x].tolist()
                expected[b, :, y, x] = bilinear(maps[b], x + dx, y + dy)
    agree(warp(maps, flow), expected)


def test_warp_by_hand():
    maps = torch.tensor([[[[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]]])
    flow = torch.zeros(1, 2, 2, 4)
    flow[:, 0] = 1.5  # to the right: each pixel shows what is there
    expected = torch.tensor([[[[1.5, 2.5, 3.0, 3.0], [5.5, 6.5, 7.0, 7.0]]]])
    torch.testing.assert_close(warp(maps, flow), expected)
    flow[:, 0], flow[:, 1] = 0, 1  # down
    torch.testing.assert_close(warp(maps, flow), maps[:, :, [1, 1]])
    flow[:, 0], flow[:, 1] = 0.4, 0.6
    torch.testing.assert_close(warp(maps, flow, "nearest"), maps[:, :, [1, 1]])


def test_warp_is_differentiable():
    maps = torch.rand(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    flow = (torch.rand(1, 2, 3, 4, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()  # not on a pixel: a kink is there
    assert torch.autograd.gradcheck(warp, (maps, flow))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_half_numbers_do_not_count_pixels(dtype):
    """Pixel 1,500 has no neighbour 1,501 in float16: places are counted in float32."""
    maps = (torch.arange(3000) % 7).to(dtype).view(1, 1, 1, -1)
    flow = torch.zeros(1, 2, 1, 3000)
    flow[:, 0] = 1
    moved = warp(maps, flow)
    assert moved.dtype == dtype
    torch.testing.assert_close(moved[..., :-1].double(), maps[..., 1:].double(), rtol=0, atol=4e-3)


@pytest.mark.parametrize("shapes", [((1, 2, 3), (1, 2, 3)), ((1, 1, 4, 5), (1, 2, 5, 4)), ((1, 1, 4, 5), (1, 3, 4, 5))])
def test_warp_says_what_it_wants(shapes):
    with pytest.raises(ValueError, match=r"pass \(B, C, H, W\) and \(B, 2, H, W\)\.$"):
        warp(torch.zeros(shapes[0]), torch.zeros(shapes[1]))


def test_inside_ends_half_a_pixel_out():
    flow = torch.zeros(1, 2, 1, 4)
    flow[0, 0, 0] = torch.tensor([-0.4, -1.6, 1.4, 0.6])
    assert inside(flow).flatten().tolist() == [True, False, True, False]
    assert not inside(torch.full((1, 2, 2, 2), torch.nan)).any()


def test_compose_follows_both():
    first, second = torch.randn(2, 1, 2, 5, 6, dtype=torch.float64).unbind()
    composed = compose(first, second)
    for y in range(5):
        for x in range(6):
            dx, dy = first[0, :, y, x].tolist()
            torch.testing.assert_close(composed[0, :, y, x], first[0, :, y, x] + bilinear(second[0], x + dx, y + dy))


def test_consistent_by_hand():
    forward, backward = torch.zeros(1, 2, 1, 6), torch.zeros(1, 2, 1, 6)
    forward[0, 0, 0] = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    backward[0, 0, 0] = torch.tensor([0.0, -1.0, -1.6, 3.0, 0.7, 0.0])
    # 0: and back. 1: back 0.6 too far, 0.36 < 0.5. 2: back elsewhere. 3: stays, led away. 4: 0.49 < 0.5. 5: leaves
    assert consistent(forward, backward).flatten().tolist() == [True, True, False, False, True, False]
    assert consistent(forward, backward, slack=0.2).flatten().tolist() == [True, False, False, False, False, False]
    assert consistent(forward, backward, share=1.0, slack=0.3).flatten().tolist()[:2] == [True, True]


def test_unknown_flow_is_not_reliable():
    forward, backward = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
    forward[0, :, 1, 1] = 1.666e9
    forward[0, 0, 2, 2] = torch.nan
    backward[0, :, 0, 3] = 1.666e9
    expected = torch.ones(1, 1, 3, 4, dtype=torch.bool)
    for pixel in ((1, 1), (2, 2), (0, 3)):
        expected[(0, 0, *pixel)] = False
    assert torch.equal(consistent(forward, backward), expected)
