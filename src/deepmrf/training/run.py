"""A training run and its folder: what it saves, what it resumes from, what it measures and reports.

recipe.json         the recipe with all its values
state.safetensors   model, moving average, optimiser, random state; stage, step and scores in the header
metrics.json        scores of every stage on the validation split
tensorboard/        loss and mIoU, if TensorBoard is installed
flow/               estimated optical flow, for clips
model/              the trained model
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepmrf.data.dataset import Dataset
from deepmrf.data.extras import install_line
from deepmrf.data.progress import Progress
from deepmrf.data.writing import write_text
from deepmrf.evaluation.evaluate import evaluate
from deepmrf.evaluation.metrics import Scores
from deepmrf.evaluation.videos import VideoModel, evaluate_video
from deepmrf.models.folder import is_half
from deepmrf.models.names import find_folder
from deepmrf.models.parsing_network import Card, DeepParsingNetwork, write_model
from deepmrf.predict.scales import predictor
from deepmrf.training import checkpoint
from deepmrf.training.clips import ClipSource
from deepmrf.training.recipe import Recipe, Stage
from deepmrf.training.samples import Images
from deepmrf.training.stages import learns_mrf_alone, planned_stages
from deepmrf.training.start import METRICS_FILE, RECIPE_FILE, STATE_FILE, recipe_for_card, with_video_part
from deepmrf.unary.own import OwnNetwork

if TYPE_CHECKING:
    from accelerate import Accelerator

REPORT_EVERY = 10
"""Steps between reports of the loss."""
MAX_NAN_LOSSES = 3
"""Reports in a row whose loss is NaN before a run stops."""

Message = Callable[[str], None]
"""Called with a sentence for the user."""
TrainProgress = Callable[[str, int, int, dict[str, float]], None]
"""Called with (name of a stage or other work, steps done, steps in all, numbers to show)."""


@dataclass
class Run:
    """The parts and the state of a training run."""

    recipe: Recipe
    folder: Path
    model: DeepParsingNetwork
    average: DeepParsingNetwork
    """The moving average of the model, or the model itself."""
    accelerator: Accelerator
    images: Images
    """Images to learn from."""
    held_out: Images | None
    """Images to learn the MRF from, if the recipe holds some out."""
    clips: ClipSource | None
    """Clips to learn from, for stages over clips."""
    val: Dataset
    """Images to measure on."""
    message: Message
    train_progress: TrainProgress
    scores: dict[str, Any] = field(default_factory=dict)
    """Scores by stage."""
    best_miou: float | None = None
    """The best so far; None before the first evaluation."""
    steps_done: int = 0
    """Steps of all stages so far."""
    nan_losses: int = 0
    """Number of reports in a row whose loss was NaN."""
    cached_log_p: list[Tensor] = field(default_factory=list)
    """The network's output (L, H, W) for the first images of a stage, while the network is fixed."""
    cached_images: Images | None = None
    """The images that these are of."""
    cached_clips: dict[str, Tensor] = field(default_factory=dict)
    """The network's output (L, H, W) for the frames of fixed clips by name, while the network is fixed."""
    network: OwnNetwork | None = None
    """A network of the user's own, if the model has one."""
    tensorboard: Any = None
    """TensorBoard's writer, if it is installed."""

    def images_of(self, stage: Stage) -> Images:
        """Return the images that a stage learns from."""
        if self.held_out is not None and learns_mrf_alone(stage) and stage.held_out:
            return self.held_out
        return self.images

    def open_folder(self) -> None:
        """Write the recipe and begin TensorBoard's events."""
        if self.accelerator.is_main_process:
            write_text(self.folder / RECIPE_FILE, json.dumps(asdict(self.recipe), indent=1) + "\n")
            self.tensorboard = _tensorboard(self.folder / "tensorboard")
            if self.tensorboard is None:
                self.message(f"TensorBoard is not installed, so there are no curves: {install_line('train')}")

    def save_model(self) -> None:
        """Write the trained model, with its scores and recipe."""
        if self.accelerator.is_main_process:
            recipe = recipe_for_card(self.recipe, self.model.card.recipe)
            self.average.card = Card({"val": self.scores, "seed": self.recipe.seed}, recipe)
            model, half = self.average, False
            if self.recipe.clips.attach:
                model = with_video_part(self.recipe, model, self.network)
                half = is_half(find_folder(self.recipe.start))
            write_model(model, self.folder / "model", half)
            if self.tensorboard is not None:
                self.tensorboard.close()

    def save_state(self, stage: int, step: int, optimiser: Optimizer | None) -> None:
        """Write a checkpoint: the run is before step `step` of stage number `stage`."""
        if not self.accelerator.is_main_process:
            return
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        if self.recipe.ema:
            tensors |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
        if optimiser is not None:
            state = checkpoint.optimiser_tensors(optimiser, self.model)
            tensors |= {f"optimiser.{name}": value for name, value in state.items()}
        tensors["random"] = torch.get_rng_state()
        facts = {"stage": stage, "step": step, "scores": self.scores, "best": self.best_miou}
        if self.model.mean_field is not None:
            facts["temperature"] = self.model.mean_field.temperature  # that of images held out is no tensor
        checkpoint.write_checkpoint(self.folder / STATE_FILE, tensors, facts)

    def read_state(self) -> tuple[int, int, dict[str, Tensor]]:
        """Read the checkpoint, if there is one; return stage, step, and the tensors of a stage that has begun."""
        path = self.folder / STATE_FILE
        if not path.exists():
            return 0, 0, {}
        tensors, facts = checkpoint.read_checkpoint(path)
        self.scores, self.best_miou = facts["scores"], facts["best"]
        self.load_models(tensors)
        for model in (self.model, self.average):
            if model.mean_field is not None:
                model.mean_field.temperature = facts.get("temperature", model.mean_field.temperature)
        torch.set_rng_state(tensors["random"])
        if facts["stage"] == len(planned_stages(self.recipe)):
            self.message("All stages of this run are done: nothing is left to train.")
        else:
            self.message(f"Continuing at stage {facts['stage'] + 1}, step {facts['step']}.")
        return facts["stage"], facts["step"], tensors if facts["step"] else {}

    def load_models(self, tensors: dict[str, Tensor]) -> None:
        """Set model and moving average to those of a checkpoint."""
        for prefix, model in (("model.", self.model), ("average.", self.average)):
            state = _without_prefix(tensors, prefix)
            if state:
                model.load_state_dict(state)

    def load_optimiser(self, tensors: dict[str, Tensor], optimiser: Optimizer) -> None:
        """Set the optimiser and the random state to those of a checkpoint."""
        checkpoint.restore_optimiser(optimiser, self.model, _without_prefix(tensors, "optimiser."))
        torch.set_rng_state(tensors["random"].cpu())

    def progress(self, name: str) -> Progress:
        """Return the Progress of some work of the run."""
        return lambda done, total: self.train_progress(name, done, total or 0, {})

    def report(self, stage: Stage, step: int, loss: Tensor, steps_per_second: float) -> None:
        """Show and log the loss every REPORT_EVERY steps; raise a FloatingPointError if it stays NaN."""
        if step % REPORT_EVERY and step + 1 < stage.steps:
            return
        value = float(loss.detach())
        self.nan_losses = self.nan_losses + 1 if math.isnan(value) else 0
        if self.nan_losses == MAX_NAN_LOSSES:
            raise FloatingPointError(f"The loss of stage {stage.name} is NaN again at step {step}: lower its rate.")
        if self.tensorboard is not None:
            self.tensorboard.add_scalar(f"{stage.name}/loss", value, step)
        measured = {} if self.best_miou is None else {"mIoU": 100 * self.best_miou}
        numbers = {"loss": value, **measured, "steps/s": steps_per_second}
        self.train_progress(stage.name, step + 1, stage.steps, numbers)

    def evaluate(self, name: str, alone: bool = False) -> dict[str, Any]:
        """Measure the model, or its network alone, on the validation split; write and return its scores."""
        self.average.eval()
        with self.accelerator.autocast():
            scores, plain = self._measure(name, alone)
        self.best_miou = max(self.best_miou or 0.0, scores.miou)
        self.message(f"{name}: mIoU {100 * scores.miou:.2f} on {self.recipe.data.val_split} ({len(self.val)} images).")
        label = only_prediction(scores)
        if label is not None:
            self.message(f"The network predicts {label} alone so far: take more steps, or a higher rate.")
        if self.tensorboard is not None:
            self.tensorboard.add_scalar("mIoU, network alone" if alone else "mIoU", scores.miou, self.steps_done)
            self.tensorboard.flush()
        if self.accelerator.is_main_process:
            content = {"seed": self.recipe.seed, "val": {**self.scores, name: plain}}
            write_text(self.folder / METRICS_FILE, json.dumps(content, indent=1) + "\n")
        return plain

    def _measure(self, name: str, alone: bool) -> tuple[Scores, dict[str, Any]]:
        """Return the scores on images or videos, and the same as plain values."""
        device, progress = self.accelerator.device, self.progress(f"evaluating {name}")
        share = (self.accelerator.process_index, self.accelerator.num_processes)
        if self.clips is None:
            predict = predictor(self.average.log_unary if alone else self.average)
            scores = evaluate(predict, self.val, device, progress, share)
            return scores, scores.to_dict()
        mode: Literal["network", "rigid", "linked"]
        mode = "network" if alone else "rigid" if self.recipe.clips.flow == "none" else "linked"
        video = evaluate_video([VideoModel(name, self.average, mode)], self.val, device, progress, share)[name]
        return video.scores, video.to_dict()


def only_prediction(scores: Scores) -> str | None:
    """The label that all pixels are predicted to be, where that is wrong of some; None if there are several."""
    right = [label for label, iou in enumerate(scores.iou_per_class) if iou > 0]
    if len(right) != 1 or scores.pixel_accuracy == 1:
        return None
    [label] = right
    found = scores.accuracy_per_class[label] == 1
    everywhere = scores.iou_per_class[label] == scores.pixel_accuracy  # the same pixels are right, of equally many
    return scores.names[label] if found and everywhere else None


def _without_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _tensorboard(folder: Path) -> Any:
    """Return a writer of TensorBoard's events; None if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))
