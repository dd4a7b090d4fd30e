"""Network and mean field as one model: around any network, and turned from images to clips."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from deepmrf import MeanField, load
from deepmrf.data.colours import choose_colours, distinct_colours
from deepmrf.data.labels import LabelSet
from deepmrf.flow import Flow, estimate
from deepmrf.models.parsing_network import DeepParsingNetwork, read_model, write_model
from deepmrf.unary import wrap

LABELS = LabelSet(("a", "b", "c"), distinct_colours(3))


def model(kernel="gaussian", contexts=2):
    network = DeepParsingNetwork.build(
        "fast", LABELS, {"width": 8}, {"window": 5, "kernel": kernel, "contexts": contexts, "context_size": 3}
    )
    with torch.no_grad():
        for parameter in network.mean_field.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        if kernel == "gaussian":
            network.mean_field.triple_penalty.log_colour_width.zero_()  # so that colours at random are alike
            network.mean_field.triple_penalty.scale.add_(3.0)
    return network.eval()


def clip(frames=4):
    random = np.random.default_rng(0)
    picture = random.integers(0, 256, (48, 60, 3), dtype=np.uint8)
    return np.stack([np.roll(picture, t, 1)[:40, :52] for t in range(frames)])  # (T, H, W, 3)


def tensor(frames):
    return torch.from_numpy(frames).permute(3, 0, 1, 2)[None].contiguous()


@pytest.mark.parametrize(("kernel", "contexts"), [("gaussian", 2), ("distance", 2), ("gaussian", 0)])
@torch.no_grad()
def test_inflated_it_gives_every_frame_what_it_gave_before(kernel, contexts):
    flat = model(kernel, contexts)
    deep = flat.inflate()
    frames = tensor(clip())
    expected = torch.stack([flat(frames[:, :, t]) for t in range(4)], 2)
    assert (
        expected.exp() - torch.stack([flat.log_unary(frames[:, :, t]) for t in range(4)], 2).exp()
    ).abs().max() > 0.01
    torch.testing.assert_close(flat(frames), expected, rtol=0, atol=1e-5)  # frames are images to it
    torch.testing.assert_close(deep(frames), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(deep(frames, estimate(clip())), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(deep(frames[:, :, 1]), expected[:, :, 1], rtol=0, atol=2e-5)  # a clip of one frame


@torch.no_grad()
def test_frames_count_once_the_weights_do(tmp_path):
    deep = model().inflate(3, 3)
    deep.mean_field.triple_penalty.frame_weights.fill_(1.0)
    deep.mean_field.label_contexts.weight.add_(torch.randn_like(deep.mean_field.label_contexts.weight) * 0.3)
    frames, flow = tensor(clip()), estimate(clip())
    rigid, linked = deep(frames), deep(frames, flow)
    assert (rigid.exp() - linked.exp()).abs().max() > 1e-3
    write_model(deep, tmp_path)
    again = read_model(tmp_path)
    assert again.mean_field.settings == deep.mean_field.settings
    assert torch.equal(again(frames, flow), linked)
    assert torch.equal(again(frames), rigid)


def test_inflating_leaves_the_old_model_alone():
    flat = model()
    deep = flat.inflate()
    before = {name: value.clone() for name, value in flat.state_dict().items()}
    with torch.no_grad():
        for parameter in deep.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in flat.state_dict().items())
    assert not deep.training


def test_errors_say_what_to_do():
    flat, frames, flow = model(), tensor(clip()), estimate(clip())
    with pytest.raises(ValueError, match="inflated model"):
        flat(frames, flow)
    with pytest.raises(ValueError, match="inflated model"):
        flat.inflate()(frames[:, :, 0], flow)
    with pytest.raises(ValueError, match="no mean field"):
        DeepParsingNetwork(flat.unary, None, LABELS).inflate()
    with pytest.raises(ValueError, match="Only layers for images"):
        flat.inflate().inflate()
    short = Flow(flow.forward[:, :, :1], flow.backward[:, :, :1])
    with pytest.raises(ValueError, match="same"):
        flat.inflate()(frames, short)


def test_labels_may_be_names(tmp_path):
    network = nn.Conv2d(3, 2, 3, padding=1)
    by_name = DeepParsingNetwork(network, MeanField(2, window=3), labels=["grass", "road"])
    assert by_name.labels == LabelSet(("grass", "road"), choose_colours(("grass", "road")))
    assert len(set(by_name.labels.colours)) == 2
    by_name.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "library_name: deepmrf" in card
    assert "pushed to the Hub" not in card  # the usual card says so of every folder
    assert card.endswith(
        '    deepmrf.load("this folder, or its id on the hub", network=your_network)("photo.jpg").save("labels.png")\n'
    )
    result = load(tmp_path, network=network)(np.zeros((8, 9, 3), np.uint8))
    assert result.names == ("grass", "road")
    with pytest.raises(ValueError, match="mean field has 2 labels, the label set 3"):
        DeepParsingNetwork(network, MeanField(2), ["a", "b", "c"])
    with pytest.raises(ValueError, match="network has 2 labels, the label set 3"):
        DeepParsingNetwork(wrap(network, 2), None, ["a", "b", "c"])


def test_the_card_of_a_network_of_deepmrf_asks_for_no_network(tmp_path):
    model().save_pretrained(tmp_path)
    assert 'deepmrf.load("this folder, or its id on the hub")("photo.jpg")' in (tmp_path / "README.md").read_text()


def test_a_container_is_asked_for_as_the_network_that_was_saved(tmp_path):
    DeepParsingNetwork(nn.Sequential(nn.Conv2d(3, 2, 1)), None, ["a", "b"]).save_pretrained(tmp_path / "a")
    with pytest.raises(ValueError, match="pass network=the same network that was saved, as built by your code, or"):
        load(tmp_path / "a")
    DeepParsingNetwork(nn.Conv2d(3, 2, 1), None, ["a", "b"]).save_pretrained(tmp_path / "b")
    with pytest.raises(ValueError, match=r"pass network=torch\.nn\.modules\.conv\.Conv2d\(\.\.\.\), or"):
        load(tmp_path / "b")


def test_other_arguments_get_advice():
    network = nn.Conv2d(3, 2, 3, padding=1)
    assert DeepParsingNetwork(network, labels=["a", "b"]).mean_field is None
    for labels in (None, 2, "ab"):
        with pytest.raises(TypeError, match=rf"labels={labels!r}: pass the names of the labels"):
            DeepParsingNetwork(network, None, labels)
    for image in (np.zeros((1, 3, 8, 9), np.float32), ["a.jpg"], {"pixel_values": torch.rand(1, 3, 8, 9)}):
        with pytest.raises(TypeError, match=rf"image is a {type(image).__name__}: .* use deepmrf\.Segmenter\(model\)"):
            DeepParsingNetwork(network, None, ["a", "b"])(image)


def test_outputs_that_are_no_logits_get_advice():
    class Named(nn.Conv2d):
        def forward(self, x):
            return {"out": super().forward(x)}

    image = torch.rand(1, 3, 8, 9)
    with pytest.raises(ValueError, match=r"returned scores of 5 labels, but there are 2 \(a, b\): build the network"):
        DeepParsingNetwork(nn.Conv2d(3, 5, 1), None, ["a", "b"])(torch.rand(1, 3, 4, 4))
    with pytest.raises(ValueError, match=r"Named returned a dict, not logits: pass deepmrf\.unary\.wrap"):
        DeepParsingNetwork(Named(3, 2, 1), None, ["a", "b"])(image)
    with pytest.raises(ValueError, match=r"logits of shape \(1, 2, 4, 4\), where \(1, 2, 8, 9\) is needed"):
        DeepParsingNetwork(nn.Conv2d(3, 2, 2, stride=2), None, ["a", "b"])(image)


@torch.no_grad()
def test_a_network_of_volumes_takes_them_whole():
    volumes = DeepParsingNetwork.build("volume", LABELS, {"width": 8}, {"dims": 3, "window": 3, "features": 1}).eval()
    assert volumes.for_volumes
    assert volumes(torch.randn(1, 1, 5, 6, 7)).shape == (1, 3, 5, 6, 7)
