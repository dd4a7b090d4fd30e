"""Predictions of volumes: read whatever they are saved as, an MRF learned for them, and refined to NIfTI again."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from deepmrf import MeanField
from deepmrf.cli import fit as command
from deepmrf.data import DataError
from deepmrf.data.colours import distinct_colours
from deepmrf.data.labels import LabelSet
from deepmrf.data.volumes import read_volume, unit_range
from deepmrf.evaluation.dice import mean_dice
from deepmrf.models.folder import read_mrf
from deepmrf.refine.apply import refine, refine_image
from deepmrf.refine.decode import CONFIDENCE
from deepmrf.refine.examples import open_examples
from deepmrf.refine.fit import default_settings, fit
from deepmrf.refine.label_ids import LabelIds
from deepmrf.refine.learn import crop, run_batch
from deepmrf.refine.matching import count_dims, match_files
from deepmrf.refine.opening import open_mrf, open_preset
from deepmrf.refine.predictions import PredictionFolder, count_labels, open_prediction
from deepmrf.refine.settings import VOLUME_SETTINGS, WINDOWS, FitSettings, size_in_voxels

nibabel = pytest.importorskip("nibabel")

L, SIZE = 3, (6, 9, 7)
AFFINE = np.diag([1.0, 2.0, 0.5, 1.0])
QUICK = FitSettings(
    window=3, contexts=2, context_size=3, folds=2, crop=16, batch=2, penalty_steps=15, contexts_steps=15
)


def save(path, values, affine=AFFINE):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, affine), path)


def read(folder, stem):
    """The log-probabilities of one prediction in a folder."""
    return open_prediction(PredictionFolder(folder, 3).find(stem), 3)[0].tensor()


@pytest.fixture
def truth():
    return (2 * torch.randn(L, *SIZE)).softmax(0)


# ---- reading


@pytest.mark.parametrize("last", [False, True], ids=["LDHW", "DHWL"])
@pytest.mark.parametrize("kind", ["probabilities", "log-probabilities", "logits"])
@pytest.mark.parametrize("ending", ["npy", "npz", "nii", "nii.gz"])
def test_every_way_to_save_is_read_back(tmp_path, truth, ending, kind, last):
    array = {"probabilities": truth, "log-probabilities": truth.log(), "logits": truth.log() + 3}[kind].numpy()
    array = np.moveaxis(array, 0, 3) if last or "nii" in ending else array
    path = tmp_path / f"a.{ending}"
    if ending == "npy":
        np.save(path, array)
    elif ending == "npz":
        np.savez_compressed(path, probabilities=array)
    else:
        save(path, array)
    files = PredictionFolder(tmp_path, 3).find("a")
    log_p, taken_for = open_prediction(files, L)
    torch.testing.assert_close(log_p.tensor().exp(), truth, atol=1e-5, rtol=0)
    assert taken_for == kind
    assert count_labels([files]) == L
    assert PredictionFolder(tmp_path, 3).stems() == ["a"]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32])
def test_label_maps(tmp_path, dtype):
    ids = np.random.default_rng(0).integers(0, L, SIZE)
    save(tmp_path / "a.nii.gz", ids.astype(dtype))
    np.save(tmp_path / "b.npy", ids)
    for stem in "ab":
        p = read(tmp_path, stem).exp()
        assert (p.argmax(0).numpy() == ids).all()
        np.testing.assert_allclose(p.max(0).values, CONFIDENCE, atol=1e-5)
        assert count_labels([PredictionFolder(tmp_path, 3).find(stem)]) == L


def test_one_map_per_label_of_ints(tmp_path):
    ids = np.random.default_rng(0).integers(0, L, SIZE)
    for dtype in (np.uint8, np.int16):
        save(tmp_path / "a.nii", (ids[..., None] == np.arange(L)).astype(dtype))
        p = read(tmp_path, "a").exp()
        assert (p.max(0).values > 0.99).all()
        assert (p.argmax(0).numpy() == ids).all()


def test_probabilities_are_preferred_to_the_label_map_beside_them(tmp_path, truth):
    save(tmp_path / "a.nii.gz", truth.argmax(0).numpy().astype(np.uint8))
    np.savez_compressed(tmp_path / "a.npz", probabilities=truth.numpy())
    torch.testing.assert_close(read(tmp_path, "a").exp(), truth, atol=1e-5, rtol=0)


@pytest.mark.parametrize("ending", ["npy", "npz"])
def test_arrays_with_axes_from_last_to_first_are_turned(tmp_path, truth, ending):
    """nnU-Net's: (L, W, H, D). A volume as deep as wide does not tell, so the others of its folder do."""
    for stem, cut in (("a", SIZE), ("b", (6, 9, 6))):
        part = truth[:, : cut[0], : cut[1], : cut[2]].numpy()
        save(tmp_path / "images" / f"{stem}.nii.gz", np.zeros(cut, np.float32))
        (tmp_path / "predictions").mkdir(exist_ok=True)
        turned = part.transpose(0, 3, 2, 1)
        if ending == "npy":
            np.save(tmp_path / "predictions" / f"{stem}.npy", turned)
        else:
            np.savez_compressed(tmp_path / "predictions" / f"{stem}.npz", probabilities=turned, other=np.zeros(2))
    matched, notes = match_files(tmp_path / "predictions", tmp_path / "images")
    for files, cut in zip(matched, (SIZE, (6, 9, 6)), strict=True):
        log_p, _ = open_prediction(files.prediction, L)
        expected = truth[:, : cut[0], : cut[1], : cut[2]]
        torch.testing.assert_close(log_p.tensor().exp(), expected, atol=1e-5, rtol=0)
    assert any("were turned" in note for note in notes)
    np.save(tmp_path / "predictions" / "a.npy", truth.numpy())  # npy goes before npz: now one lies as it should
    matched, notes = match_files(tmp_path / "predictions", tmp_path / "images")
    assert not notes
    assert not any(files.prediction.reversed_axes for files in matched)


