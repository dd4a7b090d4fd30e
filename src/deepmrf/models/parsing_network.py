"""The Deep Parsing Network: a unary network (b1 to b11) and a mean-field step (b12 to b15) as one model.

    log_q = dpn(image)          # (B, 3, H, W) in [0, 1] or uint8 -> (B, L, H, W), normalised log-probabilities
    log_q = dpn(clip, flow)     # (B, 3, T, H, W) -> (B, L, T, H, W): the network frame by frame, then the MRF

`inflate` makes a model for clips from a trained one for images. It takes an image as a clip of one frame; a model for
images takes the frames of a clip as so many images. A model for images may hold what it needs to be one for clips, too:
`for_video` gives that model.

folder.py says how models are saved. A folder holds the weights of every network, but not the code of the user's own:
`read_model(folder, network)` asks for that network again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub import ModelHubMixin, hf_hub_download
from torch import Tensor, nn

from deepmrf import unary as unaries
from deepmrf.data.files import shortened
from deepmrf.data.labels import LabelSet
from deepmrf.flow import Flow
from deepmrf.flow.clip import fold, unfold
from deepmrf.layers import MeanField
from deepmrf.layers.inputs import readable, warn_of_logits
from deepmrf.models.folder import (
    check_config,
    check_mrf_weights,
    download,
    first_line,
    format_of,
    read_config,
    read_weights,
    refusing_damage,
    write_folder,
)
from deepmrf.models.schema import WithoutInitialWeights, skeleton
from deepmrf.models.video_part import VideoPart
from deepmrf.unary.libraries import description, rebuild
from deepmrf.unary.own import OwnNetwork, code_name, own_network


@dataclass
class Card:
    """What is known of a trained model besides its weights."""

    metrics: dict[str, Any] = field(default_factory=dict)
    """Scores by stage or data set, with split and seed."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The resolved recipe it was trained with."""


MODEL_CARD = """---
{{ card_data }}
---

A network for semantic segmentation with a Markov random field behind it, saved by deepmrf.
config.json holds its labels, settings and, after a training, its recipe and scores.

    import deepmrf
    deepmrf.load("this folder, or its id on the hub"{{ network }})("photo.jpg").save("labels.png")

"""
"""README.md of a saved model, where there is none; the hub reads its first lines. Jinja drops the last line end."""
NOT_SAVED = (
    "This model for clips cannot be read again once saved: save the model for images, whose part for video gives this "
    "one."
)
CONTAINERS = "torch.nn.modules.container."
"""Classes that are built of other modules: to name one, such as Sequential, says nothing of a network."""


