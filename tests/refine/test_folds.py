"""Images that belong together are held out together."""

from __future__ import annotations

import pytest
import torch

from deepmrf.refine.folds import groups_by_name, groups_by_video, split, thumbnail

RANDOM = torch.Generator().manual_seed(0)


def scene():
    return torch.randint(0, 256, (3, 24, 32), generator=RANDOM).float()


def frames(count):
    """The thumbnails of a slowly changing scene."""
    start, end = scene(), scene()
    return [thumbnail(start + 0.02 * number * (end - start)) for number in range(count)]


def test_every_index_is_in_one_fold_and_no_group_is_split():
    groups = ["a"] * 5 + ["b"] * 3 + ["c"] * 2 + ["d"]
    for seed in range(4):
        parts = split(groups, 3, seed)
        assert sorted(index for part in parts for index in part) == list(range(11))
        owners = [{groups[index] for index in part} for part in parts]
        assert sum(map(len, owners)) == 4  # each group in one fold alone
        assert sorted(map(len, parts)) == [3, 3, 5]
    singles = [str(number) for number in range(7)]
    assert split(singles, 3, 0) != split(singles, 3, 1)
    assert sorted(map(len, split(singles, 3, 0))) == [2, 2, 3]
    assert len(split(["a", "b"], 5, 0)) == 2


def test_groups_by_a_pattern_in_the_names():
    stems = ["p1_a", "p1_b", "p2_a"]
    assert groups_by_name(stems, "^([^_]+)_") == ["p1", "p1", "p2"]
    assert groups_by_name(stems, "p.") == ["p1", "p1", "p2"]
    assert groups_by_name(stems, ".+") == stems
    for pattern, why in (("(", "no regular expression"), ("q", "finds nothing in the name p1_a"), ("p", "one group")):
        with pytest.raises(ValueError, match=why):
            groups_by_name(stems, pattern)


def test_frames_of_videos_stay_together():
    stems = [f"a_{number}" for number in range(8, 14)] + ["other"] + [f"b{number:04}" for number in range(5)]
    groups, note = groups_by_video(stems, [*frames(6), thumbnail(scene()), *frames(5)], 3)
    assert groups == ["video a_"] * 6 + ["other"] + ["video b"] * 5
    assert note.startswith("11 of 12 images are frames of 2 videos (a_, b)")
    assert "held out together" in note


def test_a_single_video_is_cut_into_stretches_in_the_order_of_its_numbers():
    stems = [f"a{number}" for number in (9, 10, 11, 12, 100, 101)]
    order = [3, 0, 5, 1, 4, 2]
    thumbnails = frames(6)
    groups, note = groups_by_video([stems[i] for i in order], [thumbnails[i] for i in order], 3)
    assert groups == [f"video a, part {i // 2}" for i in order]
    assert "one video (a)" in note
    assert "3 stretches" in note


def test_photographs_with_numbers_are_no_video():
    stems = [f"2007_{number}" for number in range(6)]
    groups, note = groups_by_video(stems, [thumbnail(scene()) for _ in stems], 3)
    assert groups == stems
    assert not note


@pytest.mark.parametrize("name", ["v_{:04}_rgb", "v_{:04}_leftImg8bit", "cam2_{}", "run_{}-of-100"])
def test_the_number_of_a_frame_may_stand_anywhere_in_its_name(name):
    stems = [name.format(number) for number in range(6)] + [f"photo{number}_{number}" for number in range(6)]
    groups, note = groups_by_video(stems, [*frames(6), *[thumbnail(scene()) for _ in range(6)]], 3)
    assert len(set(groups[:6])) == 1
    assert len(set(groups[6:])) == 6
    assert note.startswith("6 of 12 images are frames of one video")
