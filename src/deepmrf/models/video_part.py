"""VideoPart: what a model for images needs besides, to segment the frames of a video together.

    model.video = VideoPart.of(clips.mean_field)     # the links that a model for clips has learned
    model.for_video()                                # a model for clips: the same network, a mean field over frames

A mean field that cannot be inflated, such as one over all pairs of pixels, labels each frame by itself, and one that
only links frames stands behind it.

It holds the weights of other frames by their distance in time (`MeanField.over_time`), the number of frames that a
window spans, the temperature for videos, and whether the network may compute in bfloat16 there. The rest is the model's
own, so that images and videos share all else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepmrf.layers import MeanField
from deepmrf.layers.inputs import check_temperature
from deepmrf.ops.window import reaches


class VideoPart(nn.Module):
    """The weights of other frames. They are buffers: training the model for images leaves them alone.

    frames: how many frames the window of a pixel spans, at least 2. temperature: that of the mean field over frames.
    allows_bfloat16: the network loses little in bfloat16, so that `deepmrf predict` uses it where it is faster.
    """

    frame_weights: Tensor
    trajectory_weights: Tensor

    def __init__(self, frames: int, temperature: float = 1.0, allows_bfloat16: bool = False) -> None:
        super().__init__()
        if isinstance(frames, bool) or not isinstance(frames, int) or frames < 2:
            raise ValueError(f"frames={frames!r} must be how many frames a window spans, at least 2.")
        self.frames, self.temperature, self.allows_bfloat16 = frames, check_temperature(temperature), allows_bfloat16
        distances = max(reaches([frames])[0])
        for name in ("frame_weights", "trajectory_weights"):
            self.register_buffer(name, torch.zeros(distances))

    @classmethod
    def of(cls, mean_field: MeanField | None) -> VideoPart:
        """The part for video of a mean field over frames that began as `inflate(frames, 1)` and learned links alone."""
        contexts = None if mean_field is None else mean_field.label_contexts
        if mean_field is None or not mean_field.triple_penalty.temporal or (contexts and contexts.size[0] > 1):
            raise ValueError(
                "Only the links of a mean field over frames (temporal), whose label contexts see single frames, can "
                "become the part for video: inflate the model with context_frames=1, and train its links."
            )
        part = cls(mean_field.triple_penalty.window[0], mean_field.temperature)
        part.frame_weights.copy_(mean_field.triple_penalty.frame_weights.detach())
        part.trajectory_weights.copy_(mean_field.trajectory_weights.detach())
        return part

    @property
    def settings(self) -> dict[str, Any]:
        """The constructor's arguments as plain JSON."""
        settings = {"frames": self.frames, "temperature": self.temperature}
        return settings | ({"allows_bfloat16": True} if self.allows_bfloat16 else {})

    @torch.no_grad()
    def links_alone(self, mean_field: MeanField) -> MeanField:
        """A mean field over frames that does nothing but link them, to stand behind one that cannot be inflated."""
        if bool(self.frame_weights.any()):
            kernel = mean_field.triple_penalty.kernel
            raise ValueError(f"kernel={kernel!r} sees single frames: set frame_weights of the part for video to zero.")
        links = MeanField(
            mean_field.labels,
            dims=3,
            temporal=True,
            window=[self.frames, 1, 1],
            features=0,
            contexts=0,
            gate=False,
            unary=mean_field.unary,
            temperature=self.temperature,
        ).to(mean_field.triple_penalty.scale)
        links.triple_penalty.frame_weights.zero_()
        links.trajectory_weights.copy_(self.trajectory_weights)
        return links.requires_grad_(False)

    @torch.no_grad()
    def inflated(self, mean_field: MeanField) -> MeanField:
        """A mean field for images as one over frames, with these weights."""
        clips = mean_field.inflate(self.frames, 1)
        clips.temperature = self.temperature
        clips.triple_penalty.frame_weights.copy_(self.frame_weights)
        clips.trajectory_weights.copy_(self.trajectory_weights)
        return clips
