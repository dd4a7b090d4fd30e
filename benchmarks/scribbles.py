"""What a CRF loss adds to a network that is taught by scribbles.

    python benchmarks/scribbles.py --data VOC2012 --weights lite0.safetensors --out runs/scribbles --device cuda

Images are those of VOC with animals (7 labels). A scribble is a stroke along the middle of each region of a training
mask, 3 pixels wide; all other pixels are void. The network `fast`, from ImageNet weights, is trained by

    partial   cross-entropy on the scribbles alone
    gated     the same + weight * GatedCRFLoss, edges inside a window
    dense     the same + weight * DenseCRFLoss, edges over the whole crop
    full      cross-entropy on the complete masks, for reference

with the same images, crops, steps and seeds. Weights are chosen in short runs ("choose ...") by mIoU on a tenth of the
training images, which no run trains on. Only the "final ..." runs are scored on the val split, by complete masks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from scipy import ndimage
from skimage.graph import MCP_Geometric
from skimage.morphology import skeletonize
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from deepmrf.data import Dataset, Item, open_data
from deepmrf.data.files import VOID, Bytes
from deepmrf.data.transforms import PADDING
from deepmrf.evaluation.metrics import SegmentationMetrics
from deepmrf.losses import DenseCRFLoss, GatedCRFLoss
from deepmrf.unary import build

SIDE = 256  # pixels along the longer side of an image, and along both sides of a crop
MIN_REGION = 0.003  # regions below this share of an image get no scribble
SCALES = (0.5, 2.0)  # at which crops show images; halving is as likely as doubling
DRAWS = 8  # numbers that decide on a crop: image, scale, row, column, flip, brightness, contrast, saturation
RATE, ENCODER_RATE, WEIGHT_DECAY, CLIP, AVERAGE_DECAY = 1.5e-3, 0.25, 1e-2, 5.0, 0.995
RAMP = (0.1, 0.3)  # a CRF loss sets in between these shares of the steps: probabilities mean little before
CANDIDATES = {"partial": (0.0,), "gated": (0.003, 0.01, 0.03), "dense": (1e-4, 5e-4, 2e-3)}  # weights to choose from


class Run(NamedTuple):
    """One training; kind is partial, gated, dense or full."""

    purpose: str
    kind: str
    seed: int = 0
    weight: float = 0.0

    @property
    def name(self) -> str:
        detail = f"{self.weight:g}" if self.purpose == "choose" else f"seed {self.seed}"
        return f"{self.purpose} {self.kind} {detail}"


class Images(NamedTuple):
    """N images at the top left of canvases of SIDE x SIDE, as uint8; `complete` are masks as large as their files."""

    images: Tensor  # (N, 3, SIDE, SIDE)
    masks: Tensor  # (N, SIDE, SIDE)
    scribbles: Tensor  # (N, SIDE, SIDE)
    sizes: Tensor  # (N, 2) height and width
    complete: list[Tensor]


def longest_path(skeleton: np.ndarray) -> np.ndarray:
    """Pixels (n, 2) of the way through a skeleton between the two ends that are farthest apart."""
    end = np.argwhere(skeleton)[0]
    for _ in range(2):  # from anywhere to an end, and from there to the other end
        paths = MCP_Geometric(np.where(skeleton, 1.0, np.inf))
        distance, _ = paths.find_costs([end])
        distance[~np.isfinite(distance)] = -1
        end = np.unravel_index(distance.argmax(), distance.shape)
    return np.array(paths.traceback(end))


def draw_scribbles(mask: Bytes, name: str) -> Bytes:
    """A mask (H, W) that is void but for one stroke in each region; strokes depend on the mask and the name alone."""
    rng = np.random.default_rng(list(hashlib.sha256(name.encode()).digest()))
    scribbles = np.full_like(mask, VOID)
    for label in np.unique(mask[mask != VOID]):
        regions, _ = ndimage.label(mask == label)
        for index, box in enumerate(ndimage.find_objects(regions), start=1):
            region = np.pad(regions[box] == index, 1)
            first, last = rng.uniform(0, 0.25, 2)  # shares that the stroke leaves out at its ends
            if region.sum() < max(MIN_REGION * mask.size, 9):
                continue
            path = longest_path(skeletonize(region))
            path = path[int(first * len(path)) : max(len(path) - int(last * len(path)), 1)]
            stroke = np.zeros_like(region)
            stroke[tuple(path.T)] = True
            stroke = ndimage.binary_dilation(stroke, np.ones((3, 3))) & region
            scribbles[box][stroke[1:-1, 1:-1]] = label
    return scribbles


def read_item(data: Dataset, item: Item) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Image (H, W, 3), mask and scribbles (H, W) with a longer side of SIDE, and the mask in its own size."""
    picture, complete = Image.fromarray(data.read_image(item)), data.read_mask(item)
    width, height = (max(1, round(n * SIDE / max(picture.size))) for n in picture.size)
    image = np.asarray(picture.resize((width, height), Image.Resampling.LANCZOS))
    mask = np.asarray(Image.fromarray(complete).resize((width, height), Image.Resampling.NEAREST))
    return image, mask, draw_scribbles(mask, item.name), complete


