"""The examples of a fit: what predictions are read as, what is left out, and which ids masks and label maps hold."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from deepmrf.data.colours import OKABE_ITO
from deepmrf.refine.fit import fit
from deepmrf.refine.label_ids import LabelIds
from deepmrf.refine.opening import open_mrf
from deepmrf.refine.settings import FitSettings

SIZE = (20, 26)
QUICK = FitSettings(window=3, contexts=0, folds=2, crop=16, penalty_steps=2, groups=".+")
NAMES = ["sky", "road", "car"]


def recode(folder, ids):
    """Replace the ids in all maps of a folder."""
    for path in folder.glob("*.png"):
        Image.fromarray(np.array(ids, np.uint8)[np.asarray(Image.open(path))]).save(path)


def test_all_kinds_of_predictions_are_told(folders):
    random = np.random.default_rng(0)
    (folders[0] / "1.png").unlink()
    np.save(folders[0] / "1.npy", 9 * random.normal(size=(3, *SIZE)).astype(np.float32))
    report = fit(*folders, QUICK)
    assert report.kind == "label ids; logits"
    assert report.notes[0] == (
        "The predictions were not all read alike: 3 as label ids (0 ...); 1 as logits (1 ...); "
        "save them all alike if that is wrong."
    )


def test_what_was_left_out_is_said_when_it_stops(folders):
    recode(folders[2], [255] * 3)
    with pytest.raises(ValueError, match=r"0 images .* 2 or more\. 4 of the masks are void throughout: 0"):
        fit(*folders, QUICK)
    for stem in "012":
        (folders[2] / f"{stem}.png").rename(folders[2] / f"other_{stem}.png")
    with pytest.raises(ValueError, match="3 of the predicted images have no mask: 0, 1, 2"):
        fit(*folders, QUICK)


def test_labels_that_are_never_predicted_are_no_fault_of_the_mask(folders):
    recode(folders[2], [0, 1, 3])
    Image.fromarray(np.full(SIZE, 5, np.uint8)).save(folders[2] / "3.png")
    with pytest.raises(ValueError, match=r"0\.png holds ids that no .*\(those use 0 to 2\); give --labels 6 "):
        fit(*folders, QUICK)
    assert len(fit(*folders, FitSettings(**vars(QUICK) | {"labels": 6})).labels) == 6
    for path in list(folders[0].iterdir()):
        np.save(path.with_suffix(".npy"), np.zeros((3, *SIZE), np.float32))
    with pytest.raises(
        ValueError,
        match=r"0\.png holds the id 3, but the ids here are 0 to 2.* that have it: these have 3 labels",
    ):
        fit(*folders, QUICK)  # arrays do tell how many there are


def test_label_maps_have_the_ids_of_the_masks(folders, tmp_path, options, type_in):
    (folders[2] / "labels.json").write_text(json.dumps({"names": NAMES, "ids": [7, 0, 26], "ignore": 9}))
    recode(folders[2], [7, 0, 26])
    with pytest.raises(ValueError, match=r"holds the id 1, but the masks' ids in labels.json are 7, 0, 26"):
        fit(*folders, QUICK)
    recode(folders[0], [7, 0, 26])
    report = fit(*folders, QUICK)
    assert report.before.miou == 1
    assert report.kind == "label ids, those of the masks"
    assert open_mrf(report.save(tmp_path / "mrf"))[2] == report.label_ids == LabelIds((7, 0, 26), (9, 255))
    code, text = type_in("refine", tmp_path / "mrf", *options[:4], "-o", tmp_path / "out")
    assert code == 0, text
    assert "the ids of the masks: 7, 0, 26." in text
    for path in (tmp_path / "out").iterdir():
        picture = Image.open(path)
        assert (np.asarray(picture) == np.asarray(Image.open(folders[2] / path.name))).all()
        palette = np.array(picture.getpalette()).reshape(-1, 3)
        assert (palette[[7, 0, 26]] == report.labels.colours).all()


def test_ids_that_are_the_labels_are_not_kept(folders, tmp_path):
    (folders[2] / "labels.json").write_text(json.dumps({"names": NAMES, "ids": [0, 1, 2]}))
    report = fit(*folders, QUICK)
    assert report.label_ids is None
    assert open_mrf(report.save(tmp_path / "mrf"))[2] is None
    assert "ids" not in json.loads((tmp_path / "mrf" / "config.json").read_text())


def test_an_id_that_no_label_has_says_what_to_write(tmp_path, type_in):
    for name in ("predictions", "images", "masks"):
        (tmp_path / name).mkdir()
    for number in range(2):
        mask = np.zeros((8, 9), np.uint8)
        mask[0, 0] = 3
        np.save(tmp_path / "predictions" / f"{number}.npy", np.full((3, 8, 9), 1 / 3, np.float32))
        Image.fromarray(np.zeros((8, 9, 3), np.uint8)).save(tmp_path / "images" / f"{number}.png")
        Image.fromarray(mask).save(tmp_path / "masks" / f"{number}.png")
    words = [word for name in ("predictions", "images", "masks") for word in (f"--{name}", tmp_path / name)]
    code, text = type_in("fit", *words, "-o", tmp_path / "mrf")
    assert code == 2
    written = '{"names": ["label 0", "label 1", "label 2"], "ignore": 3}'
    assert f"if this is void, write {written} into {tmp_path}/masks/labels.json" in text
    assert "If it is a label, give predictions that have it: these have 3 labels." in text
    (tmp_path / "masks/labels.json").write_text(written)
    code, text = type_in("fit", *words, "-o", tmp_path / "mrf", "--minutes", "0.01")
    assert "labels.json" not in text, text


def test_labels_that_no_mask_holds_are_noted(folders):
    for path in list(folders[0].iterdir()):
        np.save(path.with_suffix(".npy"), np.random.default_rng(0).normal(size=(4, *SIZE)).astype(np.float32))
    notes = fit(*folders, QUICK).notes
    assert any("have 4 labels, of which no mask holds label 3: is that right?" in note for note in notes)


def test_masks_in_a_lossy_format_get_a_note(folders):
    path = folders[2] / "0.png"
    Image.open(path).save(path.with_suffix(".webp"), lossless=True)
    path.unlink()
    notes = fit(*folders, QUICK).notes
    assert [note for note in notes if "may be lossy" in note] == [
        f"The format of {path.with_suffix('.webp')} may be lossy, which changes ids without a trace: save masks as PNG."
    ]


def test_masks_with_a_palette_bring_the_colours(folders, tmp_path):
    assert fit(*folders, QUICK).labels.colours == OKABE_ITO[:3]
    own = ((1, 2, 3), (0, 200, 0), (90, 0, 90))
    for path in folders[2].iterdir():
        mask = Image.open(path)
        mask.putpalette([value for colour in own for value in colour])
        mask.save(path)
    assert fit(*folders, QUICK).labels.colours == own
    (folders[2] / "labels.json").write_text(json.dumps({"names": NAMES}))
    assert fit(*folders, QUICK).labels.colours == OKABE_ITO[:3]


def test_another_number_of_names_than_of_labels_is_told(folders):
    for path in list(folders[0].iterdir()):
        np.save(path.with_suffix(".npy"), np.zeros((*SIZE, 4), np.float32))
    with pytest.raises(ValueError, match=r"shape \(20, 26, 4\), .* 3 labels; save \(3, H, W\) or \(H, W, 3\)\."):
        fit(*folders, FitSettings(**vars(QUICK) | {"labels": 3}))
    path = folders[2] / "labels.json"
    path.write_text(json.dumps({"names": NAMES}))
    with pytest.raises(ValueError, match=rf"shape \(20, 26, 4\), but {path} names 3 labels: correct one of them\."):
        fit(*folders, QUICK)
