"""Exported files say what the model says: at sizes that were not traced, on photographs, through the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

import deepmrf
from deepmrf import MeanField, ops, unary
from deepmrf.cli import app
from deepmrf.data.colours import distinct_colours
from deepmrf.data.labels import LabelSet
from deepmrf.export import check, check_path, export, program
from deepmrf.models.parsing_network import DeepParsingNetwork, write_model
from deepmrf.unary import fast
from deepmrf.unary.network import IMAGENET_MEAN, IMAGENET_STD, Normalise, check_zoom, enlarge, unzoomed, zoomed

data = pytest.importorskip("skimage.data")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

LABELS = 5
SIZES = ((45, 71), (64, 32), (17, 128), (3, 5), (1, 1), (2, 1100))
"""Odd, even, narrower than a window, a single pixel, and longer than MAX_BANDED_LENGTH; the traced one is 65 x 97."""
FIELDS = {
    "none": None,
    "gaussian-51": {"kernel": "gaussian", "gate": False, "window": 51},
    "gaussian-even-gate": {"kernel": "gaussian", "window": (10, 8), "contexts": 3, "context_size": (4, 3)},
    "gaussian-smooth-normalised-twice": {
        "kernel": "gaussian",
        "gate": False,
        "window": 21,
        "smoothness": True,
        "normalize": True,
        "iterations": 2,
        "contexts": 2,
    },
    "gaussian-anisotropic-no-contexts": {"kernel": "gaussian", "window": (5, 30), "spacing": (2.0, 0.5), "contexts": 0},
    "gaussian-positions-stride": {"kernel": "gaussian", "gate": False, "window": 9, "features": 0, "context_stride": 2},
    "distance-50": {"kernel": "distance", "window": 50},
    "distance-even-no-gate-rank": {
        "kernel": "distance",
        "gate": False,
        "window": (6, 13),
        "spacing": (1.5, 1.0),
        "context_rank": 4,
        "label_scaling": True,
    },
    "distance-positions-sigmoid": {
        "kernel": "distance",
        "window": 7,
        "features": 0,
        "unary": "sigmoid",
        "iterations": 2,
    },
}


class Colours(nn.Module):
    """A network of one convolution at half the size, cropped on the way back: quick to trace."""

    def __init__(self, zoom=1):
        super().__init__()
        self.normalise, self.zoom = Normalise(IMAGENET_MEAN, IMAGENET_STD), check_zoom(zoom)
        self.classify = nn.Conv2d(3, LABELS, 3, padding=1)

    def forward(self, image):
        seen = zoomed(self.normalise(image), self.zoom)
        half = functional.max_pool2d(seen, 2, ceil_mode=True)
        return unzoomed(enlarge(self.classify(half), 2, seen.shape[-2:]), image.shape[-2:], self.zoom)


@pytest.fixture
def small_encoder(monkeypatch):
    """Fast networks of one block a stage, which are quicker to trace."""
    channels = fast.ENCODERS[0][1]
    monkeypatch.setitem(fast.ENCODERS, 0, ((1,) * len(channels), channels))


def some_labels(count=LABELS):
    return LabelSet(tuple(f"label {i}" for i in range(count)), distinct_colours(count))


def lively(model, strength=0.3):
    """Random weights that matter: with those of the start, logits are all alike and the mean field does nothing."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.startswith("unary.classify"):
                value.normal_(0, 1)
            elif "label_contexts" in name or "label_scaling" in name:
                value.normal_(0, strength)
        field = model.mean_field
        if field is not None and field.label_contexts is None:
            field.triple_penalty.scale.fill_(3.0)
            field.triple_penalty.shift.fill_(0.1)
    return model.eval()


def small_model(settings, zoom=1):
    field = None if settings is None else MeanField(LABELS, **settings)
    return lively(DeepParsingNetwork(Colours(zoom), field, some_labels()))


def photograph(size, name="chelsea"):
    """The middle of the photograph, side by side with itself, (1, 3, H, W)."""
    [part] = check.centre_crops(np.tile(getattr(data, name)(), (1, 3, 1)), [size])
    return torch.from_numpy(part.copy()).permute(2, 0, 1)[None]


def batch():
    """Three photographs at once."""
    return torch.cat([photograph((40, 51), name) for name in ("chelsea", "astronaut", "coffee")])


def answer(model, image):
    with torch.no_grad():
        return model(image)


