"""What a learned 3-D MRF adds to a small 3-D U-Net: the hippocampus in MRI, its anterior (1) and posterior part (2).

    python benchmarks/hippocampus.py --data PATH --out DIR --device cuda

PATH holds images/ and labels/ with NIfTI files of equal names (Task04 of the Medical Segmentation Decathlon). By the
seed, 3/5 of the volumes train the U-Net, 1/5 teach the MRF and 1/5 are held out to report. `fit` chooses by
cross-validation on the second part; the third is scored once, at the end. The U-Net never saw the second part either:
on its own training volumes it errs too rarely to learn from.

DIR gets the U-Net (unary.safetensors; if it is there already it is taken as it is), predictions as .npz, the refined
label maps as .nii.gz and results.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from deepmrf.data.dataset import lookup_table
from deepmrf.data.files import VOID
from deepmrf.data.volumes import read_volume, read_volume_mask, stem, volumes_in
from deepmrf.evaluation.dice import volume_dice
from deepmrf.layers import MeanField
from deepmrf.refine.apply import refine
from deepmrf.refine.fit import fit
from deepmrf.refine.report import FitReport
from deepmrf.refine.settings import VOLUME_SETTINGS
from deepmrf.unary import build

LABELS = 3
CROP = (40, 56, 40)
"""What the U-Net is trained on: about a whole volume."""
Pair = tuple[Tensor, Tensor]
"""image (D, H, W) with mean 0 and deviation 1, mask (D, H, W) of int64."""


def parts(data: Path, seed: int, limit: int | None) -> dict[str, list[Path]]:
    """Images by what they are for."""
    paths = volumes_in(data / "images")
    order = np.random.default_rng(seed).permutation(len(paths))[:limit]
    shuffled = [paths[i] for i in order]
    first, second = round(0.6 * len(shuffled)), round(0.8 * len(shuffled))
    return {"train": shuffled[:first], "fit": shuffled[first:second], "test": shuffled[second:]}


def read(path: Path, data: Path) -> Pair:
    values = read_volume(path).values.astype(np.float32)
    mask, _ = read_volume_mask(data / "labels" / path.name, lookup_table({label: label for label in range(LABELS)}))
    return torch.from_numpy((values - values.mean()) / values.std()), torch.from_numpy(mask).long()


def stacked(pairs: list[Pair], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """All volumes in one tensor each, (N, 1, D, H, W), and their sizes (N, 3); beyond a volume is void."""
    sizes = torch.tensor([tuple(mask.shape) for _, mask in pairs])
    largest = tuple(int(n) for n in sizes.max(0).values)
    images, masks = torch.zeros(len(pairs), 1, *largest), torch.full((len(pairs), 1, *largest), float(VOID))
    for number, (image, mask) in enumerate(pairs):
        cut = (number, 0, *(slice(0, n) for n in mask.shape))
        images[cut], masks[cut] = image, mask.float()
    return images.to(device), masks.to(device), sizes.to(device)


def views(images: Tensor, masks: Tensor, sizes: Tensor) -> Pair:
    """Random views of a batch: turned by up to about 15 degrees, scaled by up to 15 per cent, shifted, other contrast.

    Never mirrored: all volumes show the hippocampus of one side.
    """
    count, device = len(images), images.device

    def uniform(*shape: int) -> Tensor:
        return 2 * torch.rand(count, *shape, device=device) - 1

    turn = torch.linalg.matrix_exp(0.26 * (lambda a: a - a.transpose(1, 2))(uniform(3, 3)) / 2)
    turn = turn * (1 + 0.15 * uniform(1, 3))
    axes = [torch.arange(n, device=device) - (n - 1) / 2 for n in CROP]
    points = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 2)  # (P, 3), voxels from the centre
    spare = (sizes - torch.tensor(CROP, device=device)).abs() / 2 + 2
    centre = (sizes - 1) / 2 + uniform(3) * spare
    points = points @ turn.transpose(1, 2) + centre[:, None]  # (B, P, 3)
    padded_size = torch.tensor(images.shape[2:], device=device)
    outside = ((points < -0.5) | (points > sizes[:, None] - 0.5)).any(-1).view(count, *CROP)
    inside = torch.minimum(points.clamp_min(0), sizes[:, None] - 1.0)  # beyond a volume its border goes on
    grid = (2 * inside / (padded_size - 1) - 1).flip(-1).view(count, *CROP, 3)
    image = functional.grid_sample(images, grid, mode="bilinear", align_corners=True)
    mask = functional.grid_sample(masks, grid, mode="nearest", align_corners=True)[:, 0].round().long()
    mask[outside] = VOID
    shape = (1, 1, 1, 1)
    image = image * (1 + 0.2 * uniform(*shape)) + 0.2 * uniform(*shape)
    image = image.sign() * image.abs() ** (1 + 0.2 * uniform(*shape))
    return image + 0.1 * torch.rand(count, *shape, device=device) * torch.randn_like(image), mask


def loss_of(logits: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy and soft Dice of the foreground."""
    known = (mask != VOID)[:, None]
    truth = functional.one_hot(mask.where(known[:, 0], 0), LABELS).movedim(-1, 1) * known
    share = logits.softmax(1) * known
    both, either = ((x[:, 1:]).sum((0, 2, 3, 4)) for x in (share * truth, share + truth))
    return functional.cross_entropy(logits, mask, ignore_index=VOID) + 1 - (2 * both / (either + 1)).mean()


