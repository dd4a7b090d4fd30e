"""Every way to save a prediction is read back as the same log-probabilities, and every bad one is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from deepmrf.data import DataError
from deepmrf.refine.decode import CONFIDENCE
from deepmrf.refine.label_ids import LabelIds
from deepmrf.refine.predictions import PredictionFolder, count_labels, open_prediction

L, H, W = 4, 9, 12


def read(folder, stem, labels=None, names=None, dims=2):
    """The log-probabilities of one prediction in a folder."""
    return open_prediction(PredictionFolder(folder, dims).find(stem), labels, names)[0].tensor()


@pytest.fixture
def truth():
    return (2 * torch.randn(L, H, W)).softmax(0)


def _close(folder, truth, tolerance, labels=L, names=None):
    log_p = read(folder, "a", labels, names)
    assert log_p.dtype == torch.float32
    torch.testing.assert_close(log_p.exp(), truth, atol=tolerance, rtol=0)
    torch.testing.assert_close(log_p.exp().sum(0), torch.ones(H, W))


@pytest.mark.parametrize("last", [False, True], ids=["LHW", "HWL"])
@pytest.mark.parametrize("known", [L, None])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("kind", ["probabilities", "log-probabilities", "logits"])
def test_arrays_are_told_apart(tmp_path, truth, kind, dtype, known, last):
    array = {"probabilities": truth, "log-probabilities": truth.log(), "logits": truth.log() + 3}[kind]
    array = array.numpy().astype(dtype)
    np.save(tmp_path / "a.npy", np.moveaxis(array, 0, 2) if last else array)
    _close(tmp_path, truth, 5e-3 if dtype == np.float16 else 1e-5, known)
    assert open_prediction(PredictionFolder(tmp_path).find("a"), known)[1] == kind


@pytest.mark.parametrize("shift", [0.0, 3.0], ids=["log-probabilities", "logits"])
def test_impossible_labels_are_read(tmp_path, truth, shift):
    """One impossible label is the least probable; where all are, they are equally probable."""
    array = truth.log().numpy() + shift
    array[0, 0, 0], array[:, 1, 1] = -np.inf, -np.inf
    np.save(tmp_path / "a.npy", array)
    p = open_prediction(PredictionFolder(tmp_path).find("a"), L)[0].tensor().exp()
    assert p[0, 0, 0] < 1e-5
    torch.testing.assert_close(p[:, 1, 1], torch.full((L,), 1 / L))
    torch.testing.assert_close(p.sum(0), torch.ones(H, W))


def test_npz_and_a_batch_axis(tmp_path, truth):
    np.savez_compressed(tmp_path / "a.npz", probabilities=truth[None].numpy(), other=np.zeros(3))
    _close(tmp_path, truth, 1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_whole_numbers_are_shares_of_their_largest(tmp_path, truth, dtype):
    most = np.iinfo(dtype).max
    np.save(tmp_path / "a.npy", (truth.numpy() * most).round().astype(dtype))
    _close(tmp_path, truth, 1.5 / most)


def test_independent_scores_are_divided_by_their_sum(tmp_path, truth):
    np.save(tmp_path / "a.npy", 0.5 * truth.numpy())
    _close(tmp_path, truth, 1e-5)
    assert "scores" in open_prediction(PredictionFolder(tmp_path).find("a"))[1]


@pytest.mark.parametrize("least", [-1e-6, -0.023])
def test_probabilities_may_overshoot_a_little(tmp_path, truth, least):
    array = truth.clone()
    array[:, 0, 0] = torch.tensor([1 - least, least, 0, 0])  # as bicubic interpolation leaves it
    np.save(tmp_path / "a.npy", array.numpy())
    assert open_prediction(PredictionFolder(tmp_path).find("a"), L)[1] == "probabilities"
    _close(tmp_path, array.clamp(0, 1), 1e-5)
    array[:, 0, 0] = torch.tensor([1.5, -0.5, 0, 0])
    np.save(tmp_path / "a.npy", array.numpy())
    assert open_prediction(PredictionFolder(tmp_path).find("a"), L)[1] == "logits"


@pytest.mark.parametrize(
    ("ending", "dtype"),
    [("npy", bool), ("npy", np.uint8), ("npy", np.int64), ("npz", np.uint16), ("png", np.uint8), ("png", np.uint16)],
)
def test_one_hot_is_certain(tmp_path, ending, dtype):
    ids = np.random.default_rng(0).integers(0, L, (H, W))
    one_hot = (ids == np.arange(L)[:, None, None]).astype(dtype)
    if ending == "npy":
        np.save(tmp_path / "a.npy", one_hot)
    elif ending == "npz":
        np.savez_compressed(tmp_path / "a.npz", one_hot)
    else:
        for label, values in enumerate(one_hot):
            Image.fromarray(values).save(tmp_path / f"a_{label}.png")
    _close(tmp_path, torch.from_numpy(one_hot.astype(np.float32)), 1e-5)


def test_impossible_stays_finite(tmp_path):
    certain = np.zeros((L, H, W), np.float32)
    certain[1] = 1
    np.save(tmp_path / "a.npy", certain)
    log_p = read(tmp_path, "a")
    assert log_p.isfinite().all()
    assert (log_p.argmax(0) == 1).all()
    with np.errstate(divide="ignore"):
        np.save(tmp_path / "a.npy", np.log(certain))
    assert read(tmp_path, "a").isfinite().all()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("layout", ["a/{}.png", "a_{}.png", "names"])
def test_one_picture_per_label(tmp_path, truth, layout, dtype):
    most = np.iinfo(dtype).max
    (tmp_path / "a").mkdir()
    names = ["sky", "road", "car", "tree"]
    for label, share in enumerate(truth.numpy()):
        name = f"a/{names[label]}.png" if layout == "names" else layout.format(label)
        Image.fromarray((share * most).round().astype(dtype)).save(tmp_path / name)
    if layout == "names":
        with pytest.raises(DataError, match=r"labels\.json"):
            read(tmp_path, "a", L)
    _close(tmp_path, truth, 2 / most, names=names)
    assert PredictionFolder(tmp_path).stems() == ["a"]
    assert count_labels([PredictionFolder(tmp_path).find("a")]) == L


def test_a_label_map_and_its_confidence(tmp_path):
    ids = np.random.default_rng(0).integers(0, L, (H, W)).astype(np.uint8)
    ids[0, 0] = 255
    picture = Image.fromarray(ids)
    picture.putpalette(list(range(256)) * 3)
    picture.save(tmp_path / "a.png")
    p = read(tmp_path, "a", L).exp()
    np.testing.assert_allclose(p[:, 0, 0], 1 / L, atol=1e-5)  # 255: unknown
    known = ids != 255
    assert (p.argmax(0).numpy() == ids)[known].all()
    np.testing.assert_allclose(p.max(0).values.numpy()[known], CONFIDENCE, atol=1e-5)
    np.testing.assert_allclose(p.min(0).values.numpy()[known], (1 - CONFIDENCE) / (L - 1), atol=1e-5)
    sure = np.linspace(0.3, 1, H * W).reshape(H, W)
    Image.fromarray((sure * 65535).astype(np.uint16)).save(tmp_path / "a_confidence.png")
    p = read(tmp_path, "a", L).exp()
    np.testing.assert_allclose(p.max(0).values.numpy()[known], sure[known], atol=1e-4)
    assert PredictionFolder(tmp_path).stems() == ["a"]
    np.save(tmp_path / "b.npy", ids.astype(np.int64))
    assert (read(tmp_path, "b", L).argmax(0).numpy() == ids)[known].all()
    assert count_labels([PredictionFolder(tmp_path).find("b")]) == L


def test_bad_files_are_named(tmp_path):
    def saved(array):
        np.save(tmp_path / "a.npy", array, allow_pickle=True)
        with pytest.raises(DataError) as error:
            read(tmp_path, "a", L)
        message = str(error.value)
        assert "a.npy" in message
        assert message.endswith(".")
        return message

    assert "(5, 9, 12)" in saved(np.zeros((5, H, W), np.float32))
    assert "shape" in saved(np.zeros(7, np.float32))
    assert "NaN" in saved(np.full((L, H, W), np.nan, np.float32))
    assert "Python objects" in saved(np.array([{"code": 1}], dtype=object))
    assert "id 9" in saved(np.full((H, W), 9))
    assert "complex64" in saved(np.zeros((L, H, W), np.complex64))
    (tmp_path / "a.npy").write_bytes(b"not an array")
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path, "a", L)
    (tmp_path / "b.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path, "b", L)
    (tmp_path / "c.npz").write_bytes(b"PK not an archive")
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path, "c", L)
    assert PredictionFolder(tmp_path).find("z") is None
    with pytest.raises(FileNotFoundError, match="does not exist"):
        PredictionFolder(tmp_path / "nowhere")
    Image.fromarray(np.zeros((H, W), np.uint8)).save(tmp_path / "d_0.png")
    Image.fromarray(np.zeros((H, W), np.uint8)).save(tmp_path / "d_1.png")
    with pytest.raises(DataError, match="2 pictures for 4 labels"):
        read(tmp_path, "d", L)


def test_a_corrupt_archive_is_named_whatever_it_raises(tmp_path, truth):
    np.savez_compressed(tmp_path / "a.npz", truth.numpy())
    content, messages = (tmp_path / "a.npz").read_bytes(), []
    for position in range(30, len(content), 37):
        (tmp_path / "a.npz").write_bytes(
            content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]
        )
        try:
            read(tmp_path, "a", L)
        except DataError as error:
            messages.append(str(error))
    assert messages
    assert all("a.npz" in message for message in messages)
    np.save(tmp_path / "b.npy", np.zeros((L, H, W), np.float32))
    broken = (tmp_path / "b.npy").read_bytes().replace(b"}", b"(")
    (tmp_path / "b.npy").write_bytes(broken)
    with pytest.raises(DataError, match="cannot be read as an array"):
        read(tmp_path, "b", L)
    np.save(tmp_path / "c.npy", np.zeros((L, H, W), np.float32))
    index = PredictionFolder(tmp_path)
    assert count_labels([index.find("b"), index.find("c")]) == L
    with pytest.raises(DataError, match=r"b\.npy cannot be read"):
        count_labels([index.find("b")])


def test_ids_may_be_those_of_the_masks(tmp_path):
    labels = np.random.default_rng(0).integers(0, L, (H, W))
    label_ids = LabelIds((7, 0, 255, 2), (9,))
    ids = np.array(label_ids.ids)[labels]
    ids[0, 0] = 9
    Image.fromarray(ids.astype(np.uint8)).save(tmp_path / "a.png")
    np.save(tmp_path / "b.npy", ids)
    for stem in "ab":
        log_p, kind = open_prediction(PredictionFolder(tmp_path).find(stem), L, label_ids=label_ids)
        assert kind == "label ids, those of the masks"
        np.testing.assert_allclose(log_p.tensor()[:, 0, 0].exp(), 1 / L, atol=1e-5)  # void
        assert (log_p.tensor().argmax(0).numpy() == labels).ravel()[1:].all()
    for label, given in enumerate(label_ids.ids):
        Image.fromarray(np.where(labels == label, 255, 0).astype(np.uint8)).save(tmp_path / f"c_{given}.png")
    log_p, _ = open_prediction(PredictionFolder(tmp_path).find("c"), L, label_ids=label_ids)
    assert (log_p.tensor().argmax(0).numpy() == labels).all()
    for odd in (-1, 3, 300):
        np.save(tmp_path / "b.npy", np.where(labels == 0, odd, ids))
        with pytest.raises(DataError, match=f"holds the id {odd}, but the masks' ids in labels.json are 7, 0, 255, 2"):
            open_prediction(PredictionFolder(tmp_path).find("b"), L, label_ids=label_ids)