@pytest.mark.parametrize("settings", FIELDS.values(), ids=FIELDS.keys())
def test_onnx_equals_the_model_at_other_sizes(settings, tmp_path):
    model = small_model(settings)
    program.write_onnx(model, tmp_path / "model.onnx")
    run = check.runner(tmp_path / "model.onnx")
    for size in SIZES:
        image = photograph(size)
        expected = answer(model, image)
        assert expected.shape == (1, LABELS, *size)
        torch.testing.assert_close(run(image), expected, rtol=0, atol=2e-5, msg=lambda m, size=size: f"{size}: {m}")
    several = batch()
    expected = answer(model, several)
    torch.testing.assert_close(run(several), expected, rtol=0, atol=2e-5)
    assert (expected[0] - expected[1]).abs().max() > 0.5
    if settings is not None:  # the mean field has a say, or nothing of it was compared
        assert (expected - model.log_unary(several)).abs().max() > 0.1


def test_a_zoomed_network_at_other_sizes(tmp_path):
    model = small_model(None, zoom=1.5)
    program.write_onnx(model, tmp_path / "model.onnx")
    export(model, tmp_path / "model.pt2", check.centre_crops(data.chelsea(), [(64, 96)]))
    run, program_too = (check.runner(tmp_path / name) for name in ("model.onnx", "model.pt2"))
    for size in SIZES:
        image = photograph(size)
        expected = answer(model, image)
        torch.testing.assert_close(run(image), expected, rtol=0, atol=2e-5, msg=lambda m, size=size: f"{size}: {m}")
        torch.testing.assert_close(program_too(image), expected, rtol=0, atol=1e-5)


def test_the_gaussians_weights_keep_their_precision_for_narrow_colours(tmp_path):
    """|I_j|^2 + |I_z|^2 - 2 I_j I_z loses everything when colours are divided by a small bandwidth first."""
    model = small_model({"kernel": "gaussian", "gate": False, "window": 15, "contexts": 0, "average": False})
    with torch.no_grad():
        model.mean_field.triple_penalty.log_colour_width.fill_(np.log(0.01))
    program.write_onnx(model, tmp_path / "model.onnx")
    image = photograph((60, 75))
    penalty = model.mean_field.triple_penalty
    with torch.no_grad():
        log_p = model.log_unary(image).double()
        weights, widths = penalty.weights().double(), penalty.widths().double()
        t = ops.gaussian_penalty(log_p.exp(), image.double() / 255, weights, widths, (15, 15), gate=False)
        expected = (log_p - t).log_softmax(1)
    actual = check.runner(tmp_path / "model.onnx")(image).double()
    assert (actual - expected).abs().max() < 5e-6 * expected.abs().max()


@pytest.mark.parametrize("name", ["gaussian-positions-stride", "distance-50"])
def test_a_program_is_the_model_at_other_sizes(name, tmp_path):
    model = small_model(FIELDS[name])
    comparisons = export(model, tmp_path / "model.pt2", check.centre_crops(data.chelsea(), [(64, 96), (71, 120)]))
    sizes = [check.SMALL_SIZE, (64, 96), (71, 120)]
    assert [(c.height, c.width, c.difference) for c in comparisons] == [(*size, 0.0) for size in sizes]
    run = check.runner(tmp_path / "model.pt2")
    for image in [*map(photograph, ((96, 64), (33, 41), (34, 40))), batch()]:
        assert torch.equal(run(image), answer(model, image))
    for size in ((1, 1), (2, 3), (7, 5), (1, 40)):
        small = photograph((64, 64))[..., : size[0], : size[1]]
        torch.testing.assert_close(run(small), answer(model, small), rtol=0, atol=1e-5)


@pytest.mark.parametrize("network", ["fast", "strong"])
def test_a_program_takes_small_images(network, small_encoder):
    options = {"width": 16} if network == "fast" else {"width": 8}
    model = lively(DeepParsingNetwork.build(network, some_labels(), options, None), 0.1)
    run = program.trace(model).module()
    for size in ((1, 1), (9, 14), (2, 33), (17, 16)):
        image = photograph((64, 64))[..., : size[0], : size[1]]
        torch.testing.assert_close(run(image), answer(model, image), rtol=0, atol=1e-4)


def test_a_deeper_networks_program_at_other_sizes():
    settings = {"kernel": "gaussian", "window": 9, "smoothness": True, "normalize": True}
    model = lively(DeepParsingNetwork.build("strong", some_labels(), {"width": 8}, settings))
    run = program.trace(model).module()
    for size in ((32, 48), (33, 47)):
        assert torch.equal(run(photograph(size)), answer(model, photograph(size)))