def train_unary(
    pairs: list[Pair], size: dict[str, int], steps: int, batch: int, device: str, seed: int
) -> dict[str, Tensor]:
    """A U-Net's weights, averaged over the last steps of training."""
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = True  # here all sizes are one
    net = build("volume", LABELS, **size).to(device, memory_format=torch.channels_last_3d).train()
    rate = 3e-3
    optimiser = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=1e-2)
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    everything = stacked(pairs, device)
    start = time.perf_counter()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min((step + 1) / 50, (1 + math.cos(math.pi * step / steps)) / 2)
        chosen = torch.randint(len(pairs), (batch,), device=device)
        image, mask = views(*(x[chosen] for x in everything))
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = net(image.contiguous(memory_format=torch.channels_last_3d))
        loss = loss_of(logits.float(), mask)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        average.update_parameters(net)
        if (step + 1) % max(1, steps // 10) == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, {time.perf_counter() - start:.0f} s", flush=True)
    return {name: value.cpu().contiguous() for name, value in average.module.state_dict().items()}


@torch.no_grad()
def predict(
    weights: dict[str, Tensor], size: dict[str, int], paths: list[Path], data: Path, to: Path, device: str
) -> None:
    """Write each volume's log-probabilities (L, D, H, W) as to/NAME.npz."""
    torch.backends.cudnn.benchmark = False  # every volume has its own size
    net = build("volume", LABELS, **size).to(device).eval()
    net.load_state_dict(weights)
    to.mkdir(parents=True, exist_ok=True)
    scores = []
    for path in paths:
        image, mask = read(path, data)
        log_p = net(image[None, None].to(device))[0].log_softmax(0).cpu()
        np.savez_compressed(to / f"{stem(path)}.npz", log_probabilities=log_p.half().numpy())
        scores.append(volume_dice(log_p.argmax(0), mask, LABELS))
    print(f"U-Net on {to.parent.name}: Dice {np.round(100 * np.mean(scores, 0), 2).tolist()}", flush=True)


def score(labels: Path, truth: Path, paths: list[Path]) -> NDArray[np.float64]:
    """Dice (V, 2) of label maps in NIfTI files."""
    rows = []
    for path in paths:
        predicted, true = (
            torch.from_numpy(np.asarray(read_volume(top / path.name).values).astype(np.int64))
            for top in (labels, truth)
        )
        rows.append(volume_dice(predicted, true, LABELS))
    return np.array(rows)


def compare(report: FitReport, images: Path, masks: Path, out: Path, paths: list[Path]) -> dict[str, dict[str, object]]:
    """Refine the third part as `deepmrf refine` does, and score what lies on the disk."""
    mrf = report.mean_field
    settings = {**mrf.settings, "contexts": 0, "temperature": 1.0}
    models = {"U-Net": MeanField(**settings).eval(), f"U-Net + {report.stage}": mrf}  # untrained, it returns its input
    rows: dict[str, dict[str, object]] = {}
    before = None
    for name, mrf in models.items():
        to = out / "test" / name.replace(" ", "-")
        done = refine(mrf, report.labels, out / "test" / "predictions", images, to, overwrite=True)
        assert not done.failed, done.failed
        scores = score(to, masks, paths)
        before = scores if before is None else before
        gain = (scores - before).mean(1)
        rows[name] = {
            "dice": scores.mean(0).tolist(),
            "mean_dice": float(scores.mean()),
            "gain": float(gain.mean()),
            "standard_error": float(gain.std(ddof=1) / math.sqrt(len(gain))),
            "better": int((gain > 0).sum()),
            "worse": int((gain < 0).sum()),
            "per_volume": {stem(path): row.tolist() for path, row in zip(paths, scores, strict=True)},
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500, help="of the U-Net's training")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=3.0, help="of the MRF's fit")
    parser.add_argument("--width", type=int, default=16, help="of the U-Net")
    parser.add_argument("--levels", type=int, default=3, help="of the U-Net")
    parser.add_argument("--limit", type=int, help="use so many volumes only, for a try")
    parser.add_argument("--unary-only", action="store_true", help="stop after the U-Net's predictions")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    paths = parts(given.data, given.seed, given.limit)
    size = {"width": given.width, "levels": given.levels}
    weights = given.out / "unary.safetensors"
    if not weights.exists():
        pairs = [read(path, given.data) for path in paths["train"]]
        save_file(train_unary(pairs, size, given.steps, given.batch, given.device, given.seed), weights)
    for part in ("fit", "test"):
        predict(load_file(weights), size, paths[part], given.data, given.out / part / "predictions", given.device)
    if given.unary_only:
        return
    folders = given.out / "fit" / "predictions", given.data / "images", given.data / "labels"
    report = fit(*folders, replace(VOLUME_SETTINGS, device=given.device, minutes=given.minutes, seed=given.seed))
    print(report.verdict, flush=True)
    comparison = compare(report, *folders[1:], given.out, paths["test"])
    content = {
        "split": {part: [stem(path) for path in of] for part, of in paths.items()},
        "seed": given.seed,
        "unary": {**size, "parameters": sum(t.numel() for t in load_file(weights).values())},
        "settings": asdict(report.settings),
        **report.to_dict(),
        "held_out": comparison,
    }
    (given.out / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    print(
        f"{'held-out Dice':<16}{'anterior':>10}{'posterior':>10}{'mean':>8}{'gain':>8}  standard error, better / worse"
    )
    for name, row in comparison.items():
        cells = "".join(f"{100 * v:>10.2f}" for v in row["dice"]) + f"{100 * row['mean_dice']:>8.2f}"
        gain = f"{100 * row['gain']:>+8.3f}  {100 * row['standard_error']:.3f}, {row['better']} / {row['worse']}"
        print(f"{name:<16}{cells}{gain}")


if __name__ == "__main__":
    main()
