"""Sessions: the network runs once, the MRF as often as it is moved, and downloads are what was shown."""

from __future__ import annotations

import base64
import io
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

import deepmrf
from deepmrf.cli.page import sessions as module
from deepmrf.cli.page.downloads import download
from deepmrf.cli.page.sessions import OWN, Sessions
from deepmrf.cli.page.uploads import Limits
from deepmrf.cli.page.views import compare
from tests.cli.page.test_uploads import upload, write_clip

pytestmark = pytest.mark.usefixtures("plain_torch", "untaught")


@pytest.fixture
def sessions(tmp_path):
    (tmp_path / "files").mkdir()
    return Sessions(["animals"], tmp_path / "files", device="cpu")


def draw(seed=0, size=(40, 60)):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def decode(url):
    return np.array(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))


def test_a_view_is_what_the_segmenter_finds(sessions, tmp_path):
    session = sessions[sessions.segment(upload(tmp_path / "files", "a.png", draw()), "animals")]
    view = session.view(OWN, {})
    expected = deepmrf.load("animals", device="cpu")(draw())
    maps = decode(view["result"])
    np.testing.assert_array_equal(maps[..., 0], expected.labels)
    np.testing.assert_allclose(maps[..., 1] / 255, expected.confidence, atol=0.003)
    assert decode(view["picture"]).shape == (40, 60, 3)
    segmenter = sessions.segmenter("animals")
    image = torch.from_numpy(draw()).permute(2, 0, 1)[None]
    alone = segmenter.model.log_unary(image)[0].argmax(0).numpy()
    np.testing.assert_array_equal(decode(view["network"])[..., 0], alone)
    assert view["changed"] == pytest.approx((alone != expected.labels).mean())
    assert view["names"] == list(expected.names)
    assert view["colours"][0] is None


def test_moving_the_mrf_runs_no_network(sessions, tmp_path, monkeypatch):
    session = sessions[sessions.segment(upload(tmp_path / "files", "a.png", draw()), "animals")]
    first = session.view(OWN, {})
    monkeypatch.setattr(session, "run_network", None)
    assert session.view(OWN, {"strength": 3, "window": 9})["result"] != first["result"]
    assert session.view("dense CRF: voc", {})["result"] != first["result"]
    assert session.view(OWN, {})["result"] == first["result"]
    assert session.view(OWN, {"strength": 0})["changed"] < 1e-3
    with pytest.raises(ValueError, match="There is no MRF 'mine' here: choose one of the model's own, dense CRF: voc"):
        session.view("mine", {})


def test_downloads_are_what_was_shown(sessions, tmp_path):
    session = sessions[sessions.segment(upload(tmp_path / "files", "a.png", draw()), "animals")]
    view = session.view(OWN, {"strength": 2})
    with Image.open(io.BytesIO(download(session, "labels.png"))) as picture:
        assert picture.mode == "P"
        np.testing.assert_array_equal(np.array(picture), decode(view["result"])[..., 0])
    with np.load(io.BytesIO(download(session, "probabilities.npz"))) as archive:
        p = archive["probabilities"]
    assert p.shape == (7, 40, 60)
    assert (p.argmax(0) == decode(view["result"])[..., 0]).mean() > 0.99  # half precision
    assert Image.open(io.BytesIO(download(session, "overlay.jpg"))).width >= 60
    with pytest.raises(ValueError, match=r"There is no file '../x' to download: choose one of labels.png"):
        download(session, "../x")
    assert not list((tmp_path / "files").iterdir())


