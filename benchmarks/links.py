"""Choose what the pixel on a trajectory weighs in a model's part for video: steadiness and accuracy by weight.

    python benchmarks/links.py camvid --data camvid:PATH --weights 0.5 1 2 -o links.json
    python benchmarks/links.py street --data camvid:PATH --weights 0.5 1 2          # 19 labels, mapped to CamVid's 11
    python benchmarks/links.py street --video drive.mp4 --most 40 --weights 0.5 1 2  # no labels: consistency alone
    python benchmarks/links.py animals --stills animals:PATH --every 3               # images that move and flicker

A row is the network alone, the model frame by frame, or linked with these weights of the frames one and two away, all
along the same flow. Every row shares the network's output. `--temperature` is that of the mean field over frames.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.progress import Progress
from torch import Tensor
from torch.nn import functional

from deepmrf.data import open_data
from deepmrf.evaluation.videos import VideoModel, evaluate_video
from deepmrf.flow import Flow
from deepmrf.models.names import open_model
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.models.video_part import VideoPart
from deepmrf.training.motion import moving_clip

CAMVID_OF_CITYSCAPES = {
    "sky": "sky", "building": "building", "wall": "building", "pole": "pole", "road": "road", "sidewalk": "pavement",
    "vegetation": "tree", "terrain": "tree", "traffic sign": "sign", "traffic light": "sign", "fence": "fence",
    "car": "car", "truck": "car", "bus": "car", "train": "car", "person": "pedestrian", "rider": "bicyclist",
    "motorcycle": "bicyclist", "bicycle": "bicyclist",
}  # fmt: skip


CLIP_FRAMES = 9


@dataclass(frozen=True)
class MappedModel(VideoModel):
    """A model whose labels are those of the data by another name."""

    ids: tuple[int, ...] = ()
    """The data's label of each label of the model."""
    labels: int = 0

    def __call__(self, log_p: Tensor, frames: Tensor, flow: Flow | None, wanted: slice | None = None) -> Tensor:
        labels = super().__call__(log_p, frames, flow, wanted).argmax(1)
        mapped = torch.tensor(self.ids, device=labels.device)[labels]
        return functional.one_hot(mapped, self.labels).movedim(-1, 1).float()


def candidates(model: DeepParsingNetwork, weights: list[float], temperature: float | None) -> list[VideoModel]:
    """The network alone, the model frame by frame, and linked with each weight."""
    rows = [VideoModel("network alone", model, "network"), VideoModel("frame by frame", model, "rigid")]
    for weight in weights:
        linked = copy.copy(model)
        linked._modules = dict(model._modules)
        linked.video = copy.deepcopy(model.video)
        assert linked.video is not None
        linked.video.trajectory_weights.fill_(weight)
        if temperature is not None:
            linked.video.temperature = temperature
        rows.append(VideoModel(f"linked, {weight:g}", linked.for_video(), "linked"))
    return rows


def frames_of(video: Path, count: int, width: int, folder: Path) -> str:
    """Write frames of a video as a CamVid data set with next to no labels; return its name for open_data."""
    import av

    for name in ("val", "valannot"):
        (folder / name).mkdir(parents=True)
    with av.open(str(video)) as container:
        for number, frame in zip(range(count), container.decode(video=0), strict=False):
            image = frame.to_image()
            image = image.resize((width, round(width * image.height / image.width)), Image.Resampling.BOX)
            image.save(folder / "val" / f"drive_{number:05}.png")
            mask = np.full((image.height, image.width), 11, np.uint8)
            mask[0, 0] = 0  # a data set must have labels; the mIoU of these pixels says nothing
            Image.fromarray(mask).save(folder / "valannot" / f"drive_{number:05}.png")
    return f"camvid:{folder}"


def clips_of(source: str, every: int, folder: Path) -> str:
    """Make a clip of every so many images of val, which moves and flickers; return their name for open_data."""
    images = open_data(source, "val")
    kept = images.subset(list(images)[::every])
    (folder / "labels.json").write_text(json.dumps(images.labels.to_dict() | {"ignore": 255}))
    for number, item in enumerate(kept):
        image, mask = images.read(item)
        assert mask is not None, f"{item.name} has no labels"
        frames, masks, _ = moving_clip(np.random.default_rng([0, number]), image, mask, CLIP_FRAMES, 8.0, 1.0)
        for t, (frame, labels) in enumerate(zip(frames, masks, strict=True)):
            for kind, picture in (("images", frame), ("masks", labels)):
                path = folder / kind / "val" / f"clip{number:03}" / f"{t:05}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(picture).save(path)
    return f"folder:{folder}"


def main() -> None:
    """Measure every row and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model for images")
    parser.add_argument("--data", help="CamVid: camvid:PATH")
    parser.add_argument("--video", type=Path, help="a video without labels instead")
    parser.add_argument("--stills", help="labelled images instead, of which clips are made")
    parser.add_argument("--every", type=int, default=1, help="one of so many of these")
    parser.add_argument("--width", type=int, default=480, help="pixels that its frames are shrunk to")
    parser.add_argument("--most", type=int, default=None, help="so many frames from the first on")
    parser.add_argument("--weights", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0])
    parser.add_argument("--temperature", type=float, default=None, help="instead of the part's own")
    parser.add_argument("-o", "--out", type=Path, default=None, help="JSON of all scores")
    given = parser.parse_args()
    model = open_model(given.model).eval()
    if model.video is None:
        model.video = VideoPart(5)
    with tempfile.TemporaryDirectory() as folder:
        if given.stills:
            source = clips_of(given.stills, given.every, Path(folder))
        else:
            source = given.data or frames_of(given.video, given.most or 10**6, given.width, Path(folder))
        data = open_data(source, "val")[: given.most]
        rows = candidates(model, given.weights, given.temperature)
        if model.labels.names != data.labels.names:
            names = list(data.labels.names)
            ids = tuple(names.index(CAMVID_OF_CITYSCAPES[name]) for name in model.labels.names)
            rows = [MappedModel(row.name, row.model, row.mode, ids, len(names)) for row in rows]
        with Progress() as bar:
            task = bar.add_task("frames", total=len(data))
            scores = evaluate_video(rows, data, progress=lambda done, _: bar.update(task, completed=done))
    for name, score in scores.items():
        miou = "" if given.video else f"mIoU {100 * score.scores.miou:6.2f}  "
        print(f"{name:18}  {miou}consistency {100 * score.consistency:6.2f}")
    if given.out is not None:
        given.out.write_text(json.dumps({name: score.to_dict() for name, score in scores.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
