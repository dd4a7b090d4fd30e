"""Model folders: written together, read with care, and around networks of the user's own."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from torch import nn

from deepmrf import DeepParsingNetwork, MeanField, load
from deepmrf.data.colours import distinct_colours
from deepmrf.data.labels import LabelSet
from deepmrf.evaluation.steps import stage_scores
from deepmrf.models.folder import CONFIG, WEIGHTS, check_mrf_folder, read_mrf, write_mrf
from deepmrf.models.names import open_model
from deepmrf.models.parsing_network import read_model, write_model
from deepmrf.models.video_part import VideoPart
from deepmrf.unary import wrap

LABELS = LabelSet(("a", "b", "c"), distinct_colours(3))
IMAGE = torch.rand(1, 3, 8, 9)


class Named(nn.Conv2d):
    """A network with attributes that look like ours."""

    name = "fast"
    config = object()


def first(outputs):
    return outputs


def around(network):
    return DeepParsingNetwork(network, MeanField(3, window=3, contexts=1, context_size=3), LABELS).eval()


NETWORKS = {
    "wrapped": lambda: wrap(nn.Conv2d(3, 3, 1), 3),
    "wrapped with a function": lambda: wrap(nn.Conv2d(3, 3, 1), 3, output=first),
    "wrapped with a lambda": lambda: wrap(nn.Conv2d(3, 3, 1), 3, output=lambda outputs: outputs),
    "wrapped with a module": lambda: wrap(nn.Conv2d(3, 3, 1), 3, output=nn.Identity()),
    "bare": lambda: Named(3, 3, 1),
}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_a_network_of_ones_own_is_asked_for(tmp_path, network):
    model = around(network())
    model.save_pretrained(tmp_path / "mine")
    for read in (read_model, open_model, DeepParsingNetwork.from_pretrained):
        with pytest.raises(ValueError, match=r"was saved around a network of your own: pass network=\S+\(\.\.\.\), or"):
            read(tmp_path / "mine")
    for again in (
        DeepParsingNetwork.from_pretrained(tmp_path / "mine", network=network()),
        DeepParsingNetwork.from_pretrained(tmp_path / "mine", unary=network()),  # its older name
        load(tmp_path / "mine", network=network()).model,
        load(tmp_path / "mine", network=network).model,
        load(tmp_path / "mine", tmp_path / "mine", network=network()).models[1],
    ):
        assert torch.equal(again(IMAGE), model(IMAGE))


def test_a_bare_network_gets_the_wrapper_it_had(tmp_path):
    model = around(wrap(nn.Conv2d(3, 3, 1), 3, mean=(0.5,) * 3, std=(0.5,) * 3, multiple=4))
    model.save_pretrained(tmp_path)
    again = read_model(tmp_path, nn.Conv2d(3, 3, 1))
    assert again.unary.config == model.unary.config
    assert torch.equal(again(IMAGE), model(IMAGE))


def test_a_function_that_finds_the_output_is_asked_for(tmp_path):
    write_model(around(wrap(nn.Conv2d(3, 3, 1), 3, output=first)), tmp_path)
    with pytest.raises(ValueError, match=r"function \S+first, which is not saved; pass .*output=function"):
        read_model(tmp_path, nn.Conv2d(3, 3, 1))


def test_weights_that_two_layers_share_are_saved(tmp_path):
    network = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    network[1].weight = network[0].weight
    model = around(network)
    model.save_pretrained(tmp_path)
    assert torch.equal(read_model(tmp_path, nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)))(IMAGE), model(IMAGE))


def test_folders_of_earlier_versions_ask_for_it_too(tmp_path):
    write_model(around(wrap(nn.Conv2d(3, 3, 1), 3)), tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    config["unary"]["network"] = "wrapped"
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match="was saved around a network of your own"):
        read_model(tmp_path)


def test_a_function_is_saved_by_its_name(tmp_path):
    write_model(around(NETWORKS["wrapped with a function"]()), tmp_path)
    options = json.loads((tmp_path / CONFIG).read_text())["unary"]["options"]
    assert options["output"] == {"function": f"{__name__}.first"}


def test_another_network_gets_one_sentence(tmp_path):
    write_model(around(wrap(nn.Conv2d(3, 3, 1), 3)), tmp_path)
    with pytest.raises(ValueError, match=r"do not fit the network that was passed \(.*size mismatch.*build it as"):
        read_model(tmp_path, wrap(nn.Conv2d(3, 3, 3), 3))


def test_both_files_are_replaced_or_neither(tmp_path, monkeypatch):
    old = MeanField(3, window=3, contexts=1, context_size=3)
    write_mrf(tmp_path, old, {"labels": LABELS.to_dict()})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {CONFIG, WEIGHTS}

    def full(*_):
        raise OSError(28, "No space left on device")

    new = MeanField(3, window=5, contexts=1, context_size=3)
    with monkeypatch.context() as patch:
        patch.setattr("deepmrf.models.folder.to_bytes", full)
        with pytest.raises(OSError, match="No space"):
            write_mrf(tmp_path, new, {"labels": LABELS.to_dict()})
    with pytest.raises(TypeError, match="JSON"):
        write_mrf(tmp_path, new, {"labels": LABELS.to_dict(), "metrics": object()})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    write_mrf(tmp_path, new, {"labels": LABELS.to_dict()})
    mean_field, config = read_mrf(tmp_path)
    assert mean_field.settings == config["mean_field"] == new.settings
    assert not mean_field.training
    assert LabelSet.from_dict(config["labels"]) == LABELS


FACTS = {"labels": LABELS.to_dict()}
OLD, NEW = (MeanField(3, window=window, contexts=1, context_size=window) for window in (3, 5))


def in_child(work):
    """Run in a process of its own and return its exit status."""
    child = os.fork()
    if not child:
        try:
            work()
        except OSError:
            os._exit(1)
        except BaseException:
            os._exit(2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaced"])
def test_a_process_that_is_killed_leaves_the_old_or_the_new_model(tmp_path, replaces):
    """Killed before the first change of a name, the second, ... until one comes through."""
    for last in range(20):
        folder = tmp_path / str(last)
        if replaces:
            write_mrf(folder, OLD, FACTS)

        def save(folder=folder, last=last):
            count = iter(range(100))

            def counted(rename):
                return lambda *paths: os._exit(9) if next(count) == last else rename(*paths)

            os.rename, os.replace = counted(os.rename), counted(os.replace)
            write_mrf(folder, NEW, FACTS)

        killed = in_child(save)
        if replaces or killed == 0:
            window = read_mrf(folder)[0].settings["window"]  # weights and config fit together
            assert window == 5 if killed == 0 else window in (3, 5)
        check_mrf_folder(folder)  # fit can run again
        write_mrf(folder, NEW, FACTS)
        assert read_mrf(folder)[0].settings["window"] == 5
        assert (folder / CONFIG).is_file()  # for other programs
        assert not (folder / ".saved").exists()
        if killed == 0:
            return
    raise AssertionError("it was always killed")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_full_disk_leaves_the_old_model(tmp_path):
    """A limit on the size of files stands for a full disk. Whichever file is the one that fails, both stay."""
    resource = pytest.importorskip("resource")
    write_mrf(tmp_path / "new", NEW, FACTS)
    sizes = sorted(path.stat().st_size for path in (tmp_path / "new").iterdir())
    folder = tmp_path / "old"
    write_mrf(folder, OLD, FACTS)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def save(largest):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
        write_mrf(folder, NEW, FACTS)

    for largest in (10, sizes[0], sizes[1] - 1):
        assert in_child(lambda largest=largest: save(largest)) == 1
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert in_child(lambda: save(sizes[1])) == 0
    assert read_mrf(folder)[0].settings == NEW.settings


def test_half_weights_are_read_as_float32(tmp_path):
    model = DeepParsingNetwork.build("fast", LABELS, {"width": 8}, None).eval()
    write_model(model, tmp_path / "half", half=True)
    write_model(model, tmp_path / "whole")
    half_bytes, full_bytes = ((tmp_path / name / WEIGHTS).stat().st_size for name in ("half", "whole"))
    assert half_bytes < 0.6 * full_bytes
    again = read_model(tmp_path / "half")
    assert {value.dtype for value in again.parameters()} == {torch.float32}
    torch.testing.assert_close(again(IMAGE), model(IMAGE), atol=0.05, rtol=0.05)


# The part for video


def with_video(frames=5):
    torch.manual_seed(0)
    mean_field = MeanField(3, window=3, contexts=1, context_size=3, kernel="gaussian", temperature=1.75)
    model = DeepParsingNetwork.build("fast", LABELS, {"width": 8}, None)
    model = DeepParsingNetwork(model.unary, mean_field, LABELS).eval()
    torch.nn.init.normal_(mean_field.label_contexts.weight)
    part = VideoPart(frames, 1.25)
    part.trajectory_weights.copy_(torch.arange(len(part.trajectory_weights)) + 0.5)
    return model, part


def test_the_part_for_video_is_saved_and_images_are_as_before(tmp_path):
    model, part = with_video()
    write_model(model, tmp_path / "without")
    config = json.loads((tmp_path / "without" / CONFIG).read_text())
    assert "video" not in config
    assert config["format"] == 1  # older versions read it
    image, clip = torch.rand(1, 3, 40, 33), torch.rand(1, 3, 3, 40, 33)
    before = model(image)
    model.video = part
    model.save_pretrained(tmp_path / "with")
    for again in (
        read_model(tmp_path / "with"),
        load(tmp_path / "with").model,
        DeepParsingNetwork.from_pretrained(tmp_path / "with"),
    ):
        assert torch.equal(again(image), before)
        assert again.video.settings == {"frames": 5, "temperature": 1.25}
        for_video = again.for_video()
        assert for_video.unary is again.unary
        assert for_video.mean_field.temperature == 1.25
        assert again.mean_field.temperature == 1.75
        expected = model.inflate(5, 1)
        expected.mean_field.temperature = 1.25
        with torch.no_grad():
            expected.mean_field.trajectory_weights.copy_(part.trajectory_weights)
            assert torch.equal(for_video(clip), expected(clip))
        assert VideoPart.of(for_video.mean_field).settings == part.settings
        assert torch.equal(VideoPart.of(for_video.mean_field).trajectory_weights, part.trajectory_weights)
    model.video.allows_bfloat16 = True
    write_model(model, tmp_path / "with")
    assert read_model(tmp_path / "with").video.settings == {"frames": 5, "temperature": 1.25, "allows_bfloat16": True}
    assert not any(name.startswith("video") for name, _ in model.named_parameters())  # training leaves it alone
    assert read_model(tmp_path / "without").for_video().mean_field.dims == 2


def test_linked_results_are_not_saved(tmp_path):
    """Their config would say nothing of the mean field for images. What is in the folder stays."""
    model, _ = with_video()
    mean_field = MeanField(3, kernel="global", contexts=0)
    model = DeepParsingNetwork(model.unary, mean_field, LABELS).eval()
    model.video = VideoPart(3)
    model.save_pretrained(tmp_path)
    clips = model.for_video()
    for save in (clips.save_pretrained, clips._save_pretrained, lambda folder: write_model(clips, folder)):
        with pytest.raises(ValueError, match="save the model for images, whose part for video gives this one"):
            save(tmp_path)
    assert read_model(tmp_path).video.settings["frames"] == 3


@pytest.mark.parametrize("key", ["metrics", "recipe"])
@pytest.mark.parametrize("value", [None, [1], "x", 3])
def test_a_card_that_is_no_table_says_nothing(tmp_path, key, value):
    write_model(with_video()[0], tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, key: value}))
    model = read_model(tmp_path)
    assert (model.card.metrics, model.card.recipe) == ({}, {})
    assert stage_scores(model) == {}


def test_a_long_format_is_shortened(tmp_path):
    write_model(with_video()[0], tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, "format": "x" * 5000}))
    with pytest.raises(ValueError, match=r"has format 'x{50,}\.\.\., newer than 3: upgrade deepmrf") as caught:
        read_model(tmp_path)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c["video"].update(frames=1), "video.frames=1 must be a whole number from 2 to 255"),
        (lambda c: c["video"].update(temperature=0), "video.temperature=0 must be"),
        (lambda c: c["video"].update(allows_bfloat16=1), "video.allows_bfloat16=1 must be true or false"),
        (lambda c: c["video"].update(zoom=2), "video has no setting 'zoom'"),
        (lambda c: c.update(video=[]), "video is"),
        (lambda c: c["video"].update(frames=3), "size mismatch for video"),
        (lambda c: c.pop("video"), "also holds 'video"),
    ],
)
def test_a_damaged_part_for_video_is_refused(tmp_path, change, says):
    model, part = with_video()
    model.video = part
    write_model(model, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    change(config)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says):
        read_model(tmp_path)


@pytest.mark.parametrize("change", [lambda m: setattr(m, "video", VideoPart(5)), lambda m: m])
def test_links_of_an_earlier_version_are_refused(tmp_path, change):
    """Their weights had another meaning, so that the same numbers would give other labels."""
    model, _ = with_video()
    model = change(model) or model
    if model.video is None:
        model = model.inflate(3, 1)
    write_model(model, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["format"] == 3
    (tmp_path / CONFIG).write_text(json.dumps(config | {"format": 2}))
    with pytest.raises(
        ValueError, match="written by an earlier deepmrf, whose links between frames had another meaning"
    ):
        read_model(tmp_path)


def test_weights_of_the_part_for_video_are_finite(tmp_path):
    model, part = with_video()
    model.video = part
    model.video.trajectory_weights[0] = torch.inf
    write_model(model, tmp_path)
    with pytest.raises(ValueError, match="trajectory_weights holds NaN, infinity"):
        read_model(tmp_path)


def test_what_a_part_for_video_is_made_of():
    for frames in (1, 2.0, True):
        with pytest.raises(ValueError, match="at least 2"):
            VideoPart(frames)
    for mean_field in (None, MeanField(3), MeanField(3).inflate(3, 3)):
        with pytest.raises(ValueError, match="context_frames=1"):
            VideoPart.of(mean_field)