def test_large_pictures_are_shown_smaller_and_downloaded_as_they_are(sessions, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_VIEW_SIDE", 48)
    monkeypatch.setattr(module, "MAX_NETWORK_SIDE", 64)
    session = sessions[sessions.segment(upload(tmp_path / "files", "a.png", draw(0, (80, 160))), "animals")]
    assert decode(session.view(OWN, {})["result"]).shape == (24, 48, 3)
    assert next(iter(session.outputs.values())).log_p.shape == (1, 7, 32, 64)
    assert Image.open(io.BytesIO(download(session, "labels.png"))).size == (160, 80)
    monkeypatch.setattr(module, "MAX_PROBABILITIES", 1000)
    with pytest.raises(ValueError, match="The probabilities of 160 x 80 pixels are too many"):
        download(session, "probabilities.npz")


def test_a_clip(sessions, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_CACHED_FRAMES", 2)
    path = write_clip(tmp_path / "files" / "drive.mp4", 5)
    session = sessions[sessions.segment(path, "animals")]
    assert len({session.view(OWN, {}, frame)["picture"] for frame in (0, 1, 4, 9, -1)}) == 3  # 9 is the last, -1 is 0
    assert len(session.outputs) == 2
    (tmp_path / "out.mp4").write_bytes(download(session, "overlay.mp4"))
    source = deepmrf.video.open_source(tmp_path / "out.mp4")
    assert [float(frame.time) for frame in source.frames()] == pytest.approx([0, 0.04, 0.08, 0.12, 0.16])
    assert not list((tmp_path / "files").iterdir())


def test_a_binary_mask_is_refined_and_stays_one(sessions, tmp_path):
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[:, 30:] = 255
    mask = np.where(np.arange(60) < 27, 0, 255).astype(np.uint8)[None].repeat(40, 0)  # three columns too many
    files = tmp_path / "files"
    session = sessions[sessions.refine(upload(files, "a.png", pixels), upload(files, "m.png", mask))]
    view = session.view("dense CRF: voc", {})
    assert view["names"] == ["background", "foreground"]
    assert view["note"] == "m.png was taken for binary masks of 0 and 255."
    assert view["changes"] == [{"from": 1, "to": 0, "share": pytest.approx(3 / 60)}]
    np.testing.assert_array_equal(
        np.array(Image.open(io.BytesIO(download(session, "labels.png")))),
        np.where(np.arange(60) < 30, 0, 255) + 0 * mask,
    )
    assert not list(files.iterdir())


def test_sessions_do_not_know_each_other(sessions, tmp_path):
    names = [sessions.segment(upload(tmp_path / "files", "a.png", draw(seed)), "animals") for seed in (1, 2)]
    assert len(set(names)) == 2
    np.testing.assert_array_equal(sessions[names[0]].clip.frames[0], draw(1))
    np.testing.assert_array_equal(sessions[names[1]].clip.frames[0], draw(2))
    sessions.close(names[0])
    with pytest.raises(KeyError, match="This picture is no longer here: drop it again"):
        sessions[names[0]]


def test_memory_is_limited_and_the_oldest_session_goes(sessions, tmp_path):
    sessions.limits = Limits(session_bytes=2 * 40 * 60 * 3 + 100)
    names = [sessions.segment(upload(tmp_path / "files", "a.png", draw(seed)), "animals") for seed in range(2)]
    sessions[names[0]].clip  # noqa: B018
    names.append(sessions.segment(upload(tmp_path / "files", "a.png", draw(3)), "animals"))
    assert len(sessions) == 2
    assert sessions[names[0]]
    with pytest.raises(KeyError):
        sessions[names[1]]


def test_ten_at_once_get_their_own_results(sessions, tmp_path):
    def work(seed):
        session = sessions[sessions.segment(upload(tmp_path / "files", f"{seed}.png", draw(seed)), "animals")]
        return session.view(OWN, {"window": 3 + seed})["result"]

    with ThreadPoolExecutor(10) as pool:
        at_once = list(pool.map(work, range(10)))
    assert at_once == [work(seed) for seed in range(10)]


def test_unknown_models_are_refused(sessions, tmp_path):
    with pytest.raises(ValueError, match="There is no model '/etc' here: choose one of animals"):
        sessions.segment(upload(tmp_path / "files", "a.png", draw()), "/etc")
    assert not list((tmp_path / "files").iterdir())


def test_the_picture_that_comes_with_a_model(sessions, tmp_path, model_folder):
    with pytest.raises(ValueError, match="No picture comes with the model animals: choose one of your own"):
        sessions.segment_example("animals")
    folder = shutil.copytree(model_folder, tmp_path / "mine")
    Image.fromarray(draw()).save(folder / "example.jpg")
    sessions.models.append(str(folder))
    session = sessions[sessions.segment_example(str(folder))]
    assert session.clip.frames[0].shape == (40, 60, 3)
    assert (folder / "example.jpg").exists()


def test_what_the_mrf_has_learned(sessions, tmp_path):
    pytest.importorskip("matplotlib")
    name = sessions.segment(upload(tmp_path / "files", "my <cat>.png", draw()), "animals")
    page = sessions.explain("animals", name)
    assert "Label compatibility and contexts" in page
    assert "<h2>my &lt;cat&gt;</h2>" in page
    assert "Label compatibility and contexts" in sessions.explain("animals")
    assert ".svg" not in page
    assert not list((tmp_path / "files").iterdir())


def test_comparison_by_hand():
    before = np.array([[0, 0, 1, 1]], np.uint8), np.ones((1, 4), np.float16)
    after = np.array([[0, 2, 2, 1]], np.uint8), np.array([[0.5, 0.5, 1, 0.25]], np.float16)
    assert compare(3, before, after) == {
        "classes": [
            {"label": 2, "before": 0.0, "after": 0.5, "confidence": 0.75},
            {"label": 0, "before": 0.5, "after": 0.25, "confidence": 0.5},
            {"label": 1, "before": 0.5, "after": 0.25, "confidence": 0.25},
        ],
        "changes": [{"from": 0, "to": 2, "share": 0.25}, {"from": 1, "to": 2, "share": 0.25}],
        "changed": 0.5,
    }