def test_pictures_and_volumes_are_told_apart(tmp_path):
    from PIL import Image

    save(tmp_path / "images" / "a.nii.gz", np.zeros(SIZE, np.float32))
    assert count_dims(tmp_path / "images") == 3
    assert default_settings(tmp_path / "images") == VOLUME_SETTINGS
    Image.new("L", (4, 4)).save(tmp_path / "images" / "b.png")
    with pytest.raises(ValueError, match=r"both volumes \(a\.nii\.gz\) and pictures \(b\.png\)"):
        count_dims(tmp_path / "images")
    (tmp_path / "images" / "a.nii.gz").unlink()
    assert count_dims(tmp_path / "images") == 2
    assert default_settings(tmp_path / "images") == FitSettings()


def test_bad_predictions_are_named(tmp_path):
    def says(array, text):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(DataError, match=text):
            read(tmp_path, "a")

    says(np.zeros(SIZE[1:], np.float32), r"save \(L, D, H, W\) or \(D, H, W, L\)")
    says(np.zeros(SIZE, np.float32), r"holds a single map; save two, 1 - p and p, as \(2, D, H, W\)")
    says(np.zeros((5, *SIZE), np.float32), r"save \(3, D, H, W\)")
    says(np.full(SIZE, 7), "the id 7")
    save(tmp_path / "b.nii", np.random.default_rng(0).random(SIZE).astype(np.float32))
    with pytest.raises(DataError, match=r"b\.nii holds a single map"):
        read(tmp_path, "b")
    assert PredictionFolder(tmp_path, 3).find("z") is None


# ---- fitting