def test_a_program_needs_no_more_than_the_operators(tmp_path):
    model = small_model(FIELDS["gaussian-even-gate"])
    export(model, tmp_path / "model.pt2", check.centre_crops(data.chelsea(), [(30, 41)]))
    image = photograph((37, 26))
    np.save(tmp_path / "image.npy", image.numpy())
    code = (
        f"import sys, numpy, torch, deepmrf.ops; torch.set_num_threads({torch.get_num_threads()});"
        "facts = {'labels.txt': ''};"
        "program = torch.export.load(sys.argv[1], extra_files=facts).module();"
        "numpy.save(sys.argv[3], program(torch.from_numpy(numpy.load(sys.argv[2]))).numpy());"
        "print(facts['labels.txt'])"
    )
    words = [str(tmp_path / name) for name in ("model.pt2", "image.npy", "out.npy")]
    finished = subprocess.run([sys.executable, "-W", "ignore", "-c", code, *words], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == [f"label {i}" for i in range(LABELS)]
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), answer(model, image).numpy())


def type_in(*words):
    return CliRunner().invoke(app, ["export", *map(str, words)], env={"COLUMNS": "200", "TERM": "dumb"})


def test_a_model_of_full_size_through_the_command(tmp_path, monkeypatch):
    """The bundled models' kind. Tracing it takes long, so all that is asked of its file is asked here."""
    monkeypatch.setattr(check, "TIMED_RUNS", 1)
    settings = {"kernel": "gaussian", "gate": False, "window": 25, "contexts": 5, "context_size": 9}
    model = lively(DeepParsingNetwork.build("fast", some_labels(11), {}, settings), 0.1)
    write_model(model, tmp_path / "model")
    Image.fromarray(data.chelsea()).save(tmp_path / "photo.jpg", quality=95)
    file = tmp_path / "new" / "model.onnx"
    finished = type_in(tmp_path / "model", "-o", file, "--image", tmp_path / "photo.jpg")
    assert finished.exit_code == 0, finished.output
    rows = re.findall(r"(\d+) x (\d+)\s+(\S+)\s+(\d+) ms\s+(\d+) ms", finished.output)
    sizes = [("9", "14"), ("300", "451"), ("273", "351")]  # as much of the cat as there is
    assert [row[:2] for row in rows] == sizes
    assert all(float(row[2]) <= 1e-4 for row in rows)
    assert f"Wrote {file}" in finished.output
    assert [path.name for path in file.parent.iterdir()] == ["model.onnx"]
    image = torch.from_numpy(data.astronaut()[::2, ::2].copy()).permute(2, 0, 1)[None].contiguous()
    expected = answer(model, image)
    assert (check.runner(file)(image) - expected).abs().max() < 1e-4
    assert expected.std() > 0.3
    check_what_it_says_of_itself(file, model.labels)
    check_that_it_is_standard(file, sum(value.numel() * 4 for value in model.state_dict().values()))


def check_what_it_says_of_itself(file, labels):
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    [image], [out] = session.get_inputs(), session.get_outputs()
    assert (image.name, image.type, image.shape) == ("image", "tensor(uint8)", ["batch", 3, "height", "width"])
    assert (out.name, out.type, out.shape) == ("log_probabilities", "tensor(float)", ["batch", 11, "height", "width"])
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["labels"]) == list(labels.names)
    assert json.loads(facts["colours"]) == [list(colour) for colour in labels.colours]
    assert facts["deepmrf"] == deepmrf.__version__
    assert facts["size"] == "0"  # the model was not trained by a recipe
    assert "inside the file" in facts["normalisation"]
    assert session.get_modelmeta().producer_name == "deepmrf"


def check_that_it_is_standard(file, weights):
    model = onnx.load(file)
    onnx.checker.check_model(model, full_check=True)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 18)]
    assert not model.functions
    assert len(model.graph.node) < 400  # the window's 2,600 offsets are not spelt out
    assert file.stat().st_size < weights + 2**20


