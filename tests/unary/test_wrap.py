"""Other people's networks: what they return is found, brought to the image's size and checked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from deepmrf.unary import wrap


class Quarter(nn.Module):
    """Logits at a quarter of the size, returned in `form`."""

    def __init__(self, form, labels=4):
        super().__init__()
        self.form, self.head = form, nn.Conv2d(3, labels, 4, stride=4)

    def forward(self, x):
        return self.form(self.head(x))


FORMS = {
    "tensor": lambda x: x,
    "torchvision": lambda x: {"out": x, "aux": x + 1},
    "hugging face": lambda x: SimpleNamespace(loss=None, logits=x),
    "mapping": lambda x: {"logits": x},
    "tuple": lambda x: (x, x + 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_found_and_upsampled(form, agree):
    module = Quarter(FORMS[form])
    image = torch.rand(2, 3, 16, 24)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    small = module.head((image - mean.view(3, 1, 1)) / std.view(3, 1, 1))
    expected = functional.interpolate(small, size=(16, 24), mode="bilinear")
    agree(wrap(module, 4)(image), expected)


@pytest.mark.parametrize("output", ["aux", lambda returned: returned["aux"]], ids=["name", "function"])
def test_output_says_where_else_to_look(output, agree):
    module = Quarter(FORMS["torchvision"])
    image = torch.rand(1, 3, 16, 24)
    agree(wrap(module, 4, output=output)(image), wrap(module, 4)(image) + 1)


def test_output_may_be_an_index_or_an_attribute(agree):
    image = torch.rand(1, 3, 16, 24)
    module = Quarter(FORMS["tuple"])
    agree(wrap(module, 4, output=1)(image), wrap(module, 4)(image) + 1)
    module = Quarter(lambda x: SimpleNamespace(segmentation=x))
    assert wrap(module, 4, output="segmentation")(image).shape == (1, 4, 16, 24)


def test_normalisation_is_the_networks_own(agree):
    module = nn.Identity()
    image = torch.randint(0, 256, (1, 3, 5, 7), dtype=torch.uint8)
    inception = wrap(module, 3, mean=(0, 0, 0), std=(1, 1, 1), value_range=(-1, 1))
    agree(inception(image), image.float() / 127.5 - 1)
    caffe = wrap(module, 3, mean=(104, 117, 124), std=(1, 1, 1), value_range=(0, 255))
    agree(caffe(image), image.float() - torch.tensor([104, 117, 124]).view(3, 1, 1))


def test_images_of_any_size_where_the_network_takes_multiples():
    class Picky(Quarter):
        def forward(self, x):
            assert x.shape[-2] % 8 == 0
            assert x.shape[-1] % 8 == 0
            return super().forward(x)

    network = wrap(Picky(FORMS["tensor"]), 4, multiple=8)
    for size in [(1, 1), (33, 47), (16, 24)]:
        assert network(torch.rand(1, 3, *size)).shape == (1, 4, *size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_networks_of_other_dtypes(dtype):
    module = Quarter(FORMS["tensor"])
    image = torch.rand(1, 3, 16, 24)
    expected = wrap(module, 4)(image)
    torch.testing.assert_close(wrap(module.to(dtype), 4)(image).float(), expected, atol=2e-2, rtol=0)


def test_the_network_inside_learns_and_is_saved():
    network = wrap(Quarter(FORMS["tensor"]), 4)
    network(torch.rand(1, 3, 16, 24)).sum().backward()
    assert network.module.head.weight.grad.abs().sum() > 0
    assert list(network.state_dict()) == ["module.head.weight", "module.head.bias"]
    assert wrap(network.module, **network.config).config == network.config


def test_errors_say_what_to_do():
    image = torch.rand(1, 3, 16, 24)
    with pytest.raises(ValueError, match="gave 4 labels, but labels=5: wrap it with labels=4"):
        wrap(Quarter(FORMS["tensor"]), 5)(image)
    with pytest.raises(ValueError, match=r"gave a SimpleNamespace .* pass output="):
        wrap(Quarter(lambda x: SimpleNamespace(masks=x)), 4)(image)
    with pytest.raises(ValueError, match=r"gave shape \(1, 4\)"):
        wrap(Quarter(lambda x: x.mean((2, 3))), 4)(image)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        wrap(lambda x: x, 4)
    with pytest.raises(ValueError, match="one number per channel"):
        wrap(nn.Identity(), 3, mean=(0.5,))
    with pytest.raises(ValueError, match="two different numbers"):
        wrap(nn.Identity(), 3, value_range=(1, 1))


def test_a_real_segformer(agree):
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16
    )
    config.num_labels = 6
    segformer = transformers.SegformerForSemanticSegmentation(config).eval()
    network = wrap(segformer, 6)
    with torch.no_grad():
        logits = network(torch.rand(1, 3, 50, 70))
        assert logits.shape == (1, 6, 50, 70)
        image = torch.rand(1, 3, 64, 96)
        small = segformer(pixel_values=network.normalise(image)).logits
        assert small.shape[-2:] == (16, 24)
        agree(network(image), functional.interpolate(small, size=(64, 96), mode="bilinear", align_corners=False))
    with pytest.raises(ValueError, match="was made for 6 labels, but labels=5: pass labels=6"):
        wrap(segformer, 5)