def balls(root, count=6, noise=1.6, spacing=(1.0, 1.0, 1.0), size=(16, 18, 14)):
    """Volumes of two nested balls, brighter inside; predictions are the truth, blurred and noisy."""
    random = np.random.default_rng(0)
    noisy = torch.Generator().manual_seed(0)
    for number in range(count):
        centre = random.uniform(0.4, 0.6, 3) * size
        voxels = np.stack(np.meshgrid(*[np.arange(n) for n in size], indexing="ij"), -1)
        far = np.linalg.norm(voxels - centre, axis=-1) / random.uniform(0.9, 1.1)
        mask = np.where(far < 3, 2, np.where(far < 5.5, 1, 0)).astype(np.uint8)
        image = 400.0 * mask + 100 * random.standard_normal(size)
        truth = functional.one_hot(torch.from_numpy(mask).long(), 3).movedim(-1, 0)[None].float()
        logits = 4 * functional.avg_pool3d(truth, 3, 1, 1) + noise * torch.randn(truth.shape, generator=noisy)
        affine = np.diag([*spacing, 1.0])
        save(root / "images" / f"v{number}.nii.gz", image.astype(np.float32), affine)
        save(root / "masks" / f"v{number}.nii.gz", mask, affine)
        (root / "predictions").mkdir(exist_ok=True)
        np.savez_compressed(root / "predictions" / f"v{number}.npz", logits=logits[0].numpy())
    return root / "predictions", root / "images", root / "masks"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return balls(tmp_path_factory.mktemp("balls"))


@pytest.fixture(scope="module")
def report(folders):
    torch.manual_seed(0)
    return fit(*folders, QUICK)


def test_held_out_volumes_gain(report):
    assert report.stage != "nothing"
    before, after = mean_dice(report.dice["nothing"]), mean_dice(report.dice[report.stage])
    assert after > before + 0.05
    assert report.after.miou > report.before.miou
    assert report.before.images == 6
    assert report.verdict.startswith(f"The foreground's mean Dice goes from {100 * before:.2f} to {100 * after:.2f}")
    assert sorted(report.dice["nothing"]) == sorted(s for fold in report.folds for s in fold.held_out)
    mrf = report.mean_field
    assert (mrf.dims, mrf.triple_penalty.features, mrf.triple_penalty.spacing) == (3, 1, (1.0, 1.0, 1.0))


def test_saved_and_loaded(report, tmp_path):
    loaded, _ = read_mrf(report.save(tmp_path / "mrf"))
    log_p, image = torch.randn(1, 3, 8, 9, 7), torch.rand(1, 1, 8, 9, 7)
    assert torch.equal(loaded(log_p, image), report.mean_field(log_p, image))
    metrics = json.loads((tmp_path / "mrf" / "config.json").read_text())["metrics"]
    assert metrics["dice"]["nothing"]["mean"] == pytest.approx(mean_dice(report.dice["nothing"]))
    assert len(metrics["dice"]["nothing"]["per_volume"]) == 6


def test_the_reported_dice_is_that_of_the_predictions(report, folders):
    for stem, values in report.dice["nothing"].items():
        predicted = read(folders[0], stem).half().argmax(0).numpy()
        true = np.asarray(nibabel.load(folders[2] / f"{stem}.nii.gz").dataobj)
        for label, value in enumerate(values, start=1):
            a, b = predicted == label, true == label
            assert value == pytest.approx(2 * (a & b).sum() / (a.sum() + b.sum()))


def test_windows_cover_the_same_distance_along_every_axis():
    assert size_in_voxels(7, (1.0, 1.0, 1.0)) == 7
    assert size_in_voxels(7, (0.5, 0.5, 0.502)) == 7
    assert size_in_voxels(9, (1.0, 1.0, 2.0)) == [9, 9, 3]
    assert size_in_voxels(9, (3.0, 1.0, 1.7)) == [3, 9, 5]
    assert size_in_voxels(1, (3.0, 1.0, 1.0)) == [1, 1, 1]
    mrf = FitSettings(window=9, context_size=5).build(3, 2, (1.0, 0.5, 0.5))
    assert mrf.triple_penalty.window == (3, 9, 9)
    assert mrf.label_contexts.size == (3, 5, 5)
    assert mrf.triple_penalty.spacing == (1.0, 0.5, 0.5)
    assert FitSettings().build(3, 2).settings == FitSettings().build(3, 2).settings | {"dims": 2, "features": 3}


