"""NIfTI files as users have them: compressed or not, any dtype, a fourth axis of one, broken ones, other grids."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepmrf.data.dataset import lookup_table
from deepmrf.data.files import DataError
from deepmrf.data.volumes import (
    is_volume,
    read_grid,
    read_volume,
    read_volume_mask,
    stem,
    unit_range,
    volumes_in,
    write_labels,
)

nibabel = pytest.importorskip("nibabel")

SIZE = (5, 7, 4)
AFFINE = np.array([[0, -2.0, 0, 30], [0.8, 0, 0, -20], [0, 0, 3.0, 5], [0, 0, 0, 1]])
SPACING = (0.8, 2.0, 3.0)
LOOKUP = lookup_table({label: label for label in range(3)})


@pytest.fixture
def values():
    return np.random.default_rng(0).integers(0, 200, SIZE)


def save(path, values, affine=AFFINE, kind=nibabel.Nifti1Image):
    nibabel.save(kind(values, affine), path)
    return path


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "b.c.NII.GZ"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, np.float64])
def test_values_spacing_and_affine(tmp_path, values, name, dtype):
    path = tmp_path / name
    saved = save(tmp_path / name.lower(), values.astype(dtype))
    saved.rename(path)
    volume = read_volume(path)
    assert volume.values.dtype == dtype
    np.testing.assert_array_equal(volume.values, values)
    np.testing.assert_allclose(volume.spacing, SPACING, rtol=1e-6)
    np.testing.assert_allclose(volume.affine, AFFINE, rtol=1e-6)
    assert is_volume(path)
    assert stem(path) == name[: name.lower().index(".nii")]
    assert read_grid(path)[0] == SIZE
    np.testing.assert_allclose(read_grid(path)[1], SPACING, rtol=1e-6)


def test_scaled_integers_are_read_in_their_unit(tmp_path, values):
    image = nibabel.Nifti1Image(values.astype(np.int16), AFFINE)
    image.header.set_slope_inter(0.5, -1000)
    path = tmp_path / "a.nii"
    path.write_bytes(image.to_bytes())
    raw = nibabel.load(path)
    np.testing.assert_allclose(read_volume(path).values, np.asarray(raw.dataobj))


def test_single_axes_behind_the_third_are_dropped(tmp_path, values):
    path = save(tmp_path / "a.nii", values[..., None, None].astype(np.float32))
    assert read_volume(path).values.shape == SIZE
    several = save(tmp_path / "b.nii", np.repeat(values[..., None, None], 2, 4).astype(np.float32))
    assert read_volume(several, several=True).values.shape == (*SIZE, 2)
    with pytest.raises(DataError, match="one volume per file"):
        read_volume(several)
    thin = save(tmp_path / "c.nii", values[:, :, :1].astype(np.float32))
    assert read_volume(thin).values.shape == (5, 7, 1)


def test_bad_files_get_a_sentence(tmp_path, values):
    def message(name, content):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as error:
            read_volume(tmp_path / name)
        text = str(error.value)
        assert name in text
        assert text.endswith(".")
        assert "\n" not in text
        return text

    content = nibabel.Nifti1Image(values.astype(np.float32), AFFINE).to_bytes()
    assert "cannot be read" in message("a.nii", b"")
    assert "cannot be read" in message("b.nii", b"not a volume at all" * 100)
    assert "cannot be read" in message("c.nii", content[:400])
    assert "cannot be read" in message("d.nii.gz", content)
    assert "cannot be read" in message("e.nii.gz", gzip.compress(content)[:-30])
    flat = nibabel.Nifti1Image(values[0].astype(np.float32), AFFINE).to_bytes()
    assert "three axes" in message("f.nii", flat)
    complex_ = nibabel.Nifti1Image(values.astype(np.complex64), AFFINE).to_bytes()
    assert "complex64" in message("g.nii", complex_)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_volume(tmp_path / "z.nii")


def test_masks_are_ids(tmp_path):
    ids = np.random.default_rng(0).integers(0, 3, SIZE)
    ids[0, 0, 0] = 255
    for dtype in (np.uint8, np.int16, np.float32):
        mask, volume = read_volume_mask(save(tmp_path / "a.nii", ids.astype(dtype)), LOOKUP)
        assert mask.dtype == np.uint8
        np.testing.assert_array_equal(mask, ids)
        np.testing.assert_allclose(volume.spacing, SPACING, rtol=1e-6)
    for wrong, text in ((3, "the id 3"), (-1, "the id -1"), (300, "the id 300"), (0.5, "fractions")):
        odd = ids.astype(np.float32)
        odd[1, 1, 1] = wrong
        with pytest.raises(DataError, match=text):
            read_volume_mask(save(tmp_path / "b.nii", odd), LOOKUP)


def test_intensities_become_a_share_of_their_range():
    values = np.arange(10_000, dtype=np.float32).reshape(10, 20, 50) * 3 - 500
    values[0, 0, 0] = 1e9  # one hot voxel changes nothing
    scaled = unit_range(values)
    assert scaled.dtype == np.float32
    low, high = np.percentile(values, (1, 99))
    np.testing.assert_allclose(scaled, np.clip((values - low) / (high - low), 0, 1), atol=1e-4)
    np.testing.assert_allclose(unit_range(values * 7 + 3), scaled, atol=1e-4)  # the unit does not matter
    assert (unit_range(np.full(SIZE, 7.0)) == 0).all()
    assert set(np.unique(unit_range(np.arange(1000).reshape(10, 10, 10) == 5))) == {0, 1}
    holes = values.copy()
    holes[1, 2, 3], holes[1, 2, 4] = np.nan, np.inf
    assert np.isfinite(unit_range(holes)).all()
    assert unit_range(holes)[1, 2, 3] == 0
    assert np.isfinite(unit_range(np.full(SIZE, np.nan))).all()


@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image], ids=["NIfTI-1", "NIfTI-2"])
@pytest.mark.parametrize("name", ["out.nii", "out.nii.gz"])
def test_labels_are_written_on_the_volumes_grid(tmp_path, values, kind, name):
    image = kind(values[..., None].astype(np.float32), AFFINE)
    image.header.set_xyzt_units("mm", "sec")
    image.set_qform(AFFINE, 1)
    image.set_sform(AFFINE, 2)
    nibabel.save(image, tmp_path / "a.nii")
    ids = (values % 3).astype(np.uint8)
    write_labels(ids, tmp_path / name, read_volume(tmp_path / "a.nii"))
    written = nibabel.load(tmp_path / name)
    assert type(written) is kind
    assert written.get_data_dtype() == np.uint8
    np.testing.assert_array_equal(np.asarray(written.dataobj), ids)
    np.testing.assert_allclose(written.affine, AFFINE, rtol=1e-6)
    np.testing.assert_allclose(written.header.get_zooms(), SPACING, rtol=1e-6)
    assert (int(written.header["qform_code"]), int(written.header["sform_code"])) == (1, 2)
    assert written.header.get_xyzt_units()[0] == "mm"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.nii", name]
    assert [path.name for path in volumes_in(tmp_path)] == ["a.nii", name]


def test_without_nibabel_there_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(ImportError, match="need nibabel: pip install"):
        read_volume(tmp_path / "a.nii")


def test_nibabel_comes_when_it_is_needed():
    code = "import sys, deepmrf.refine, deepmrf.data.volumes; print('nibabel' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_names():
    assert stem(Path("x/case.1.nii.gz")) == "case.1"
    assert stem(Path("x/case.1.nii")) == "case.1"
    assert not is_volume(Path("case.nii.png"))