def test_python_in_the_docs(tmp_path, monkeypatch, capsys, python_blocks, small_encoder):
    """Every block of docs/export.md runs, in order, as in one session."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "TIMED_RUNS", 1)
    model = lively(DeepParsingNetwork.build("fast", some_labels(), {"width": 16, "stride": 8}, None))
    model.unary.classify[1].bias.data.zero_()  # so that no label wins everywhere
    model.card.recipe["augment"] = {"crop": [96, 128]}
    write_model(model, tmp_path / "runs/fast/model")
    turned = Image.Exif()
    turned[0x0112] = 6  # a photograph from a camera on its side
    Image.fromarray(data.chelsea()).save("photo.jpg", quality=95, exif=turned)
    scope = python_blocks("docs/export.md")
    assert scope["facts"]["size"] == "160"
    expected = deepmrf.load("runs/fast/model")("photo.jpg").labels
    assert expected.shape == scope["labels"].shape == (451, 300)
    assert (scope["labels"] == expected).mean() > 0.9999
    assert (np.asarray(Image.open("labels.png")) == scope["labels"]).all()
    assert len(np.unique(expected)) > 2
    assert scope["log_probabilities"].shape == (1, LABELS, 160, 106)
    assert json.loads(scope["metadata"]["labels.txt"]) == [f"label {i}" for i in range(LABELS)]
    printed = capsys.readouterr().out
    assert re.search(r"^360 480 \S+\n273 351 \S+$", printed, re.M)
    assert re.search(r"label \d+", printed)


def broken(monkeypatch, by):
    """Files that differ from the model by `by` in one value."""
    real = check.runner

    def wrong(path):
        run = real(path)

        def off(image):
            out = run(image).clone()
            out[0, 0, 0, 0] += by
            return out

        return off

    monkeypatch.setattr(check, "runner", wrong)


@pytest.mark.parametrize("by", [3e-4, float("nan"), float("inf")])
def test_a_file_that_differs_is_an_error_and_leaves_nothing(by, tmp_path, monkeypatch):
    broken(monkeypatch, by)
    with pytest.raises(ArithmeticError, match=r"differs .* more than 0.0001: nothing was written"):
        export(small_model(None), tmp_path / "model.pt2", check.centre_crops(data.chelsea(), [(30, 41)]))
    assert not list(tmp_path.iterdir())


def test_a_higher_tolerance_accepts_what_the_usual_one_does_not(tmp_path, monkeypatch, small_encoder):
    broken(monkeypatch, 3e-4)
    images = check.centre_crops(data.chelsea(), [(30, 41)])
    small, comparison = export(small_model(None), tmp_path / "model.pt2", images, tolerance=5e-4)
    assert (small.height, small.width) == check.SMALL_SIZE
    assert comparison.difference == pytest.approx(3e-4, rel=0.05)
    assert (tmp_path / "model.pt2").exists()
    write_model(DeepParsingNetwork.build("fast", some_labels(), {"width": 16}, None), tmp_path / "fast")
    finished = type_in(tmp_path / "fast", "-o", tmp_path / "fast.pt2", "--tolerance", "-1")
    assert finished.exit_code == 2
    assert "tolerance" in finished.output


def test_a_failed_export_leaves_the_file_before_it(tmp_path, monkeypatch):
    (tmp_path / "model.pt2").write_text("precious")
    broken(monkeypatch, 1.0)
    with pytest.raises(ArithmeticError):
        export(small_model(None), tmp_path / "model.pt2", check.centre_crops(data.chelsea(), [(30, 41)]))
    assert (tmp_path / "model.pt2").read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


def test_the_model_itself_is_left_alone():
    model = small_model(FIELDS["distance-50"]).double().train()
    program.trace(model)
    assert model.training
    assert next(model.parameters()).dtype == torch.float64
    assert next(model.parameters()).requires_grad


def test_learned_filters_all_pairs_and_clips_are_refused(tmp_path):
    model = small_model({"kernel": "learned", "window": 3, "size": (8, 9)})
    for name in ("model.onnx", "model.pt2"):
        with pytest.raises(ValueError, match=r"kernel='learned'.*fix the size.*'gaussian' or 'distance'"):
            export(model, tmp_path / name)
    with pytest.raises(ValueError, match=r"kernel='global'.*lattice.*'gaussian' or 'distance'"):
        export(small_model({"kernel": "global", "contexts": 0}), tmp_path / "model.pt2")
    with pytest.raises(ValueError, match=r"for clips or volumes.*images"):
        export(small_model(FIELDS["distance-50"]).inflate(), tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_the_network_of_a_model_over_all_pairs_alone(tmp_path, small_encoder):
    torch.manual_seed(0)
    settings = {"kernel": "global", "contexts": 1, "context_size": 1, "gate": False}
    model = DeepParsingNetwork.build("fast", some_labels(), {"width": 16}, settings).eval()
    write_model(model, tmp_path / "model")
    finished = type_in(tmp_path / "model", "-o", tmp_path / "network.pt2")
    assert finished.exit_code == 2
    assert "or the network alone" in " ".join(finished.output.split())
    finished = type_in(tmp_path / "model", "-o", tmp_path / "network.pt2", "--network-only")
    assert finished.exit_code == 0, finished.output
    image = photograph((40, 51))
    with torch.no_grad():
        expected = model.log_unary(image)
        torch.testing.assert_close(torch.export.load(tmp_path / "network.pt2").module()(image), expected)


def test_networks_of_independent_labels_are_not_exported_alone(tmp_path, small_encoder):
    model = DeepParsingNetwork.build("fast", some_labels(), {"width": 16}, {"unary": "sigmoid", "contexts": 0})
    write_model(model, tmp_path / "model")
    finished = type_in(tmp_path / "model", "-o", tmp_path / "network.pt2", "--network-only")
    assert finished.exit_code == 2
    assert "a probability of its own" in finished.output


def test_an_old_pytorch_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    with pytest.raises(ImportError, match=r"needs PyTorch 2\.7 or newer, and this is 2\.6\.0\+cpu"):
        export(small_model(None), tmp_path / "model.pt2")


def test_a_network_that_takes_no_small_images_is_compared_on_others(tmp_path, monkeypatch):
    model = small_model(None)
    frozen = check.frozen_copy(model)

    def picky(image):
        if min(image.shape[2:]) < 16:
            raise RuntimeError("too small")
        return frozen(image)

    monkeypatch.setattr(check, "frozen_copy", lambda _: picky)
    images = check.centre_crops(data.chelsea(), [(30, 41)])
    assert [(c.height, c.width) for c in export(model, tmp_path / "model.pt2", images)] == [(30, 41)]


@pytest.mark.parametrize("name", ["model.pth", "model", "onnx"])
def test_unknown_endings(name, tmp_path):
    finished = type_in(tmp_path, "-o", tmp_path / name)
    assert finished.exit_code == 2
    assert re.search(r"ends neither in \.onnx .* nor in \.pt2 .*: name it", finished.output)


def test_an_unknown_model(tmp_path):
    finished = type_in(tmp_path / "nothing", "-o", tmp_path / "model.onnx")
    assert finished.exit_code == 2
    assert "nothing" in finished.output
    assert "Traceback" not in finished.output
    assert not list(tmp_path.iterdir())


def test_an_unreadable_photograph(tmp_path):
    (tmp_path / "cat.png").write_text("no picture")
    finished = type_in(tmp_path, "-o", tmp_path / "model.onnx", "--image", tmp_path / "cat.png")
    assert finished.exit_code == 2
    assert re.search(r"cat\.png cannot be read", finished.output)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    finished = type_in(tmp_path, "-o", tmp_path / "model.onnx")
    assert finished.exit_code == 2
    assert "Exporting to ONNX needs onnx: pip install 'deepmrf[export]'" in " ".join(finished.output.split())


def test_importing_deepmrf_brings_no_onnx():
    code = "import deepmrf, deepmrf.export, deepmrf.cli, sys; print(*[n for n in sys.modules if n.startswith('onnx')])"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not finished.stdout.split()


def test_batch_norm_without_writing_in_place_is_the_same_bit_for_bit(monkeypatch):
    """The fast network's rectifier writes in place but while it is traced."""
    network = unary.build("fast", 3, width=16).eval()
    image = photograph((43, 58))
    before = answer(network, image)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(answer(network, image), before)


def test_small_photographs_are_compared_at_two_sizes():
    image = np.zeros((100, 120, 3), np.uint8)
    assert [crop.shape[:2] for crop in check.centre_crops(image)] == [(100, 120), (75, 90)]
    assert [crop.shape[:2] for crop in check.centre_crops(data.astronaut())] == [(360, 480), (273, 351)]
    with pytest.raises(ValueError, match="An image of 120 x 10 is too small to compare on"):
        check.centre_crops(image[:10])


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "m.pt2").mkdir()
    with pytest.raises(ValueError, match=r"m\.pt2 is a folder: name a file"):
        check_path(tmp_path / "m.pt2")
