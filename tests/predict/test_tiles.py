"""In tiles or at once, an MRF says the same: its reach is exactly what it takes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from deepmrf import MeanField
from deepmrf.predict.tiles import MIN_TILE_SIDE, in_tiles, spaced, square_tiles, tile_size, tiles

SIZE = (9, 13, 11)


def new_mrf(**options):
    """An MRF with parameters far from nothing."""
    gaussian = options.get("kernel", "gaussian") == "gaussian"
    mrf = MeanField(
        3,
        dims=3,
        features=1,
        **{"window": 3, "context_size": 3, "contexts": 2, "kernel": "gaussian", "spacing": (1.0, 0.7, 2.0), **options},
        smoothness=gaussian,
        normalize=gaussian,
        gate=not gaussian,
    )
    if mrf.label_contexts is not None:
        torch.nn.init.normal_(mrf.label_contexts.weight, std=1.0)
    else:
        torch.nn.init.constant_(mrf.triple_penalty.scale, -2.0)
    return mrf.requires_grad_(False)


def joined(mrf, log_p, image, tile):
    joined_maps = torch.full_like(log_p, torch.nan)
    for box, log_q in in_tiles(mrf, log_p, image, tile):
        assert joined_maps[(slice(None), *box)].isnan().all()  # no voxel comes twice
        joined_maps[(slice(None), *box)] = log_q
    return joined_maps


@pytest.mark.parametrize("tile", [(5, 7, 4), (9, 13, 2), (20, 20, 20)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernel": "distance"},
        {"contexts": 0},
        {"window": (1, 5, 3), "context_size": (3, 1, 5)},
        {"window": 4, "context_size": 2},
        {"iterations": 2},
    ],
    ids=["gaussian", "distance", "no contexts", "uneven", "even sizes", "two iterations"],
)
def test_tiles_give_what_the_whole_gives(options, tile, agree):
    mrf = new_mrf(**options)
    log_p, image = torch.randn(3, *SIZE).log_softmax(0), torch.rand(1, *SIZE)
    agree(joined(mrf, log_p, image, tile), mrf(log_p[None], image[None])[0])


@pytest.mark.parametrize(
    "options", [{}, {"kernel": "distance"}, {"window": 4, "context_size": 2}, {"iterations": 2}], ids=str
)
def test_the_reach_is_no_larger_than_needed(options):
    """The farthest voxel within reach changes the result at the centre, and the next one does not."""
    mrf = new_mrf(**options).double()
    before, behind = mrf.reach()[1]
    centre, length = before + 2, before + behind + 5
    log_p, image = torch.randn(1, 3, 1, length, 1).double(), 0.1 * torch.rand(1, 1, 1, length, 1).double()
    reference = mrf(log_p, image)[..., centre, 0]
    for step, counts in ((-before - 1, False), (-before, True), (behind, True), (behind + 1, False)):
        other_p, other = log_p.clone(), image.clone()
        other_p[..., centre + step, 0] += torch.tensor([3.0, -1, 0])[None, :, None]
        other[..., centre + step, 0] += 0.05
        changed = not torch.equal(mrf(other_p, other)[..., centre, 0], reference)
        assert changed == counts, step


def test_every_voxel_is_in_one_tile():
    seen = torch.zeros(SIZE)
    for tile in tiles(SIZE, (4, 13, 5), [(1, 2)] * 3):
        seen[tile.inner] += 1
    assert (seen == 1).all()


def test_tiles_fit_into_the_budget():
    mrf = new_mrf()
    assert tile_size(mrf, SIZE) == SIZE
    bytes_each = 4 * (3 * (2 + 8) + 4)
    around = [a + b for a, b in mrf.reach()]
    budget = bytes_each * 40**3
    tile = tile_size(mrf, (200, 150, 90), budget)
    assert all(t >= 40 // 2 - 8 for t in tile)
    side = 1
    for t, a in zip(tile, around, strict=True):
        side *= t + a
    assert bytes_each * side <= budget
    assert max(tile_size(mrf, (64, 64, 64), 1)) <= MIN_TILE_SIDE


def test_spacing_is_the_volumes_own_and_is_put_back():
    mrf, other = new_mrf(), new_mrf(spacing=(2.0, 1.0, 1.0))
    other.load_state_dict(mrf.state_dict())
    log_p, image = torch.randn(3, *SIZE).log_softmax(0), torch.rand(1, *SIZE)
    [(_, log_q)] = in_tiles(mrf, log_p, image, spacing=(2.0, 1.0, 1.0))
    assert torch.equal(log_q, other(log_p[None], image[None])[0])
    assert mrf.triple_penalty.spacing == (1.0, 0.7, 2.0)
    with pytest.raises(KeyError), spaced(mrf, (3, 3, 3)):
        raise KeyError
    assert mrf.triple_penalty.spacing == (1.0, 0.7, 2.0)
    with spaced(mrf, None):
        assert mrf.triple_penalty.spacing == (1.0, 0.7, 2.0)


def test_pictures_can_be_tiled_too(agree):
    mrf = MeanField(4, window=5, contexts=2, context_size=3)
    torch.nn.init.normal_(mrf.label_contexts.weight, std=1.0)
    log_p, image = torch.randn(4, 20, 23).log_softmax(0), torch.randint(0, 256, (3, 20, 23), dtype=torch.uint8)
    with torch.no_grad():
        agree(joined(mrf, log_p, image, (7, 6)), mrf(log_p[None], image[None])[0])


def test_the_product_of_starts_is_the_number_of_tiles():
    count = len(list(tiles((7, 5), (3, 5), [(0, 0)] * 2)))
    assert count == len(list(itertools.product(range(0, 7, 3), range(0, 5, 5))))


@pytest.mark.parametrize("stride", [2, 3])
def test_contexts_at_a_stride_can_be_tiled(stride, agree):
    mrf = MeanField(4, window=5, contexts=2, context_size=5, context_stride=stride)
    torch.nn.init.normal_(mrf.label_contexts.weight, std=1.0)
    log_p, image = torch.randn(4, 41, 50).log_softmax(0), torch.rand(3, 41, 50)
    with torch.no_grad():
        agree(joined(mrf, log_p, image, (7, 11)), mrf(log_p[None], image[None])[0])


@pytest.mark.parametrize(
    "height, width, tile, edge, step", [(1, 1, 1, 0, 1), (97, 53, 16, 5, 4), (64, 64, 64, 9, 32), (7, 300, 50, 200, 32)]
)
def test_tiles_cover_every_pixel_once(height, width, tile, edge, step):
    count = np.zeros((height, width), int)
    for part in square_tiles((height, width), tile, edge, step):
        count[part.inner] += 1
        for inner, outer, cut, size in zip(part.inner, part.outer, part.cut, (height, width), strict=True):
            assert inner.stop - inner.start <= tile
            assert outer.start % step == 0
            assert outer.start <= max(0, inner.start - edge)
            assert outer.stop >= min(size, inner.stop + edge)
            assert outer.stop % step == 0 or outer.stop == size
            assert outer.stop < inner.stop + edge + step
            assert (outer.start + cut.start, outer.start + cut.stop) == (inner.start, inner.stop)
    assert (count == 1).all()


@pytest.mark.parametrize("wrong", [(0, 1, 1), (8, -1, 1), (8, 1, 0)])
def test_bad_tiles_are_refused(wrong):
    with pytest.raises(ValueError, match="must be at least"):
        list(square_tiles((9, 9), *wrong))
