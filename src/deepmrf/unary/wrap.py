"""wrap: use any segmentation network as a unary network, images in and logits of the same size out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from deepmrf.layers.inputs import check_count
from deepmrf.unary.network import IMAGENET_MEAN, IMAGENET_STD, Normalise

Output = str | int | Callable[[Any], Tensor] | None
LOGITS_NAMES = ("logits", "out")
"""Names of the logits in a network's output: Hugging Face's and torchvision's."""


class Wrapped(nn.Module):
    """A network that takes normalised images as one that takes images: (B, 3, H, W) in, logits (B, L, H, W) out.

    module: from Hugging Face, torchvision, segmentation_models_pytorch, or your own. labels: its number of labels L.
    mean, std: the normalisation that it was trained with; ImageNet's by default. value_range: the values of black and
    white before mean and std. output: where the logits are in its output: a name, an index, or a function of the
    output; None takes a tensor, `.logits`, ["logits"], ["out"] or the first of a tuple. multiple: image sizes that it
    needs are multiples of this; images are padded at the right and at the bottom, and the logits cropped.
    """

    def __init__(
        self,
        module: nn.Module,
        labels: int,
        *,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        value_range: tuple[float, float] = (0.0, 1.0),
        output: Output = None,
        multiple: int = 1,
    ) -> None:
        super().__init__()
        check_count("labels", labels)
        check_count("multiple", multiple)
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}: pass a torch.nn.Module.")
        own = getattr(getattr(module, "config", None), "num_labels", None)
        if isinstance(own, int) and own != labels:
            raise ValueError(
                f"{type(module).__name__} was made for {own} labels, but labels={labels}: pass labels={own}, "
                "or give the network a new last layer."
            )
        self.module = module
        self.labels, self.output, self.multiple = labels, output, multiple
        self.mean, self.std, self.value_range = tuple(mean), tuple(std), tuple(value_range)
        self.normalise = Normalise(mean, std, value_range)

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments as plain JSON, without the network; a function as `output` is only named."""
        names = ("labels", "mean", "std", "value_range", "output", "multiple")
        values = {name: getattr(self, name) for name in names}
        if callable(self.output):
            name = getattr(self.output, "__qualname__", type(self.output).__qualname__)
            values["output"] = {"function": f"{self.output.__module__}.{name}"}
        return values

    def forward(self, image: Tensor) -> Tensor:
        x = self.normalise(image)
        height, width = image.shape[-2:]
        below, right = -height % self.multiple, -width % self.multiple
        if below or right:
            x = functional.pad(x, (0, right, 0, below), mode="replicate")
        weight = next(self.module.parameters(), x)
        if weight.is_floating_point():  # networks come in bfloat16, too
            x = x.to(weight.dtype)
        logits = self._logits(self.module(x))
        if logits.shape[-2:] != x.shape[-2:]:
            logits = functional.interpolate(logits, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return logits[..., :height, :width]

    def _logits(self, returned: Any) -> Tensor:
        logits = self._find(returned)
        name = type(self.module).__name__
        if not isinstance(logits, Tensor) or logits.dim() != 4:
            kind = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise ValueError(
                f"{name} gave {kind} where logits (B, {self.labels}, H, W) are needed: "
                "pass output=, a name, an index or a function of what the network returns."
            )
        if logits.shape[1] != self.labels:
            raise ValueError(
                f"{name} gave {logits.shape[1]} labels, but labels={self.labels}: "
                f"wrap it with labels={logits.shape[1]}, or give the network a new last layer."
            )
        return logits

    def _find(self, returned: Any) -> Any:
        """Return the part of `returned` that holds the logits, or `returned` itself."""
        if callable(self.output):
            return self.output(returned)
        if self.output is not None:
            if isinstance(self.output, int) or isinstance(returned, Mapping):
                return returned[self.output]
            return getattr(returned, self.output)
        if isinstance(returned, Tensor):
            return returned
        for name in LOGITS_NAMES:
            if isinstance(returned, Mapping) and name in returned:
                return returned[name]
            if hasattr(returned, name):
                return getattr(returned, name)
        return returned[0] if isinstance(returned, (tuple, list)) and returned else returned


wrap = Wrapped
"""The same as a verb: wrap(network, labels=21)."""