class DeepParsingNetwork(
    nn.Module, ModelHubMixin, library_name="deepmrf", tags=["image-segmentation"], model_card_template=MODEL_CARD
):
    """unary + mean field. `mean_field=None` is the unary network alone.

    unary: a network of deepmrf.unary, or yours: images (B, 3, H, W), floats in [0, 1], -> logits (B, L, H, W);
    deepmrf.unary.wrap makes such a network of one that takes normalised images. labels: their names, or a LabelSet,
    which holds colours too.
    """

    code: str | None = None
    """Where the code of a network of the user's own is, "package.module:function", if it was given by that name."""

    check_values: bool = True
    """Does the next call warn (InputWarning) if a network of the user's own returns probabilities? The first call sets
    this to False."""

    video: VideoPart | None
    """What a model for images needs for videos; None if it sees frames one by one, or is a model for clips."""

    def __init__(
        self,
        unary: nn.Module,
        mean_field: MeanField | None = None,
        labels: LabelSet | Sequence[str] | None = None,
        card: Card | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(labels, LabelSet):
            if not isinstance(labels, list | tuple):
                raise TypeError(f"labels={labels!r}: pass the names of the labels, such as ['road', 'sky'].")
            labels = LabelSet(tuple(labels))
        for part, module in (("network", unary), ("mean field", mean_field)):
            count = getattr(module, "labels", None)
            if isinstance(count, int) and count != len(labels):
                raise ValueError(
                    f"The {part} has {count} labels, the label set {len(labels)}: build both with the same."
                )
        self.unary, self.mean_field, self.labels = unary, mean_field, labels
        self.card = card if card is not None else Card()
        self.register_module("video", None)

    @classmethod
    def build(cls, network: str, labels: LabelSet, options: dict[str, Any], mrf: dict[str, Any] | None) -> Any:
        """From names and settings: a network of deepmrf.unary with its options, and MeanField's settings."""
        mean_field = None if mrf is None else MeanField(len(labels), **mrf)
        return cls(unaries.build(network, len(labels), **options), mean_field, labels)

    def forward(self, image: Tensor, flow: Flow | None = None) -> Tensor:
        return self.refined(self.log_unary(image), image, flow)

    def log_unary(self, image: Tensor) -> Tensor:
        """b11 alone: log-probabilities (B, L, H, W); those of a clip's frames are (B, L, T, H, W)."""
        if not isinstance(image, Tensor):
            raise TypeError(
                f"image is a {type(image).__name__}: pass a torch.Tensor (B, 3, H, W), or use "
                "deepmrf.Segmenter(model), which takes paths, arrays and PIL images."
            )
        if image.dim() == 5 and not self.for_volumes:
            return unfold(self.log_unary(fold(image)), image.shape[0])
        logits = self._logits(image)
        if self.mean_field is not None and self.mean_field.unary == "sigmoid":
            return nn.functional.logsigmoid(logits)
        return logits.log_softmax(1)

    def _logits(self, image: Tensor) -> Tensor:
        built_in = isinstance(self.unary, unaries.NETWORKS)
        if image.dtype == torch.uint8 and not built_in and not isinstance(self.unary, unaries.Wrapped):
            image = image.float() / 255  # what networks of the user's own expect
        logits = self.unary(image)
        if not isinstance(logits, Tensor):
            raise ValueError(
                f"{type(self.unary).__name__} returned a {type(logits).__name__}, not logits: "
                f"pass deepmrf.unary.wrap(network, labels={len(self.labels)}), which finds them."
            )
        expected = (image.shape[0], len(self.labels), *image.shape[2:])
        if not torch.compiler.is_compiling() and tuple(logits.shape) != expected:  # no guards in exported programs
            if logits.dim() == len(expected) and logits.shape[1] != expected[1]:
                raise ValueError(
                    f"{type(self.unary).__name__} returned scores of {logits.shape[1]} labels, but there are "
                    f"{expected[1]} ({shortened(self.labels.names)}): build the network for {expected[1]}."
                )
            raise ValueError(
                f"{type(self.unary).__name__} returned logits of shape {tuple(logits.shape)}, where {expected} is "
                "needed: pass deepmrf.unary.wrap(network, labels), which brings them to the image's size."
            )
        if not built_in and not torch.compiler.is_compiling() and self.check_values and readable(logits):
            self.check_values = False
            warn_of_logits(self.summary().split(" ")[0], logits)
        return logits.float()

    def refined(self, log_p: Tensor, image: Tensor, flow: Flow | None = None, frames: slice | None = None) -> Tensor:
        """b12 to b15 on what the network said of the image, or of a clip, whose frames `flow` links.

        frames: return these frames of a clip alone, where the mean field looks at several.
        """
        mrf = self.mean_field
        if flow is not None and (mrf is None or mrf.dims != 3 or image.dim() != 5):
            raise ValueError(
                f"flow links the frames of clips, but the image has shape {tuple(image.shape)} and the mean field "
                f"{'is missing' if mrf is None else f'has dims={mrf.dims}'}: pass (B, 3, T, H, W) to an inflated model."
            )
        if mrf is None:
            return log_p
        log_q: Tensor
        if mrf.dims == 3 and image.dim() == 4:  # an image is a clip of one frame
            log_q = mrf(log_p[:, :, None], image[:, :, None])[:, :, 0]
        elif mrf.dims == 2 and image.dim() == 5:  # frames are images
            log_q = unfold(mrf(fold(log_p), fold(image)), image.shape[0])
        else:
            log_q = mrf(log_p, image, flow, frames)
        return log_q

    @property
    def for_volumes(self) -> bool:
        """Does the network itself take three axes? Else those of a clip are folded into the batch."""
        mrf = self.mean_field
        spatial = mrf is not None and mrf.dims == 3 and not mrf.triple_penalty.temporal
        return spatial or isinstance(self.unary, unaries.Volume)

    @property
    def spans_time(self) -> bool:
        """Does the mean field look at several frames, or along three axes of a volume?"""
        return self.mean_field is not None and self.mean_field.dims == 3

    def inflate(self, window_frames: int = 3, context_frames: int = 3) -> DeepParsingNetwork:
        """A model for clips with this one's weights, which before training gives every frame what this one gives it.

        window_frames, context_frames: how many frames the triple penalty and the label contexts see.
        """
        if self.mean_field is None:
            raise ValueError("This model has no mean field to inflate: it is the network alone.")
        mean_field = self.mean_field.inflate(window_frames, context_frames)
        model = DeepParsingNetwork(copy.deepcopy(self.unary), mean_field, self.labels, copy.deepcopy(self.card))
        model.code = self.code
        return model.train(self.training)

    def for_video(self) -> DeepParsingNetwork:
        """The model for clips, with this one's network and the links of its part for video; without one, this model."""
        if self.video is None or self.mean_field is None:
            return self
        model: DeepParsingNetwork
        if self.mean_field.can_inflate:
            model = DeepParsingNetwork(self.unary, self.video.inflated(self.mean_field), self.labels, self.card)
        else:
            model = LinkedResults(self, self.video.links_alone(self.mean_field))
        model.code = self.code
        return model.train(self.training)

    def summary(self) -> str:
        """The model in a few words, such as "fast + gaussian mean field"."""
        network = self.unary.module if isinstance(self.unary, unaries.Wrapped) else self.unary
        name = self.unary.name if isinstance(self.unary, unaries.NETWORKS) else type(network).__name__
        return f"{name} + {self.mean_field.triple_penalty.kernel} mean field" if self.mean_field else f"{name} alone"

    def config(self) -> dict[str, Any]:
        """All that rebuilds the model, as plain JSON; folder.py lists the keys."""
        video = {} if self.video is None else {"video": self.video.settings}
        config = {
            "unary": self._unary_config(),
            "mean_field": None if self.mean_field is None else self.mean_field.settings,
            **video,
            "labels": self.labels.to_dict(),
            "metrics": self.card.metrics,
            "recipe": self.card.recipe,
        }
        return {"format": format_of(config), **config}

    def _unary_config(self) -> dict[str, Any]:
        if isinstance(self.unary, unaries.NETWORKS):
            return {"network": self.unary.name, "options": self.unary.config}
        wrapped = isinstance(self.unary, unaries.Wrapped)
        network: Any = self.unary.module if wrapped else self.unary
        source = description(network) or {"code": self.code or code_name(network)}
        return {"network": None, "options": self.unary.config if wrapped else {}, "source": source}

    def _save_pretrained(self, save_directory: Path) -> None:
        write_model(self, Path(save_directory))

    def generate_model_card(self, *args: Any, **options: Any) -> Any:
        """README.md of a saved folder; a network of the user's own is asked for again."""
        config = self._unary_config()
        is_own = config["network"] is None and "code" in config["source"]
        return super().generate_model_card(*args, network=", network=your_network" if is_own else "", **options)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, network: Any = None, unary: Any = None, **options: Any) -> Any:
        folder = Path(model_id)
        if not folder.is_dir():
            known = inspect.signature(hf_hub_download).parameters
            folder = download(model_id, **{key: value for key, value in options.items() if key in known})
        # `unary` is the older name of `network`. The mixin also passes on the "unary" of config.json, a dict.
        return read_model(folder, unary if isinstance(unary, nn.Module) else network)