def test_each_volume_is_measured_with_its_own_spacing(folders, tmp_path):
    predictions, images, masks = balls(tmp_path, count=3)
    image = nibabel.load(images / "v1.nii.gz")
    save(images / "v1.nii.gz", np.asarray(image.dataobj), np.diag([1.0, 1.0, 2.5, 1.0]))
    examples = open_examples(match_files(predictions, images, masks)[0], masks)
    notes = examples.read_all()
    assert any("spacings differ, 1 x 1 x 1 to 1 x 1 x 2.5" in note for note in notes)
    assert examples.spacing == (1.0, 1.0, 1.0)  # the median
    settings = replace(QUICK, kernel="gaussian")
    mrf = settings.build(3, 0, examples.spacing)
    torch.nn.init.constant_(mrf.triple_penalty.scale, -1.0)
    own = settings.build(3, 0, (1.0, 1.0, 2.5))
    own.triple_penalty.window = mrf.triple_penalty.window
    own.load_state_dict(mrf.state_dict())
    pair = [examples[0], examples[1]]
    log_p, image = torch.stack([s.log_p.float() for s in pair]), torch.stack([s.image for s in pair])
    log_q = run_batch(mrf, log_p, image, [s.spacing for s in pair])
    torch.testing.assert_close(log_q[:1], mrf(log_p[:1], image[:1]))
    torch.testing.assert_close(log_q[1:], MeanField.forward(own, log_p[1:], image[1:]))
    assert not torch.equal(log_q[1:], mrf(log_p[1:], image[1:]))
    assert (refine_image(mrf, pair[1].log_p, pair[1].image, pair[1].spacing)[0] == log_q[1].argmax(0)).all()


def test_crops_are_never_mirrored_and_often_hold_foreground(folders):
    examples = open_examples(match_files(*folders)[0], folders[2])
    example, random = examples[0], np.random.default_rng(0)
    volume, with_foreground = example.image[0], 0
    for _ in range(40):
        _, image, mask = crop(example, (4, 5, 20), random)
        assert mask.shape == (4, 5, 20)
        assert (mask[..., 14:] == 255).all()  # beyond the volume
        inside = image[0, ..., :14]
        parts = volume.unfold(0, 4, 1).unfold(1, 5, 1).unfold(2, 14, 1)  # (.., .., 1, 4, 5, 14)
        assert (parts == inside).flatten(3).all(-1).any()
        with_foreground += bool(((mask > 0) & (mask != 255)).any())
    assert with_foreground >= 20
    assert examples.crop_size(16) == (16, 16, 14)


def test_masks_that_lie_otherwise_are_noted(tmp_path):
    predictions, images, masks = balls(tmp_path, count=2)
    mask = nibabel.load(masks / "v1.nii.gz")
    save(masks / "v1.nii.gz", np.asarray(mask.dataobj), np.diag([-1.0, 1.0, 1.0, 1.0]))
    notes = open_examples(match_files(predictions, images, masks)[0], masks).read_all()
    assert [note for note in notes if "other directions" in note and "v1" in note]


def test_bad_volumes_are_named(tmp_path):
    predictions, images, masks = balls(tmp_path, count=2)
    save(masks / "v1.nii.gz", np.zeros((4, 4, 4), np.uint8))
    with pytest.raises(DataError, match=r"4 x 4 x 4 voxels but its volume 16 x 18 x 14"):
        fit(predictions, images, masks, QUICK)
    save(masks / "v1.nii.gz", np.full((16, 18, 14), 9, np.uint8))
    with pytest.raises(DataError, match="the id 9"):
        fit(predictions, images, masks, QUICK)
    np.save(predictions / "v0.npy", np.zeros((3, 4, 4, 5), np.float32))
    with pytest.raises(DataError, match=r"4 x 4 x 5 voxels but its image .* is 16 x 18 x 14"):
        fit(predictions, images, masks, QUICK)


