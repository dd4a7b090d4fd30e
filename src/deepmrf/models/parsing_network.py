"""The Deep Parsing Network: a unary network (b1 to b11) and a mean-field step (b12 to b15) as one model.

    log_q = dpn(image)          # (B, 3, H, W) in [0, 1] or uint8 -> (B, L, H, W), normalised log-probabilities
    log_q = dpn(clip, flow)     # (B, 3, T, H, W) -> (B, L, T, H, W): the network frame by frame, then the MRF

`inflate` makes a model for clips of a trained one for images. To it, an image is a clip of one frame; to a model for
images, the frames of a clip are so many images.
It is saved as safetensors plus config.json: constructor arguments, labels and colours, metrics, recipe; all that one
must know to use it, and nothing that runs code. A saved folder may live on a disk or on the Hugging Face hub.
"""

from __future__ import annotations

import copy
import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelHubMixin, hf_hub_download
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from deepmrf import unary as unaries
from deepmrf.data.labels import LabelSet
from deepmrf.flow import Flow
from deepmrf.flow.clip import fold, unfold
from deepmrf.layers import MeanField

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT = 1
"""Raised when a saved config can no longer be read by older versions."""


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
        return spatial or getattr(self.unary, "name", None) == "volume"

    def inflate(self, window_frames: int = 3, context_frames: int = 3) -> DeepParsingNetwork:
        """A model for clips with this one's weights, which before training gives every frame what this one gives it.

        window_frames, context_frames: how many frames the triple penalty and the label contexts see.
        """
        if self.mean_field is None:
            raise ValueError("This model has no mean field to inflate: it is the network alone.")
        mean_field = self.mean_field.inflate(window_frames, context_frames)
        made = DeepParsingNetwork(copy.deepcopy(self.unary), mean_field, self.labels, copy.deepcopy(self.card))
        return made.train(self.training)

    def config(self) -> dict[str, Any]:
        """All that rebuilds the model, as plain JSON."""
        mrf = None if self.mean_field is None else self.mean_field.settings
        return {
            "format": FORMAT,
            "unary": {"network": getattr(self.unary, "name", None), "options": getattr(self.unary, "config", {})},
            "mean_field": mrf,
            "labels": self.labels.to_dict(),
            "metrics": self.card.metrics,
            "recipe": self.card.recipe,
        }

    def _save_pretrained(self, save_directory: Path) -> None:
        save(self, Path(save_directory))

    @classmethod
    def _from_pretrained(cls, *, model_id: str, unary: Any = None, **download: Any) -> Any:
        folder = Path(model_id)
        if not folder.is_dir():
            known = inspect.signature(hf_hub_download).parameters
            wanted = {key: value for key, value in download.items() if key in known}
            folder = Path(hf_hub_download(model_id, CONFIG, **wanted)).parent
            hf_hub_download(model_id, WEIGHTS, **wanted)
        # The mixin passes on whatever of config.json has the name of an argument: only a network is one.
        return load(folder, unary if isinstance(unary, nn.Module) else None)


def save(model: DeepParsingNetwork, folder: Path, half: bool = False) -> None:
    """Write weights and config; `half` stores weights as float16, at half the size."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    if half:
        tensors = {n: v.half() if v.dtype == torch.float32 and v.dim() > 1 else v for n, v in tensors.items()}
    (folder / WEIGHTS).write_bytes(to_bytes(tensors))  # save_file would let nobody else read it
    (folder / CONFIG).write_text(json.dumps(model.config(), indent=1) + "\n")


def load(folder: Path, unary: nn.Module | None = None) -> DeepParsingNetwork:
    """Read what `save` wrote. A model around a foreign network needs that network again, as `unary`."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} holds no {name}: pass a folder written by save_pretrained or deepmrf train."
            )
    config = json.loads((folder / CONFIG).read_text())
    if config.get("format", 0) > FORMAT:
        raise ValueError(f"{folder / CONFIG} has format {config['format']}, newer than this deepmrf reads: upgrade it.")
    labels = LabelSet.from_dict(config["labels"])
    if unary is None:
        if not config["unary"]["network"]:
            raise ValueError(f"{folder} was saved around a network of your own: pass it again as unary=network.")
        options = {k: v for k, v in config["unary"]["options"].items() if k != "labels"}
        unary = unaries.build(config["unary"]["network"], len(labels), **options)
    mrf = config["mean_field"]
    mean_field = None if mrf is None else MeanField(**mrf)
    model = DeepParsingNetwork(unary, mean_field, labels, Card(config["metrics"], config["recipe"]))
    weights = {
        name: value.float() if value.is_floating_point() else value
        for name, value in load_file(folder / WEIGHTS).items()
    }
    model.load_state_dict(weights)
    return model.eval()