class MissingNetworkError(ValueError):
    """A model folder that was saved around a network of the user's own, and is read without that network."""

    def __init__(self, folder: Path, code: str | None) -> None:
        self.folder, self.code = folder, code
        remedy = f'pass network="{code}", which imports and runs that code'
        if code is None or ":" not in code:
            again = "that network again, network=..." if code is None else f"network={code}(...)"
            if code is not None and code.startswith(CONTAINERS):
                again = "network=the same network that was saved, as built by your code"
            remedy = f'pass {again}, or "package.module:function", which builds it'
        super().__init__(f"{folder} was saved around a network of your own: {remedy}.")


class LinkedResults(DeepParsingNetwork):
    """A model for clips whose frames get the result of a model for images each, and then are linked.

    It is not saved: its config would say nothing of the first mean field.
    """

    def __init__(self, images: DeepParsingNetwork, links: MeanField) -> None:
        super().__init__(images.unary, links, images.labels, images.card)
        self.of_images = images.mean_field

    def save_pretrained(self, *_: Any, **options: Any) -> NoReturn:
        raise ValueError(NOT_SAVED)  # before the mixin removes a config.json that is there

    def log_unary(self, image: Tensor) -> Tensor:
        """What the model for images says of each frame, by its network and its mean field."""
        log_p = super().log_unary(image)
        if image.dim() == 5 or self.of_images is None:  # frames come here one by one
            return log_p
        return self.of_images(log_p, image)  # type: ignore[no-any-return]


