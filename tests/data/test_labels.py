import json

import pytest

from deepmrf.data import ANIMALS, CAMVID, CITYSCAPES, VOC, LabelSet
from deepmrf.data.colours import choose_colours


@pytest.mark.parametrize(
    "labels, count, known",
    [
        (VOC, 21, {"aeroplane": (128, 0, 0), "person": (192, 128, 128), "tvmonitor": (0, 64, 128)}),
        (ANIMALS, 7, {"background": (0, 0, 0), "cat": (86, 180, 233), "person": (204, 121, 167)}),
        (CITYSCAPES, 19, {"road": (128, 64, 128), "bicycle": (119, 11, 32)}),
        (CAMVID, 11, {"sky": (128, 128, 128), "bicyclist": (0, 128, 192)}),
    ],
    ids=["voc", "animals", "cityscapes", "camvid"],
)
def test_known_sets(labels, count, known):
    assert len(labels) == count
    assert len(set(labels.colours)) == count
    for name, colour in known.items():
        assert labels.colours[labels.names.index(name)] == colour


def test_round_trip_through_json():
    assert LabelSet.from_dict(json.loads(json.dumps(CAMVID.to_dict()))) == CAMVID


def test_colours_and_void_are_made_up_where_left_out():
    labels = LabelSet.from_dict({"names": ["a", "b"]})
    assert labels.colours == choose_colours(["a", "b"])
    assert labels.ignore == 255


def test_palette_can_be_indexed_by_any_mask():
    assert VOC.palette().shape == (256, 3)
    assert tuple(VOC.palette()[15]) == (192, 128, 128)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"names": []}, "has 0 names; give between 1 and 255"),
        ({"names": ["a", "a"]}, "'a' is empty, repeated"),
        ({"names": ["a", " "]}, "' ' is empty"),
        ({"names": ["a", 3]}, "3 is empty, repeated or no"),
        ({"names": "cat"}, "give a list"),
        ({"names": ["a", "b"], "colours": [[0, 0, 0]]}, "2 names but 1 colours"),
        ({"names": ["a"], "colours": [[1, 2]]}, "colour of 'a' is"),
        ({"names": ["a"], "colours": [[1, 2, 256]]}, "ints of 0 to 255"),
        ({"names": ["a"], "colours": [7]}, "'colours' of labels are"),
        ({"names": ["a", "b"], "ignore": 1}, "The void id is 1; give an int of 2 to 255"),
        ({"names": ["a"], "ingore": 2}, "unknown key 'ingore'"),
        ({"colours": []}, "has no 'names'"),
    ],
)
def test_bad_descriptions(values, message):
    with pytest.raises(ValueError, match=message):
        LabelSet.from_dict(values)


def test_other_labels_are_named():
    labels = LabelSet.from_dict({"names": ["cat", "dog"]})
    labels.check_same("a", LabelSet(labels.names, ((1, 2, 3), (4, 5, 6))), "b", "match them")  # colours may differ
    with pytest.raises(ValueError, match=r"^a knows other labels than b \(2 labels, not 21\): match them\.$"):
        labels.check_same("a", VOC, "b", "match them")
    with pytest.raises(ValueError, match=r"\(label 1 is 'dog', not 'lynx'\)"):
        labels.check_same("a", LabelSet.from_dict({"names": ["cat", "lynx"]}), "b", "match them")


def test_names_alone_will_do():
    labels = LabelSet(["background", "cat"])
    assert labels.names == ("background", "cat")
    assert labels == LabelSet.from_dict({"names": ["background", "cat"], "colours": []})
    assert len({labels, labels}) == 1
    assert labels.colours[0] != labels.colours[1]
    with pytest.raises(ValueError, match="give a list with one name per label"):
        LabelSet("cat")
