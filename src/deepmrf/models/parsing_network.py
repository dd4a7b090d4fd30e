"""The Deep Parsing Network: a unary network (b1 to b11) and a mean-field step (b12 to b15) as one model.

    log_q = dpn(image)          # (B, 3, H, W) in [0, 1] or uint8 -> (B, L, H, W), normalised log-probabilities
    log_q = dpn(clip, flow)     # (B, 3, T, H, W) -> (B, L, T, H, W): the network frame by frame, then the MRF

`inflate` makes a model for clips from a trained one for images. It takes an image as a clip of one frame; a model for
images takes the frames of a clip as so many images. folder.py says how models are saved.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelHubMixin, hf_hub_download
from torch import Tensor, nn

from deepmrf import unary as unaries
from deepmrf.data.labels import LabelSet
from deepmrf.flow import Flow
from deepmrf.flow.clip import fold, unfold
from deepmrf.layers import MeanField
from deepmrf.models.folder import (
    FORMAT,
    check_sizes,
    download,
    read_config,
    read_weights,
    refusing_damage,
    write_folder,
)


@dataclass
class Card:
    """What is known of a trained model besides its weights."""

    metrics: dict[str, Any] = field(default_factory=dict)
    """Scores by stage or data set, with split and seed."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The resolved recipe it was trained with."""


class DeepParsingNetwork(nn.Module, ModelHubMixin, library_name="deepmrf", tags=["image-segmentation"]):
    """unary + mean field. `mean_field=None` is the unary network alone."""

    def __init__(
        self, unary: nn.Module, mean_field: MeanField | None, labels: LabelSet, card: Card | None = None
    ) -> None:
        super().__init__()
        if mean_field is not None and mean_field.labels != len(labels):
            raise ValueError(
                f"The mean field has {mean_field.labels} labels, the label set {len(labels)}: build both with the same."
            )
        self.unary, self.mean_field, self.labels = unary, mean_field, labels
        self.card = card if card is not None else Card()

    @classmethod
    def build(cls, network: str, labels: LabelSet, options: dict[str, Any], mrf: dict[str, Any] | None) -> Any:
        """From names and settings: a network of deepmrf.unary with its options, and MeanField's settings."""
        mean_field = None if mrf is None else MeanField(len(labels), **mrf)
        return cls(unaries.build(network, len(labels), **options), mean_field, labels)

    def forward(self, image: Tensor, flow: Flow | None = None) -> Tensor:
        return self.refined(self.log_unary(image), image, flow)

    def log_unary(self, image: Tensor) -> Tensor:
        """b11 alone: log-probabilities (B, L, H, W); those of a clip's frames are (B, L, T, H, W)."""
        if image.dim() == 5 and not self.for_volumes:
            return unfold(self.log_unary(fold(image)), image.shape[0])
        logits: Tensor = self.unary(image).float()
        if self.mean_field is not None and self.mean_field.unary == "sigmoid":
            return nn.functional.logsigmoid(logits)
        return logits.log_softmax(1)

    def refined(self, log_p: Tensor, image: Tensor, flow: Flow | None = None) -> Tensor:
        """b12 to b15 on what the network said of the image, or of a clip, whose frames `flow` links."""
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
        elif flow is not None:
            log_q = mrf(log_p, image, flow)
        else:
            log_q = mrf(log_p, image)
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
        return model.train(self.training)

    def config(self) -> dict[str, Any]:
        """All that rebuilds the model, as plain JSON; a network of the user's own has no name there."""
        built_in = isinstance(self.unary, unaries.NETWORKS)
        options: Any = self.unary.config if built_in or isinstance(self.unary, unaries.Wrapped) else {}
        return {
            "format": FORMAT,
            "unary": {"network": self.unary.name if built_in else None, "options": options},
            "mean_field": None if self.mean_field is None else self.mean_field.settings,
            "labels": self.labels.to_dict(),
            "metrics": self.card.metrics,
            "recipe": self.card.recipe,
        }

    def _save_pretrained(self, save_directory: Path) -> None:
        write_model(self, Path(save_directory))

    @classmethod
    def _from_pretrained(cls, *, model_id: str, unary: Any = None, **options: Any) -> Any:
        folder = Path(model_id)
        if not folder.is_dir():
            known = inspect.signature(hf_hub_download).parameters
            folder = download(model_id, **{key: value for key, value in options.items() if key in known})
        # The mixin passes on whatever of config.json has the name of an argument: only a network is one.
        return read_model(folder, unary if isinstance(unary, nn.Module) else None)


def write_model(model: DeepParsingNetwork, folder: Path, half: bool = False) -> None:
    """Write weights and config into a folder; `half` stores the weights as float16, at half the size."""
    write_folder(folder, model.config(), model.state_dict(), half)


def read_model(folder: Path, unary: nn.Module | None = None) -> DeepParsingNetwork:
    """Read the model in a folder. One around a network of your own needs that network again, as `unary`."""
    config = read_config(folder)
    saved = config["unary"]
    if unary is None and saved.get("network") in (None, "wrapped"):
        raise ValueError(
            f"{folder} was saved around a network of your own: load it in Python and pass that network again, with "
            "DeepParsingNetwork.from_pretrained(folder, unary=network)."
        )
    with refusing_damage(folder):
        check_sizes(config)
        labels = LabelSet.from_dict(config["labels"])
        if unary is None:
            options = {name: value for name, value in saved["options"].items() if name != "labels"}
            unary = unaries.build(saved["network"], len(labels), **options)
        mean_field = None if config["mean_field"] is None else MeanField(**config["mean_field"])
        model = DeepParsingNetwork(unary, mean_field, labels, Card(config["metrics"], config["recipe"]))
        model.load_state_dict(read_weights(folder))
    return model.eval()