def write_model(model: DeepParsingNetwork, folder: Path, half: bool = False) -> None:
    """Write weights and config into a folder; `half` stores the weights as float16, at half the size."""
    if isinstance(model, LinkedResults):
        raise ValueError(NOT_SAVED)
    write_folder(folder, model.config(), model.state_dict(), half)


def read_model(folder: Path, network: OwnNetwork | None = None) -> DeepParsingNetwork:
    """Read the model in a folder. One around a network of the user's own needs that network again.

    network: a module, wrapped as it was saved or not at all; a function that builds it; or "package.module:function".
    """
    config = read_config(folder)
    saved = config["unary"]
    source = saved.get("source") if isinstance(saved.get("source"), dict) else {}
    named = saved.get("network") not in (None, "wrapped")
    if network is None and not named and "library" not in source:
        raise MissingNetworkError(folder, source.get("code"))
    given = None if network is None else own_network(network)
    with refusing_damage(folder):
        labels = check_config(config)

        def build() -> DeepParsingNetwork:
            if given is not None:
                unary = given
            elif named:
                options = {name: value for name, value in saved["options"].items() if name != "labels"}
                unary = unaries.build(saved["network"], len(labels), **options)
            else:
                unary = rebuild(source)
            unary = unary if named else _wrapped(unary, saved["options"])
            mean_field = None if config["mean_field"] is None else MeanField(**config["mean_field"])
            built = DeepParsingNetwork(unary, mean_field, labels, _card(config))
            if config.get("video") is not None:
                built.video = VideoPart(**config["video"])
            return built

        if given is None:
            weights = read_weights(folder, skeleton(build))
            with WithoutInitialWeights() if named else nullcontext():
                model = build()
            model.load_state_dict(weights)
        else:
            model = build()
    if given is not None:
        _load_own(model, folder)
    with refusing_damage(folder):
        for part in (model.mean_field, model.video):
            if part is not None:
                check_mrf_weights(part)
    model.code = network if isinstance(network, str) else source.get("code")
    return model.eval()


def _card(config: Mapping[str, Any]) -> Card:
    """The card in a config; what is no table says nothing."""
    return Card(*(config[key] if isinstance(config[key], dict) else {} for key in ("metrics", "recipe")))


def _wrapped(network: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """The network in the wrapper that it was saved in, if it was and has none."""
    if not options or isinstance(network, unaries.Wrapped):
        return network
    if isinstance(options.get("output"), dict):
        raise ValueError(
            f"its output is found by the function {options['output'].get('function')}, which is not saved; pass the "
            "network as deepmrf.unary.wrap(network, labels, output=function)"
        )
    return unaries.Wrapped(network, **options)


def _load_own(model: DeepParsingNetwork, folder: Path) -> None:
    try:
        model.load_state_dict(read_weights(folder, model.state_dict()))
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"The weights in {folder} do not fit the network that was passed ({first_line(error)}): "
            "build it as it was when the model was saved."
        ) from error
