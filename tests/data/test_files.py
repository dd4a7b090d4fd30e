import os
import pickle
import tracemalloc

import numpy as np
import pytest
from PIL import Image, ImageOps

from deepmrf.data import files
from deepmrf.data.dataset import lookup_table
from deepmrf.data.files import DataError, image_size, read_image, read_list, read_mask

IDS = lookup_table({0: 0, 1: 1, 7: 2})


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "YCbCr"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    path = tmp_path / ("a.jpg" if mode in ("CMYK", "YCbCr") else "a.png")
    Image.new("RGB", (6, 4), "white").convert(mode).save(path)
    image = read_image(path)
    assert image.shape == (4, 6, 3)
    assert image.dtype == np.uint8
    assert image.min() >= 250


def test_sixteen_bits_become_eight(tmp_path):
    Image.fromarray(np.array([[0, 256, 65535]], dtype=np.uint16)).save(tmp_path / "a.png")
    np.testing.assert_array_equal(read_image(tmp_path / "a.png")[0, :, 0], [0, 1, 255])


def test_floats_are_refused(tmp_path):
    Image.fromarray(np.ones((2, 2), dtype=np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match=r"a\.tif holds 'F' values"):
        read_image(tmp_path / "a.tif")


def test_see_through_becomes_white(tmp_path):
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(tmp_path / "a.png")
    assert (read_image(tmp_path / "a.png") == 255).all()


def test_exif_orientation(tmp_path):
    picture = Image.fromarray(np.zeros((4, 6, 3), dtype=np.uint8))
    exif = picture.getexif()
    exif[0x0112] = 6  # lying on its side
    picture.save(tmp_path / "a.jpg", exif=exif)
    assert read_image(tmp_path / "a.jpg").shape == (6, 4, 3)


def test_truncated_and_foreign_files(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for name in ("a.jpg", "a.png"):
        Image.fromarray(noise).save(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(DataError, match=rf"{name} cannot be read as an image") as caught:
            read_image(tmp_path / name)
        assert caught.value.kind == "unreadable"
    for content in (b"", b"hello"):
        (tmp_path / "b.png").write_bytes(content)
        with pytest.raises(DataError, match=r"b\.png cannot be read"):
            read_image(tmp_path / "b.png")
    with pytest.raises(FileNotFoundError, match=r"c\.png does not exist"):
        read_image(tmp_path / "c.png")


def test_error_crosses_processes(tmp_path):
    error = DataError("no", tmp_path, "id")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.path, copy.kind) == ("no", tmp_path, "id")


@pytest.mark.parametrize("mode", ["L", "P", "RGB"])
def test_ids_go_through_the_table(tmp_path, save, mode):
    path = save(tmp_path / "m.png", [[0, 1, 7, 255]], mode)
    np.testing.assert_array_equal(read_mask(path, IDS, None), [[0, 1, 2, 255]])


def test_unknown_id_is_named(tmp_path, save):
    path = save(tmp_path / "m.png", [[0, 9, 3]])
    with pytest.raises(DataError, match=r"m\.png holds the id 3, 9, but the ids here are 0 to 1, 7, 255") as caught:
        read_mask(path, IDS, None)
    assert caught.value.kind == "id"


def test_a_lossy_mask_is_called_so(tmp_path, save):
    path = save(tmp_path / "m.webp", [[0, 9, 3]])
    with pytest.raises(DataError, match=r"its format is lossy, which changes ids: save masks as PNG") as caught:
        read_mask(path, IDS, None)
    assert caught.value.kind == "id"


def test_colours_go_through_their_table(tmp_path, save):
    colours = {(0, 0, 0): 255, (128, 0, 0): 0, (0, 0, 192): 1}
    painted = np.array([[(0, 0, 192), (128, 0, 0), (0, 0, 0)]])
    for mode in (None, "P", "RGBA"):
        path = tmp_path / "m.png"
        picture = Image.fromarray(painted.astype(np.uint8))
        (picture if mode is None else picture.convert(mode, palette=Image.Palette.ADAPTIVE)).save(path)
        np.testing.assert_array_equal(read_mask(path, None, colours), [[1, 0, 255]])
    save(path, np.add(painted, (0, 1, 0)))
    with pytest.raises(
        DataError, match=r"holds the colour \(0, 1, 0\), \(0, 1, 192\), \(128, 1, 0\), which is none of"
    ):
        read_mask(path, None, colours)


def test_masks_of_the_wrong_kind(tmp_path, save):
    path = save(tmp_path / "m.png", np.arange(24).reshape(2, 4, 3))
    with pytest.raises(DataError, match=r"mask of mode RGB; save it as PNG with 8-bit ids"):
        read_mask(path, IDS, None)
    Image.fromarray(np.zeros((2, 2), dtype=np.uint16)).save(path)
    with pytest.raises(DataError, match=r"mask of mode I;16"):
        read_mask(path, IDS, None)


def test_lists(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("﻿a\n\nfolder/b.png /mask/b.png\nc.d\n")
    assert read_list(path) == ["a", "b", "c.d"]
    path.write_text("my folder/b 1.png\n")
    assert read_list(path, full_lines=True) == ["my folder/b 1"]
    path.write_bytes(b"\xff\xfe\x80")
    with pytest.raises(DataError, match="is not text"):
        read_list(path)


def test_lab_becomes_rgb(tmp_path):
    Image.new("LAB", (4, 4), (255, 128, 128)).save(tmp_path / "a.tif")
    assert read_image(tmp_path / "a.tif").min() >= 250


def test_broken_exif_is_no_reason_to_refuse(tmp_path):
    Image.new("RGB", (6, 4)).save(tmp_path / "a.jpg", exif=b"Exif\0\0" + b"\xff" * 40)
    assert read_image(tmp_path / "a.jpg").shape == (4, 6, 3)


def test_the_size_is_known_before_reading(tmp_path):
    Image.new("RGB", (60, 40)).save(tmp_path / "a.png")
    assert image_size(tmp_path / "a.png") == (40, 60, False)
    frames = [Image.new("L", (6, 4), value) for value in (0, 200)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert image_size(tmp_path / "a.gif") == (4, 6, True)
    assert read_image(tmp_path / "a.gif").max() == 0  # the first frame
    limit = Image.MAX_IMAGE_PIXELS
    for read in (image_size, read_image):
        with pytest.raises(DataError, match=r"a\.png has 60 x 40 pixels, more than 0\.002 million, and was not read"):
            read(tmp_path / "a.png", 2000)
        read(tmp_path / "a.png", 2400)
    assert limit == Image.MAX_IMAGE_PIXELS


def test_what_is_no_file(tmp_path):
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    for name, why in (("folder.jpg", "it is a folder"), ("loop.jpg", "symbolic links")):
        for read in (image_size, read_image):
            with pytest.raises(DataError, match=why):
                read(tmp_path / name)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.jpg")
        with pytest.raises(DataError, match="no regular file"):
            read_image(tmp_path / "pipe.jpg")
    with pytest.raises(FileNotFoundError, match=r"gone\.jpg does not exist"):
        image_size(tmp_path / "gone.jpg")


def test_formats_that_run_programs_are_not_opened(tmp_path):
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    with pytest.raises(DataError, match="no image format that is known here"):
        read_image(tmp_path / "a.png")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ending", ["png", "jpg", "gif", "bmp", "tif", "webp", "ppm"])
def test_damaged_bytes_are_an_image_or_a_sentence(tmp_path, ending):
    rng = np.random.default_rng(0)
    path = tmp_path / f"a.{ending}"
    Image.fromarray(rng.integers(0, 256, (24, 20, 3), dtype=np.uint8)).save(path)
    content = path.read_bytes()
    sentences = []
    for _ in range(60):
        damaged = bytearray(content[: rng.integers(1, len(content) + 1)] if rng.random() < 0.3 else content)
        for index in rng.integers(0, min(len(damaged), 200), 4):
            damaged[index] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            assert read_image(path, 1_000_000).ndim == 3
        except DataError as why:
            sentences.append(str(why))
    assert sentences
    assert all(str(path) in sentence and "\n" not in sentence for sentence in sentences)


@pytest.mark.parametrize("turn", range(10))
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "CMYK", "I;16"])
def test_bands_of_rows_make_the_same_image(monkeypatch, mode, turn):
    """All orientations of EXIF, of which 0 and 9 mean nothing, as Pillow turns whole pictures."""
    values = np.random.default_rng(turn).integers(0, 256, (7, 5, 4), dtype=np.uint8)
    if mode == "I;16":
        picture = Image.fromarray(values[..., 0].astype(np.uint16) * 256)
    else:
        picture = Image.fromarray(values).convert("RGB" if mode == "CMYK" else mode).convert(mode)
    picture.getexif()[0x0112] = turn
    upright = ImageOps.exif_transpose(picture)
    if mode == "RGBA":
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
    expected = np.asarray(upright) >> 8 if mode == "I;16" else np.asarray(upright.convert("RGB"))
    for pixels in (1, 10, 1000):
        monkeypatch.setattr(files, "PIXELS_AT_A_TIME", pixels)
        image = files.to_rgb(picture, "picture")
        np.testing.assert_array_equal(image, expected if expected.ndim == 3 else expected[..., None].repeat(3, 2))
        assert image.flags.c_contiguous


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "PA", "CMYK", "turned", "I;16"])
def test_conversion_takes_the_memory_of_the_result(mode):
    """Pillow's own memory does not count here: numpy's does, and that of the bytes between the two."""
    if mode == "I;16":
        picture = Image.fromarray(np.full((1500, 2000), 4000, np.uint16))
    else:
        picture = Image.new("RGB" if mode == "turned" else mode, (2000, 1500))
    if mode == "turned":
        picture.getexif()[0x0112] = 6
    tracemalloc.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PIXELS_AT_A_TIME", 1 << 17)
        image = files.to_rgb(picture, "picture")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert image.nbytes <= peak < 1.3 * image.nbytes


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.gif"])
def test_pillows_own_limit_is_lifted_as_long_as_it_takes(tmp_path, monkeypatch, name):
    """Some formats ask for it again while they decode."""
    Image.new("L", (60, 40)).save(tmp_path / name)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with files.opened(tmp_path / name, 2400) as first:
        assert read_image(tmp_path / name, 2400).shape == (40, 60, 3)
        first.load()
    assert Image.MAX_IMAGE_PIXELS == 100
    with pytest.raises(DataError, match="exceeds limit of 200 pixels"):
        read_image(tmp_path / name)