def read_images(data: Dataset, items: list[Item], device: str, workers: int) -> Images:
    """Read images, draw their scribbles, and put all on the device."""
    with ProcessPoolExecutor(workers) as pool:  # starts no process before it is used
        parts = list((pool.map if workers > 1 else map)(partial(read_item, data), items))
    images = np.full((len(items), SIDE, SIDE, 3), PADDING, np.uint8)
    masks, scribbles = np.full((2, len(items), SIDE, SIDE), VOID, np.uint8)
    for index, (image, mask, scribble, _) in enumerate(parts):
        cut = (index, slice(mask.shape[0]), slice(mask.shape[1]))
        images[cut], masks[cut], scribbles[cut] = image, mask, scribble
    tensors = [torch.from_numpy(array).to(device) for array in (images.transpose(0, 3, 1, 2).copy(), masks, scribbles)]
    sizes = torch.tensor([part[1].shape for part in parts], device=device)
    return Images(*tensors, sizes, [torch.tensor(part[3], device=device) for part in parts])


def crops(data: Images, masks: Tensor, draws: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Crops by draws (B, DRAWS): recoloured and plain images (B, 3, *) in [0, 1], labels (B, *), inside (B, *)."""
    index = (draws[:, 0] * len(masks)).long()
    scale = SCALES[0] * (SCALES[1] / SCALES[0]) ** draws[:, 1, None]
    size = data.sizes[index].float()
    offset = draws[:, 2:4] * (size * scale - SIDE)  # an image that is smaller than the crop lies anywhere in it
    pixel = torch.arange(SIDE, device=draws.device) + 0.5
    rows, columns = ((pixel + offset[:, axis, None]) / scale for axis in (0, 1))  # (B, SIDE), in pixels of the image
    columns = torch.where(draws[:, 4, None] < 0.5, columns, size[:, 1, None] - columns)
    inside = ((rows >= 0) & (rows < size[:, :1]))[:, :, None] & ((columns >= 0) & (columns < size[:, 1:]))[:, None]
    grid = torch.stack(torch.broadcast_tensors(columns[:, None], rows[:, :, None]), dim=3) * (2 / SIDE) - 1
    sample = partial(functional.grid_sample, grid=grid, padding_mode="border", align_corners=False)
    grey = torch.tensor(PADDING, device=draws.device).view(3, 1, 1) / 255
    plain = torch.where(inside[:, None], sample(data.images[index].float() / 255), grey)
    labels = torch.where(inside, sample(masks[index, None].float(), mode="nearest")[:, 0].long(), VOID)
    brightness, contrast, saturation = (0.6 + 0.8 * draws[:, 5:]).T[..., None, None, None]
    colours = plain.mean(1, keepdim=True).lerp(plain, saturation)
    colours = (colours.mean((1, 2, 3), keepdim=True).lerp(colours, contrast) * brightness).clamp(0, 1)
    return torch.where(inside[:, None], colours, grey), plain, labels, inside


def new_optimiser(network: nn.Module, fused: bool) -> torch.optim.Optimizer:
    """AdamW; no weight decay for biases and norms, a lower rate for the pretrained encoder."""
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in network.named_parameters():
        rate = RATE * (ENCODER_RATE if name.startswith("encoder.") else 1)
        groups.setdefault((rate, WEIGHT_DECAY if parameter.dim() > 1 else 0.0), []).append(parameter)
    return torch.optim.AdamW([{"params": p, "lr": r, "weight_decay": d} for (r, d), p in groups.items()], fused=fused)


def train(run: Run, data: Images, labels: int, steps: int, given: argparse.Namespace) -> tuple[nn.Module, float]:
    """Train by the loss of a run; return the moving average of the network, and seconds per step with that loss."""
    torch.manual_seed(run.seed)
    draws = torch.rand(steps, given.batch, DRAWS).to(given.device)  # all crops of the run, the same for each loss
    network = build("fast", labels, dropout=0.1)
    if given.weights:
        network.load_imagenet(given.weights)
    network = network.to(given.device, memory_format=torch.channels_last).train()
    average, optimiser = deepcopy(network).eval(), new_optimiser(network, given.device.startswith("cuda"))
    schedule = LambdaLR(optimiser, lambda step: min(15 * (step + 1) / steps, (1 - step / steps) ** 0.9))
    gated = GatedCRFLoss(window=21, nonnegative=False)
    dense = DenseCRFLoss(position_width=50, scale=given.scale, nonnegative=False)
    crf, masks = {"gated": gated, "dense": dense}.get(run.kind), data.masks if run.kind == "full" else data.scribbles
    loss, timed_from = torch.zeros(()), int(RAMP[1] * steps)
    for step in range(steps):
        if step == timed_from:  # the steps before compile kernels, and have less of the CRF loss
            float(loss.detach())  # waits for the GPU
            start = time.perf_counter()
        image, plain, target, inside = crops(data, masks, draws[step])
        with torch.autocast(torch.device(given.device).type, torch.bfloat16):
            log_p = network(image).float().log_softmax(1)
        loss = functional.nll_loss(log_p, target, ignore_index=VOID)
        share = min((step / steps - RAMP[0]) / (RAMP[1] - RAMP[0]), 1.0)
        if crf is not None and share > 0 and step % given.every == 0:
            loss = loss + given.every * share * run.weight * crf(log_p.exp(), plain, inside)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimiser.step()
        schedule.step()
        with torch.no_grad():  # weights are averaged, the statistics of batch norm copied
            share_of_new = 1 - min(AVERAGE_DECAY, (1 + step) / (10 + step))
            torch._foreach_lerp_(list(average.parameters()), list(network.parameters()), share_of_new)
            torch._foreach_copy_(list(average.buffers()), list(network.buffers()))
    float(loss.detach())
    return average, (time.perf_counter() - start) / (steps - timed_from)


@torch.no_grad()
def score(network: nn.Module, data: Images, names: tuple[str, ...]) -> dict[str, Any]:
    """Score a network on complete masks, each in its own size."""
    metrics = SegmentationMetrics(len(names), VOID, names).to(data.images.device)
    for first in range(0, len(data.images), 20):
        for index, maps in enumerate(network(data.images[first : first + 20]), start=first):
            (height, width), mask = data.sizes[index].tolist(), data.complete[index]
            maps = functional.interpolate(maps[None, :, :height, :width], mask.shape, mode="bilinear")
            metrics.update(maps.argmax(1), mask[None])
    return metrics.compute().to_dict()


def print_table(results: dict[str, Any]) -> None:
    """Print val mIoU of each loss, mean and standard deviation over seeds, and the boundary accuracy."""
    print(f"\n{'val':<10}{'weight':>9}{'mIoU':>8}{'±':>7}{'gain':>8}{'BA':>8}   mIoU by seed")
    baseline = math.nan
    for kind in ("partial", "gated", "dense", "full"):
        rows = [row for name, row in results.items() if name.startswith(f"final {kind} ")]
        if rows:
            scores, boundary = ([100 * (row[key] or 0) for row in rows] for key in ("miou", "ba"))
            mean, spread = np.mean(scores), np.std(scores, ddof=1) if len(rows) > 1 else 0
            baseline = mean if kind == "partial" else baseline
            print(f"{kind:<10}{rows[0]['weight']:>9g}{mean:8.2f}{spread:7.2f}{mean - baseline:+8.2f}", end="")
            print(f"{np.mean(boundary):8.2f}   {' '.join(f'{value:.2f}' for value in scores)}")


def chosen_weight(kind: str, results: dict[str, Any]) -> float | None:
    """The weight that is best on held-out images; None until all were tried."""
    weights = CANDIDATES.get(kind, (0.0,))
    scores = [results.get(Run("choose", kind, 0, weight).name, {}).get("miou") for weight in weights]
    return None if len(weights) > 1 and None in scores else weights[scores.index(max(scores))]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="VOC2012 with SegmentationClassAug and the list trainaug")
    parser.add_argument("--weights", type=Path, help="ImageNet weights of EfficientNet-Lite0; default: random ones")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for results.json; runs that are in it are not repeated"
    )
    parser.add_argument("--earlier", type=Path, help="a results.json to go on from, if --out has none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", nargs="+", default=["*"], help="names of runs, such as 'choose*' 'final dense*'")
    parser.add_argument("--images", type=int, default=2000, help="images of trainaug; a tenth of them is held out")
    parser.add_argument("--steps", type=int, default=1200, help="of a final run; choosing takes 2/5 of them")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--scale", type=float, default=0.5, help="by which DenseCRFLoss shrinks its maps")
    parser.add_argument("--every", type=int, default=1, help="apply a CRF loss at each n-th step, n times as strong")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run that would end later than this")
    parser.add_argument("--workers", type=int, default=1, help="processes that read images and draw scribbles")
    parser.add_argument("--quick", action="store_true", help="10 images, 3 steps, one seed: does it run at all?")
    given = parser.parse_args(arguments)
    if given.quick:
        given.images, given.steps, given.batch, given.seeds = 10, 3, 2, [0]
    return given


def main(arguments: list[str] | None = None) -> None:
    given, start = parse(arguments), time.perf_counter()
    torch.backends.cudnn.benchmark = True
    path = given.out / "results.json"
    source = path if path.exists() else given.earlier
    results: dict[str, Any] = json.loads(source.read_text())["runs"] if source and source.exists() else {}
    given.out.mkdir(parents=True, exist_ok=True)
    data, val = (open_data(f"animals:{given.data}", part) for part in ("trainaug", "val"))
    items = sorted(data, key=lambda item: hashlib.sha256(item.name.encode()).digest())[: given.images]
    held_out = max(1, len(items) // 10)
    parts = {"train": items[held_out:], "choose": items[:held_out], "final": list(val)[: given.images]}
    images = {part: read_images(data, items, given.device, given.workers) for part, items in parts.items()}
    share = float((images["train"].scribbles != VOID).sum() / images["train"].sizes.prod(1).sum())
    counts = ", ".join(f"{len(items)} {part}" for part, items in parts.items())
    print(f"Images: {counts}; {share:.2%} of the pixels scribbled; {time.perf_counter() - start:.0f} s.", flush=True)
    runs = [Run("choose", kind, 0, weight) for kind, weights in CANDIDATES.items() for weight in weights]
    runs += [Run("final", kind, seed) for seed in given.seeds for kind in ("partial", "gated", "dense")]
    for run in [*runs, Run("final", "full", given.seeds[0])]:
        name, began = run.name, time.perf_counter()
        if name in results or not any(fnmatch(name, pattern) for pattern in given.runs):
            continue
        weight = run.weight if run.purpose == "choose" else chosen_weight(run.kind, results)
        steps = given.steps if run.purpose == "final" else math.ceil(given.steps * 2 / 5)
        known = [row["seconds_per_step"] for other, row in results.items() if f" {run.kind} " in other]
        if weight is None or began - start + max(known, default=0) * steps > 60 * given.minutes - 5:
            print(f"{name} is left out: " + ("not all weights were tried." if weight is None else "no time is left."))
            continue
        network, seconds = train(run._replace(weight=weight), images["train"], len(data.labels), steps, given)
        scores = score(network, images[run.purpose], data.labels.names)
        figures = f"{1000 * seconds:.1f} ms a step, {time.perf_counter() - began:.0f} s in all"
        print(f"{name:<22} weight {weight:<6g} mIoU {100 * scores['miou']:.2f}, {figures}", flush=True)
        results[name] = {"weight": weight, "steps": steps, "seconds_per_step": seconds, **scores}
        settings = {**vars(given), "scribbled_share": share, "torch": torch.__version__}
        path.write_text(json.dumps({"settings": settings, "runs": results}, indent=1, default=str) + "\n")
    print_table(results)


if __name__ == "__main__":
    main()
