"""Windows and their sums, against sums written out pixel by pixel."""

from __future__ import annotations

import pytest
import torch

from deepmrf.ops import window

WINDOWS = [1, 2, 3, 4, 5, 13, 14, 50]


@pytest.mark.parametrize(
    ("size", "covered"), [(1, [0]), (2, [-1, 0]), (3, [-1, 0, 1]), (4, [-2, -1, 0, 1]), (5, [-2, -1, 0, 1, 2])]
)
def test_a_window_covers_the_offsets_it_promises(size, covered):
    [(before, after)] = window.reaches([size])
    assert list(range(-before, after + 1)) == covered


def test_fifty_pixels_cover_minus_25_to_24():
    assert window.reaches([50]) == [(25, 24)]


def test_mirrored_windows_swap_their_sides():
    assert window.reaches([50, 3], mirrored=True) == [(24, 25), (1, 1)]


def test_sizes_repeat_a_number_and_keep_a_sequence():
    assert window.sizes(7, 3, "window") == (7, 7, 7)
    assert window.sizes([7, 5], 2, "window") == (7, 5)


@pytest.mark.parametrize("m", WINDOWS)
@pytest.mark.parametrize("mirrored", [False, True])
def test_axis_sum_is_the_sum_over_the_window(m, mirrored, agree):
    x = torch.randn(2, 13, 3, dtype=torch.float64)
    [(before, after)] = window.reaches([m], mirrored)
    expected = torch.stack([x[:, max(0, j - before) : j + after + 1].sum(1) for j in range(13)], 1)
    agree(window.axis_sum(x, 1, (before, after)), expected)


@pytest.mark.parametrize("m", WINDOWS)
def test_axis_spread_is_the_second_moment_about_the_pixel(m, agree):
    x = torch.randn(2, 13, dtype=torch.float64)
    [(before, after)] = window.reaches([m])
    expected = torch.zeros_like(x)
    for j in range(13):
        for z in range(max(0, j - before), min(13, j + after + 1)):
            expected[:, j] += (z - j) ** 2 * x[:, z]
    agree(window.axis_spread(x, 1, (before, after)), expected)


@pytest.mark.parametrize(("size", "m"), [((7,), (4,)), ((4, 5), (3, 2)), ((3, 4, 2), (2, 50, 3))])
def test_box_sum_and_spread(size, m, pixels, neighbours, agree):
    x = torch.randn(2, *size, dtype=torch.float64)
    spacing = (0.5, 2.0, 3.0)[: len(size)]
    total, spread = torch.zeros_like(x), torch.zeros_like(x)
    for j in pixels(size):
        for z in neighbours(j, m, size):
            squared = sum(((jj - zz) * s) ** 2 for jj, zz, s in zip(j, z, spacing, strict=True))
            total[(..., *j)] += x[(..., *z)]
            spread[(..., *j)] += squared * x[(..., *z)]
    agree(window.box_sum(x, window.reaches(m)), total)
    both = window.box_sum_and_spread(x, window.reaches(m), spacing)
    agree(both[0], total)
    agree(both[1], spread)


def test_the_adjoint_of_a_box_sum_is_the_mirrored_box_sum(agree):
    x, y = torch.randn(2, 6, 7, dtype=torch.float64)
    ahead = (window.box_sum(x, window.reaches((4, 3))) * y).sum()
    back = (x * window.box_sum(y, window.reaches((4, 3), mirrored=True))).sum()
    agree(ahead, back)


@pytest.mark.parametrize("centre", [True, False])
def test_offsets_reach_every_pair_once(centre, pixels, neighbours):
    size, m = (3, 4), (2, 50)
    expected = {(j, z) for j in pixels(size) for z in neighbours(j, m, size) if centre or z != j}
    index = torch.arange(12).view(size)
    pairs = []
    for offset in window.offsets(window.reaches(m), size, centre):
        j, z = window.overlap(offset, size)
        pairs += zip(index[j].flatten().tolist(), index[z].flatten().tolist(), strict=True)
    assert len(pairs) == len(set(pairs))
    assert {(divmod(j, 4), divmod(z, 4)) for j, z in pairs} == expected


def test_running_sums_are_kept_in_double_precision():
    assert window.accumulator(torch.zeros(1)) == torch.float64