# ---- refining

LABELS = LabelSet(("rest", "outer", "inner"), distinct_colours(3))


def trained(**options):
    mrf = MeanField(3, dims=3, features=1, window=3, contexts=2, context_size=3, **options)
    torch.nn.init.normal_(mrf.label_contexts.weight, std=0.5)
    return mrf.requires_grad_(False)


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_refined_volumes_lie_where_the_images_lie(folders, tmp_path, kind):
    predictions, images, _ = folders
    mrf, out = trained(), tmp_path / "out"
    result = refine(mrf, LABELS, predictions, images, out, probabilities=kind)
    assert result.done == tuple(f"v{n}" for n in range(6))
    assert result.kinds == ("logits",)
    log_p = read(predictions, "v2")
    volume = read_volume(images / "v2.nii.gz")
    image = torch.from_numpy(unit_range(volume.values))[None, None]
    expected = mrf(log_p[None], image)[0].exp()
    written = nibabel.load(out / "v2.nii.gz")
    np.testing.assert_allclose(written.affine, volume.affine)
    assert (np.asarray(written.dataobj) == expected.argmax(0).numpy()).all()
    torch.testing.assert_close(read(out, "v2").exp(), expected, atol=1e-3, rtol=0)
    assert not list(out.glob(".*"))
    (out / "v3.nii.gz").unlink()
    again = refine(mrf, LABELS, predictions, images, out, probabilities=kind)
    assert (again.done, len(again.skipped)) == (("v3",), 5)


def test_refined_volumes_have_the_ids_of_the_masks(folders, tmp_path):
    mrf, label_ids = trained(), LabelIds((5, 0, 9))
    refine(mrf, LABELS, *folders[:2], tmp_path / "plain")
    refine(mrf, LABELS, *folders[:2], tmp_path / "coded", label_ids=label_ids)
    for path in (tmp_path / "plain").iterdir():
        plain, coded = (np.asarray(nibabel.load(p).dataobj) for p in (path, tmp_path / "coded" / path.name))
        assert (coded == np.array(label_ids.ids)[plain]).all()
        assert len(np.unique(plain)) > 1


def test_large_volumes_are_refined_in_tiles(folders, tmp_path, monkeypatch):
    predictions, images, _ = folders
    mrf = trained()
    refine(mrf, LABELS, predictions, images, tmp_path / "at once", probabilities="npy")
    monkeypatch.setattr("deepmrf.predict.tiles.tile_size", lambda *_: (5, 7, 6))
    refine(mrf, LABELS, predictions, images, tmp_path / "tiles", probabilities="npy")
    for stem in ("v0", "v5"):
        at_once, tiled = (np.load(tmp_path / kind / f"{stem}.npy") for kind in ("at once", "tiles"))
        np.testing.assert_allclose(at_once, tiled, atol=1e-3)
        at_once, tiled = (nibabel.load(tmp_path / kind / f"{stem}.nii.gz").get_fdata() for kind in ("at once", "tiles"))
        assert (at_once == tiled).mean() > 0.9999


def test_a_bad_volume_does_not_stop_the_rest(tmp_path):
    predictions, images, _ = balls(tmp_path, count=4)
    (images / "v0.nii.gz").write_bytes(b"broken")
    np.save(predictions / "v2.npy", np.zeros((3, 4, 4, 5), np.float32))
    result = refine(trained(), LABELS, predictions, images, tmp_path / "out")
    assert result.done == ("v1", "v3")
    assert [stem for stem, _ in result.failed] == ["v0", "v2"]
    assert "cannot be read as a NIfTI volume" in result.failed[0][1]
    assert "4 x 4 x 5 voxels but its image" in result.failed[1][1]


def test_an_mrf_for_pictures_is_not_for_volumes(folders, tmp_path):
    with pytest.raises(ValueError, match=r"The MRF is for pictures, but .* holds volumes"):
        refine(MeanField(3, window=3, contexts=0), LABELS, *folders[:2], tmp_path / "out")


