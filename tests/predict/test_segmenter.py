"""Models by name, and images of every kind."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
import urllib.request

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import deepmrf
from deepmrf.data.files import DataError
from deepmrf.data.images import as_image
from deepmrf.models import names as models
from deepmrf.models.parsing_network import read_model, write_model
from deepmrf.predict import segmenter as segment
from deepmrf.predict.segmenter import Segmenter, load

pytestmark = pytest.mark.usefixtures("plain_torch")


@pytest.fixture
def image():
    """Smooth colours, so that the labels have some shape."""
    rows, columns = np.mgrid[0:45, 0:70]
    return np.stack([rows * 5, columns * 3, (rows + columns) * 2], -1).astype(np.uint8)


@pytest.fixture
def copied(model_folder, tmp_path):
    """copied(config=function): the model in a new folder, its config changed."""

    def copy(change=None):
        folder = tmp_path / "copy"
        folder.mkdir(exist_ok=True)
        config = json.loads((model_folder / "config.json").read_text())
        if change is not None:
            change(config)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes((model_folder / "model.safetensors").read_bytes())
        return folder

    return copy


def test_one_model_is_enough(model_folder, image):
    model = read_model(model_folder)
    segmenter = Segmenter(model)
    np.testing.assert_array_equal(segmenter(image).labels, Segmenter([model])(image).labels)
    assert repr(segmenter) == (
        "Segmenter(fast + distance mean field; 7 labels: background, cat, dog, horse, cow, sheep, person; on cpu)"
    )
    text = repr(Segmenter([model, model], size=320, flip=True, scales=(0.75, 1.0)))
    assert text.count("fast + distance mean field") == 2
    assert text.endswith("size=320; scales=(0.75, 1.0); flip)")
    for nothing in ([], torch.nn.Conv2d(3, 3, 1), "animals"):
        with pytest.raises(TypeError, match=r"pass a DeepParsingNetwork\("):
            Segmenter(nothing)


def test_load_and_segment(model_folder, image):
    segmenter = deepmrf.load(model_folder)
    result = segmenter(image)
    expected = read_model(model_folder)(torch.from_numpy(image).permute(2, 0, 1)[None]).exp()[0].detach().numpy()
    assert result.labels.shape == (45, 70)
    assert len(set(result.labels.ravel().tolist())) > 1
    np.testing.assert_array_equal(result.labels, expected.argmax(0))
    np.testing.assert_allclose(result.probabilities, expected, atol=1e-6)
    np.testing.assert_allclose(result.confidence, expected.max(0), atol=1e-3)
    np.testing.assert_array_equal(result.image, image)
    assert isinstance(result, deepmrf.Segmentation)
    assert segmenter.labels == segmenter.model.labels
    assert len(segmenter.models) == 1


def test_every_kind_of_image_is_the_same_image(model_folder, image, tmp_path):
    segmenter = load(model_folder, device="cpu")
    Image.fromarray(image).save(tmp_path / "a.png")
    kinds = {
        "path": tmp_path / "a.png",
        "text": str(tmp_path / "a.png"),
        "pil": Image.fromarray(image),
        "array": image,
        "float array": image / 255,
        "float32": (image / 255).astype(np.float32),
        "16 bits": image.astype(np.uint16) * 257,
        "alpha": np.dstack([image, np.full(image.shape[:2], 255, np.uint8)]),
        "tensor": torch.from_numpy(image).permute(2, 0, 1),
        "float tensor": torch.from_numpy(image).permute(2, 0, 1) / 255,
        "batch of one": torch.from_numpy(image).permute(2, 0, 1)[None],
    }
    expected = segmenter(image).labels
    for kind, given in kinds.items():
        np.testing.assert_array_equal(segmenter(given).labels, expected, err_msg=kind)


def test_grey_and_see_through():
    grey = np.array([[0, 128], [255, 7]], np.uint8)
    for given in (grey, grey[..., None], torch.from_numpy(grey), torch.from_numpy(grey)[None], Image.fromarray(grey)):
        np.testing.assert_array_equal(as_image(given), np.repeat(grey[..., None], 3, 2))
    np.testing.assert_array_equal(as_image(grey > 100)[..., 0], [[0, 255], [255, 0]])
    clear = np.dstack([np.zeros((2, 2, 3), np.uint8), np.array([[0, 255], [51, 255]], np.uint8)])
    np.testing.assert_array_equal(as_image(clear)[..., 0], [[255, 0], [204, 0]])
    np.testing.assert_array_equal(as_image(clear), as_image(Image.fromarray(clear)))
    assert as_image(torch.ones(3, 2, 2, dtype=torch.bfloat16)).min() == 255


@pytest.mark.parametrize(
    "wrong, error, says",
    [
        (np.zeros((3, 4, 5), np.uint8), ValueError, r"shape \(3, 4, 5\).*transpose\(1, 2, 0\)"),
        (np.zeros((4,), np.uint8), ValueError, r"pass \(H, W\)"),
        (np.zeros((0, 4, 3), np.uint8), ValueError, r"pass \(H, W\)"),
        (np.full((4, 4), 2.0), ValueError, "floats from 2 to 2"),
        (np.full((4, 4), np.nan), ValueError, "floats from nan"),
        (np.zeros((4, 4), np.int64), TypeError, "holds int64"),
        (torch.zeros(7, 5, 3), ValueError, r"permute\(2, 0, 1\)"),
        (torch.zeros(2, 3, 4, 5), ValueError, "one by one"),
        ([1, 2], TypeError, "not a list"),
    ],
)
def test_what_is_no_image_is_told_why(wrong, error, says):
    with pytest.raises(error, match=says):
        as_image(wrong)


def test_several_models_are_averaged(model_folder, copied, image, tmp_path):
    other = read_model(model_folder)
    with torch.no_grad():
        other.unary.classify[1].weight.neg_()
    write_model(other, tmp_path / "other")
    single = [load(folder)(image).probabilities for folder in (model_folder, tmp_path / "other")]
    average = load(model_folder, tmp_path / "other")(image).probabilities
    np.testing.assert_allclose(average, (single[0] + single[1]) / 2, atol=1e-6)
    with pytest.raises(ValueError, match=r"label 1 is .lynx., not .cat.*only models of equal labels"):
        load(model_folder, copied(lambda config: config["labels"]["names"].__setitem__(1, "lynx")))


def test_scales_and_flip_change_and_tile_does_what_it_says(model_folder, image):
    plain = load(model_folder)(image).probabilities
    assert np.abs(load(model_folder, scales=[0.5, 1])(image).probabilities - plain).max() > 1e-3
    flipped = load(model_folder, flip=True)
    np.testing.assert_allclose(
        flipped(image[:, ::-1]).probabilities, flipped(image).probabilities[..., ::-1], atol=1e-5
    )
    large = np.tile(image, (4, 3, 1))
    tiled = load(model_folder, tile=64)(large)
    assert tiled.probabilities is None
    assert load(model_folder, tile=64)(large, probabilities=True).probabilities.shape == (7, 180, 210)
    untiled = load(model_folder)(large)
    assert (tiled.labels == untiled.labels).mean() > 0.9  # the network sees farther than a margin


def test_large_images_are_tiled_by_themselves(model_folder, image, monkeypatch):
    large = np.tile(image, (4, 3, 1))
    monkeypatch.setitem(segment.MAX_PIXELS_AT_ONCE, "cpu", 20_000)
    monkeypatch.setitem(segment.TILE_SIDE, "cpu", 70)
    result = load(model_folder)(large)
    assert result.probabilities is None
    np.testing.assert_array_equal(result.labels, load(model_folder, tile=70)(large).labels)


def test_crops_of_an_mrf_alone_do_not_shrink_images(copied):
    """They say nothing about the network, which another recipe has trained."""
    recipe = {"augment": {"crop": [20, 20]}, "network": {"augment": {"crop": [80, 160]}}}
    assert load(copied(lambda config: config.__setitem__("recipe", recipe))).size == 200
    assert load("camvid").size == 600


def test_crops_beyond_any_image_say_nothing(copied):
    recipe = {"augment": {"crop": [10**400, 20]}}
    assert load(copied(lambda config: config.__setitem__("recipe", recipe))).size is None


def test_images_larger_than_in_training_are_shrunk(model_folder, copied, image):
    trained = copied(lambda config: config.__setitem__("recipe", {"augment": {"crop": [20, 56]}}))
    large = np.array(Image.fromarray(image).resize((280, 180)))
    segmenter = load(trained)
    assert segmenter.size == 70
    result = segmenter(large)
    assert result.labels.shape == (180, 280)
    assert result.probabilities is None
    small = load(model_folder)(np.array(Image.fromarray(large).resize((70, 45), Image.Resampling.BILINEAR)))
    enlarged = torch.nn.functional.interpolate(torch.from_numpy(small.probabilities)[None], (180, 280), mode="bilinear")
    np.testing.assert_array_equal(result.labels, enlarged[0].argmax(0).numpy())
    np.testing.assert_allclose(segmenter(large, probabilities=True).probabilities, enlarged[0].numpy(), atol=1e-6)
    np.testing.assert_array_equal(load(trained, size=0)(large).labels, load(model_folder)(large).labels)
    assert load(trained, tile=64).size is None
    assert load(model_folder).size is None


def test_a_batch_is_its_images(model_folder, image):
    segmenter = load(model_folder)
    together = segmenter.batch([image, image[::-1].copy()])
    for result, single in zip(together, (image, image[::-1].copy()), strict=True):
        np.testing.assert_allclose(result.probabilities, segmenter(single).probabilities, atol=1e-5)
    with pytest.raises(ValueError, match="give equal ones"):
        segmenter.batch([image, image[:-1]])


def test_too_many_probabilities_are_refused(model_folder, image, monkeypatch):
    monkeypatch.setattr(segment, "MAX_PROBABILITIES", 1000)
    with pytest.raises(ValueError, match=r"70 x 45 pixels and 7 labels would take 0\.0 GiB: leave them out"):
        load(model_folder)(image, probabilities=True)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"device": "tpu"}, "device='tpu' is unknown"),
        ({"device": "cuda"}, "finds no GPU"),
        ({"tile": 3}, "tile=3 must be a whole number of pixels, at least 64"),
        ({"size": 1.5}, "size=1.5 must be"),
        ({"max_pixels": 0}, "max_pixels=0"),
        ({"scales": (0.0,)}, "must be factors"),
    ],
)
def test_bad_settings_get_a_sentence(model_folder, options, says):
    with pytest.raises(ValueError, match=says):
        load(model_folder, **options)


def test_the_limit_on_pixels(model_folder, image, tmp_path):
    Image.fromarray(image).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a\.png has 70 x 45 pixels, more than 0\.003 million, and was not read"):
        load(model_folder, max_pixels=3000)(tmp_path / "a.png")


def test_identity_tells_models_and_settings_apart(model_folder, tmp_path):
    assert load(model_folder).identity == load(model_folder).identity
    other = read_model(model_folder)
    with torch.no_grad():
        other.unary.classify[1].bias[0] += 1
    names = {load(model_folder, flip=flip, tile=tile).identity for flip in (False, True) for tile in (None, 64)}
    assert len(names | {Segmenter([other]).identity}) == 5


# ---- models by name


def test_bundled_models_come_by_name(model_folder, monkeypatch):
    monkeypatch.setattr(models, "PRETRAINED", model_folder.parent)
    assert models.bundled() == ["tiny"]
    assert load("tiny").labels.names[1] == "cat"
    with pytest.raises(
        ValueError, match=r"There is no model 'tinny' \(did you mean tiny\?\): give a bundled one \(tiny\)"
    ):
        load("tinny")


def test_a_run_folder_and_a_file_of_the_model_will_do(model_folder, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(model_folder)
    assert load(tmp_path / "run").labels == load(model_folder / "config.json").labels


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.bin", "a.ckpt", "A.PKL"])
def test_files_that_can_run_code_are_refused_unread(tmp_path, name):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(ValueError, match="can run code when they are read; save the model with save_pretrained"):
        load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=rf"holds no config.json \({name} is not read"):
        load(tmp_path)


def test_other_files_and_folders(model_folder, copied, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"notes\.txt is a file: give the folder"):
        load(tmp_path / "notes.txt")
    folder = copied()
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no model\.safetensors"):
        load(folder)


CHANGES = {
    "wide": (
        lambda c: c["unary"]["options"].update(width=10**9),
        "width=1000000000 must be a whole .* to 1024",
    ),
    "window": (lambda c: c["mean_field"].update(window=10**7), "window=10000000 must be"),
    "endless": (lambda c: c["mean_field"].update(iterations=10**9), "iterations=1000000000 must be"),
    "patterns": (lambda c: c["mean_field"].update(contexts=255, context_size=255), "size mismatch for mean_field"),
    "words": (lambda c: c["mean_field"].update(window="big"), "window='big' must be"),
    "true": (lambda c: c["mean_field"].update(contexts=True), "contexts=True must be"),
    "volumes": (lambda c: c["mean_field"].update(dims=3), "not made for images"),
    "other width": (lambda c: c["unary"]["options"].update(width=24), "size mismatch for unary"),
    "unknown key": (lambda c: c["mean_field"].update(colour="red"), "no setting 'colour'"),
    "unknown option": (lambda c: c["unary"]["options"].update(depth=3), "no setting 'depth': there are labels, width"),
    "network": (lambda c: c["unary"].update(network="os.system"), "no unary network 'os.system'"),
    "no labels": (lambda c: c["labels"].update(names=[]), "0 names"),
    "missing": (lambda c: c.pop("mean_field"), "has no 'mean_field'"),
    "list": (lambda c: c.update(mean_field=[1]), "describes no mean field"),
    "format": (lambda c: c.update(format=99), "has format 99.*upgrade"),
    "own network": (lambda c: c["unary"].update(network=None), "pass that network again"),
}


@pytest.mark.parametrize("change, says", CHANGES.values(), ids=CHANGES)
def test_a_strange_config_gets_one_sentence(copied, change, says):
    folder = copied(change)
    with pytest.raises(ValueError, match=says) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"unary": 3}', b"null"])
def test_a_config_that_is_none(copied, content):
    folder = copied()
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"The model in .* cannot be used \(config\.json"):
        load(folder)


def test_damaged_weights(copied):
    folder = copied()
    weights = folder / "model.safetensors"
    intact = weights.read_bytes()
    for content in (
        b"",
        intact[:5],
        intact[:1000],
        intact[: len(intact) // 2],
        b"\xff" * 100,
        b"PK\x03\x04" + b"0" * 100,
    ):
        weights.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be used") as caught:
            load(folder)
        assert "\n" not in str(caught.value)
    weights.write_bytes(intact)
    tensors = load_file(weights)
    name = "unary.classify.1.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, weights)
    with pytest.raises(ValueError, match=f"lacks .{name}"):
        load(folder)


def test_the_hub_is_asked_last(monkeypatch, model_folder):
    import huggingface_hub

    def download(name, file, local_files_only=False):
        if name != "someone/model":
            raise OSError("404 not found\nand more")
        return str(model_folder / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load("someone/model").labels.names[1] == "cat"
    with pytest.raises(
        ValueError, match=r"no folder runs/fast here, and the hub did not .* \(404 not found\)"
    ) as caught:
        load("runs/fast")
    assert "\n" not in str(caught.value)


def test_without_a_network_the_hub_is_not_waited_for(monkeypatch, tmp_path):
    def no_address(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"no folder runs/fast here, and .* \(it cannot be reached\)"):
        load("runs/fast")


def test_loading_brings_no_heavy_company(model_folder):
    code = (
        f"import sys, deepmrf; deepmrf.load({str(model_folder)!r}); "
        "print(*{'torchmetrics', 'accelerate', 'cv2', 'matplotlib', 'transformers', 'torch._dynamo'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()


def test_devices_that_cannot_be_used(model_folder):
    for name in ("meta", "xpu", "mps", "tpu"):
        with pytest.raises(
            ValueError, match=rf"device='{name}' (cannot be used here|is unknown): choose 'cpu' or 'cuda'"
        ):
            load(model_folder, device=name)


def test_a_segmenter_travels_to_other_processes(model_folder, image):
    segmenter = load(model_folder, device="cpu", flip=True, scales=(1.0, 1.5))
    copy = pickle.loads(pickle.dumps(segmenter))
    assert copy.identity == segmenter.identity
    np.testing.assert_array_equal(copy(image).probabilities, segmenter(image).probabilities)


def test_a_batch_takes_what_a_call_takes(model_folder, image):
    segmenter = load(model_folder, device="cpu")
    assert segmenter.batch([]) == []
    given = [image, Image.fromarray(image), torch.from_numpy(image).permute(2, 0, 1), image / 255]
    for result in segmenter.batch(given):
        np.testing.assert_array_equal(result.labels, segmenter(image).labels)
    with pytest.raises(ValueError, match="floats from 0 to 510"):
        segmenter.batch([np.linspace(0, 510, 300).reshape(10, 10, 3)])


def test_a_result_keeps_its_image(model_folder, image):
    result = load(model_folder, device="cpu")(image)
    before = image.copy()
    image[:] = 0
    np.testing.assert_array_equal(result.image, before)
    tensor = torch.from_numpy(before.copy())
    result = load(model_folder, device="cpu")(tensor.permute(2, 0, 1))
    tensor.zero_()
    np.testing.assert_array_equal(result.image, before)


def test_enlarged_images_are_tiled_sooner(model_folder, monkeypatch):
    monkeypatch.setitem(segment.MAX_PIXELS_AT_ONCE, "cpu", 10_000)
    monkeypatch.setitem(segment.TILE_SIDE, "cpu", 256)
    plain, large = load(model_folder, device="cpu", size=0), load(model_folder, device="cpu", size=0, scales=(1, 2))
    assert plain._tile_for(90, 90) is None
    assert plain._tile_for(110, 110) == 256
    assert large._tile_for(49, 49) is None
    assert large._tile_for(90, 90) == 128


def test_floats_a_little_beyond_and_other_byte_orders(image):
    floats = image / 255
    floats[0, 0], floats[0, 1] = -2e-4, 1 + 2e-7
    expected = image.copy()
    expected[0, 0], expected[0, 1] = 0, 255
    np.testing.assert_array_equal(as_image(floats), expected)
    wide = image.astype(">u2") << 8
    np.testing.assert_array_equal(as_image(wide), image)
    np.testing.assert_array_equal(as_image(image.astype(np.uint16)), image)  # bytes all the same


def test_bytes_in_a_wider_picture(image):
    grey = Image.fromarray(image[..., 0])
    np.testing.assert_array_equal(as_image(grey.convert("I")), np.repeat(image[..., :1], 3, axis=2))
    night = Image.fromarray(image[..., 0].astype(np.uint16) * 257)
    np.testing.assert_array_equal(as_image(night), np.repeat(image[..., :1], 3, axis=2))
