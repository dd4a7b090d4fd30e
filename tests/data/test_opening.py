import subprocess
import sys

import pytest

from deepmrf.data import open_data


def test_synthetic_sizes():
    assert open_data("synthetic:32", "train").read_image(open_data("synthetic:32", "train")[0]).shape == (32, 32, 3)
    video = open_data("synthetic:3x16x24", "val")
    assert len(video) == 150
    assert video.read(video[2])[1].shape == (16, 24)


def test_folder_and_all(tmp_path, pair):
    pair(tmp_path / "images" / "a.png", tmp_path / "masks" / "a.png")
    assert len(open_data(f"folder:{tmp_path}", "all")) == 1


def test_each_kind_is_known(tmp_path):
    for kind in ("camvid", "voc", "animals", "cityscapes", "coco", "folder"):
        with pytest.raises(FileNotFoundError, match=r"nowhere does not exist; give the folder (with|of)"):
            open_data(f"{kind}:{tmp_path}/nowhere", "train")


@pytest.mark.parametrize("spec", ["voc", "voc:", "imagenet:x", ":x", ""])
def test_unknown_specs_list_the_choices(spec):
    with pytest.raises(ValueError, match=r"give one of camvid:PATH, voc:PATH, .*, synthetic:SIZE"):
        open_data(spec, "train")


def test_bad_synthetic_size():
    with pytest.raises(ValueError, match="size of synthetic scenes is 'big'"):
        open_data("synthetic:big", "train")


def test_imports_stay_light():
    code = (
        "import sys, deepmrf; assert 'deepmrf.data' not in sys.modules; import deepmrf.data; "
        "print([m for m in ('torch', 'cv2', 'pycocotools', 'av', 'nibabel', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