def test_the_preset_is_for_volumes_too(folders, tmp_path):
    predictions, images, masks = folders
    mrf, labels, _ = open_preset("dense-crf", predictions, images)
    assert (mrf.dims, len(labels)) == (3, 3)
    refine(mrf, labels, predictions, images, tmp_path / "out")

    def right(labels):
        true = nibabel.load(masks / "v0.nii.gz").get_fdata()
        return float((labels == true).mean())

    before = read(predictions, "v0").argmax(0).numpy()
    assert right(nibabel.load(tmp_path / "out" / "v0.nii.gz").get_fdata()) > right(before)


# ---- the command


def test_fit_and_refine_as_typed(folders, tmp_path, type_in):
    predictions, images, masks = folders
    common = ("--predictions", predictions, "--images", images)
    quick = ("--folds", 2, "--window", 3, "--contexts", 1, "--crop", 16, "--penalty-steps", 8, "--contexts-steps", 4)
    code, text = type_in("fit", *common, "--masks", masks, "-o", tmp_path / "mrf", *quick)
    assert code == 0, text
    for words in ("Dice, held-out volumes", "mean Dice", "mIoU", "mean Dice of fold 2", "label 2", "6 volumes"):
        assert words in text
    assert "label 0" not in text
    code, text = type_in("refine", tmp_path / "mrf", *common, "-o", tmp_path / "out", "--probabilities", "npz")
    assert code == 0, text
    assert "6 refined" in text
    assert len(list((tmp_path / "out").glob("*.nii.gz"))) == len(list((tmp_path / "out").glob("*.npz"))) == 6
    mrf, labels, _ = open_mrf(tmp_path / "mrf")
    assert (mrf.dims, len(labels)) == (3, 3)


def test_the_helps_defaults_are_the_settings(type_in):
    for defaults, settings in ((command.IMAGE_DEFAULTS, FitSettings()), (command.VOLUME_DEFAULTS, VOLUME_SETTINGS)):
        windows = {"window": settings.window or f"{WINDOWS['gaussian']}, distance kernel {WINDOWS['distance']}"}
        assert defaults == {name: getattr(settings, name) for name in defaults} | windows
    changed = {name for name in vars(VOLUME_SETTINGS) if getattr(VOLUME_SETTINGS, name) != getattr(FitSettings(), name)}
    assert changed - {"penalty_rate", "contexts_rate", "label_scaling"} <= set(command.VOLUME_DEFAULTS)
    text = type_in("fit", "--help")[1]
    assert f"{FitSettings().context_size}; of volumes {VOLUME_SETTINGS.context_size}" in text
    assert "NIfTI" in text


def test_without_nibabel_there_is_one_sentence(folders, tmp_path, monkeypatch, type_in):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    predictions, images, masks = folders
    common = ("--predictions", predictions, "--images", images, "-o", tmp_path / "out")
    for words in (("fit", *common, "--masks", masks), ("refine", "--preset", "dense-crf", *common)):
        code, text = type_in(*words)
        assert code == 2
        assert "pip install 'deepmrf[volumes]'" in text
        assert len(text.strip().splitlines()) == 1


def test_perfect_volumes_are_left_alone(tmp_path):
    folders = balls(tmp_path, count=2, noise=0.0)
    for path in folders[2].iterdir():
        ids = np.asarray(nibabel.load(path).dataobj)
        one_hot = functional.one_hot(torch.from_numpy(ids.copy()).long(), 3).movedim(-1, 0).float()
        np.savez_compressed(folders[0] / f"{path.name.split('.')[0]}.npz", logits=3 * one_hot.numpy())
    report = fit(*folders, replace(QUICK, contexts=0, penalty_steps=3))
    assert report.stage == "nothing"
    assert report.verdict.startswith("No gain: the foreground's mean Dice is 100.00")
    assert not math.isnan(mean_dice(report.dice["triple penalty"]))
