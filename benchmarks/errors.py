"""What the errors of a model's network are, what its MRF makes of them, and what an MRF could mend at most.

    python benchmarks/errors.py camvid --data camvid:PATH --out errors
    python benchmarks/errors.py --tables errors/*.json     # the tables of earlier runs, side by side

Every labelled pixel is of one kind, the first of these that fits:

    smeared       of a label between those of two opposite neighbours, both of which go on. Hardly a pixel is, except in
                  masks that were resized by interpolation: there the ids at every border are averages, and no truth
    thin, lost    of a part narrower than 5 pixels (an opening by 5 x 5 pixels takes it away), in a region of truth most
                  of which is wrong; regions are connected by their sides
    thin, found   of a part as narrow of another region
    small, lost   of a small region of truth (below 0.1 % of the image) with no right pixel
    lost          of a larger region of truth most of which is wrong, or of a small one with right pixels
    invented      of a region of the network's labels most of which is wrong
    border        within 1, 2, 3-4 or 5-8 pixels of a border of truth, Euclidean; pixels at a border are within 1. Void
                  takes the label nearest to it, so that a border runs through its middle
    inside        the rest

Right pixels have a kind, too, so that one sees which of them the MRF breaks. An oracle knows the truth:

    window w   a pixel takes the true label if the network gives it to any pixel in the w x w around
    regions    each connected region of the network's labels takes its most frequent true label
    second s   a pixel takes the network's second-best label where that is right and its probability at least s
    both       "window 9" where "second 0.05" allows it: labels that are near and that the network takes for possible
    border d   pixels within d of a border of truth are right
    kept       the MRF mends what it mends and breaks nothing
    sharp      no network: the truth, its smeared labels replaced by the nearer of the two labels beside them
    stride s   no network: the truth averaged over cells of s x s pixels and enlarged again, as a network's output is

Prints Markdown, writes a JSON file per model.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.evaluation.evaluate import labelled_images
from deepmrf.evaluation.intervals import ImageConfusions
from deepmrf.evaluation.metrics import confusion
from deepmrf.evaluation.models import MODEL, NETWORK, open_models
from deepmrf.evaluation.regions import dilate
from deepmrf.predict.regions import find_regions
from deepmrf.predict.segmenter import chosen_device

BORDERS = (1, 2, 4, 8)
WINDOWS = (5, 9, 25, 51)
SECONDS = (0.2, 0.1, 0.05, 0.0)
STRIDES = (2, 4, 8, 16)
SMALL_SHARE = 0.001
"""Share of the image's pixels below which a region of truth is small."""
THIN_PIXELS = 5
BORDER_KINDS = ("border 1", "border 2", "border 3-4", "border 5-8")
KINDS = ("smeared", "thin, lost", "thin, found", "small, lost", "lost", "invented", *BORDER_KINDS, "inside")
COUNTS = ("pixels", "wrong", "second", "mended", "broken")
"""Of each kind and true label: pixels; wrong ones; wrong ones whose truth is the network's second-best label; those
that the MRF mends; right ones that it breaks."""


def label_borders(truth: Tensor, ignore: int) -> Tensor:
    """Pixels (D, H, W) within each distance of BORDERS of a border of truth (H, W)."""
    filled = truth.clone()
    for _ in range(max(BORDERS)):  # deeper in void, no border is near a labelled pixel
        before = filled.clone()
        for here, there in _neighbours():
            grown = (filled[here] == ignore) & (before[there] != ignore)
            filled[here] = torch.where(grown, before[there], filled[here])
    edge = torch.zeros_like(truth, dtype=torch.bool)
    for here, there in _neighbours():
        edge[here] |= (filled[here] != filled[there]) & (filled[here] != ignore) & (filled[there] != ignore)
    return torch.cat([dilate(edge[None], distance - 1) for distance in BORDERS])


def _neighbours() -> list[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Pairs of indices (pixels, their neighbours) into a map (H, W), for each of the four sides."""
    all_, first, last = slice(None), slice(None, -1), slice(1, None)
    return [
        ((first, all_), (last, all_)),
        ((last, all_), (first, all_)),
        ((all_, first), (all_, last)),
        ((all_, last), (all_, first)),
    ]


def sharpened(truth: Tensor, ignore: int) -> Tensor:
    """The truth (H, W) with smeared labels replaced by the nearer of the two labels beside them."""
    height, width = truth.shape
    padded = functional.pad(truth, (2, 2, 2, 2), value=ignore)
    sharp = truth.clone()
    for dy, dx in ((0, 1), (1, 0), (1, 1), (1, -1)):
        before2, before, after, after2 = (
            padded[2 + n * dy : 2 + n * dy + height, 2 + n * dx : 2 + n * dx + width] for n in (-2, -1, 1, 2)
        )
        low, high = torch.minimum(before, after), torch.maximum(before, after)
        flat = (before == before2) & (after == after2) & (high != ignore)
        nearer = torch.where(truth - low <= high - truth, low, high)
        sharp = torch.where(flat & (low < truth) & (truth < high), nearer, sharp)
    return sharp


def thin_parts(truth: Tensor) -> Tensor:
    """Pixels (H, W) that an opening of their label by THIN_PIXELS x THIN_PIXELS takes away; labels go on outside."""

    def largest(values: Tensor) -> Tensor:
        return functional.max_pool2d(values[None], THIN_PIXELS, 1, THIN_PIXELS // 2)[0]

    labels = truth.float()
    same = (largest(labels) == -largest(-labels)).float()  # one label all around: what the erosion of that label leaves
    return largest(same) == 0


def region_map(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The number of each pixel's connected region (H, W), and the area of each region."""
    regions = find_regions(labels.cpu().numpy())
    numbers = np.repeat(regions.run_regions, regions.run_lengths).reshape(labels.shape)
    return torch.from_numpy(numbers).to(labels.device), torch.from_numpy(regions.areas).to(labels.device)


def mostly_wrong(labels: Tensor, right: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels (H, W) of connected regions of `labels` that are mostly wrong, and of small ones all wrong."""
    numbers, areas = region_map(labels)
    labelled = torch.bincount(numbers[valid], minlength=len(areas))
    right_pixels = torch.bincount(numbers[right], minlength=len(areas))
    small = (areas < SMALL_SHARE * labels.numel()) & (right_pixels == 0)
    return (2 * right_pixels < labelled)[numbers], small[numbers]


def pixel_kinds(truth: Tensor, before: Tensor, borders: Tensor, ignore: int) -> Tensor:
    """The index into KINDS of each pixel (H, W); before: the network's labels."""
    valid = truth != ignore
    right = valid & (before == truth)
    lost, missed = mostly_wrong(truth, right, valid)
    invented = mostly_wrong(before, right, valid)[0]
    thin, smeared = thin_parts(truth), sharpened(truth, ignore) != truth
    fits = torch.stack([smeared, thin & lost, thin, missed, lost, invented, *borders, torch.ones_like(right)])
    return fits.byte().argmax(0)  # the first


def within_windows(labels: Tensor, truth: Tensor, wrong: Tensor, count: int) -> list[Tensor]:
    """For each of WINDOWS: is the truth of these wrong pixels among the labels (H, W) around? Elsewhere False."""
    height, width = labels.shape
    sums = functional.pad(functional.one_hot(labels, count).to(torch.int32).cumsum(0).cumsum(1), (0, 0, 1, 0, 1, 0))
    y, x = wrong.nonzero(as_tuple=True)
    label = truth[y, x]
    results = []
    for window in WINDOWS:
        top, bottom = (y - window // 2).clamp_min(0), (y + window // 2 + 1).clamp_max(height)
        left, right = (x - window // 2).clamp_min(0), (x + window // 2 + 1).clamp_max(width)
        pixels = (
            sums[bottom, right, label] - sums[top, right, label] - sums[bottom, left, label] + sums[top, left, label]
        )
        result = torch.zeros_like(wrong)
        result[y, x] = pixels > 0
        results.append(result)
    return results


def best_of_regions(labels: Tensor, truth: Tensor, valid: Tensor, count: int) -> Tensor:
    """Labels (H, W) in which each connected region has its most frequent true label; all void, its own."""
    numbers, areas = region_map(labels)
    votes = torch.bincount(numbers[valid] * count + truth[valid], minlength=len(areas) * count).view(-1, count)
    own = votes.sum(1) == 0
    return torch.where(own[numbers], labels, votes.argmax(1)[numbers])


def truth_at_stride(truth: Tensor, stride: int, count: int, ignore: int) -> Tensor:
    """Labels (H, W) of the truth averaged over cells and enlarged again."""
    shares = functional.one_hot(torch.where(truth == ignore, count, truth), count + 1)[..., :count]
    shares = shares.movedim(-1, 0)[None].float()
    cells = [-(-size // stride) for size in truth.shape]
    return functional.interpolate(
        functional.interpolate(shares, cells, mode="area"), truth.shape, mode="bilinear"
    ).argmax(1)[0]


class Errors:
    """The errors of the images so far."""

    def __init__(self, labels: int, ignore: int) -> None:
        self.labels, self.ignore = labels, ignore
        self.counts: dict[str, Tensor] = defaultdict(lambda: torch.zeros(len(KINDS), labels, dtype=torch.int64))
        """Each of COUNTS by kind and true label."""
        self.oracles: dict[str, Tensor] = defaultdict(lambda: torch.zeros(labels, labels, dtype=torch.int64))
        """The confusion matrix of each."""

    def add(self, log_p: Tensor, after: Tensor, truth: Tensor) -> None:
        """Add an image: the network's log-probabilities (L, H, W), the model's labels (H, W) and the truth."""
        (_, other), (before, second) = log_p.float().exp().topk(2, 0)
        valid = truth != self.ignore
        right, mended = valid & (before == truth), after == truth
        wrong = valid & ~right
        borders = label_borders(truth, self.ignore)
        kinds = pixel_kinds(truth, before, borders, self.ignore)
        cells = kinds * self.labels + truth
        chosen = (valid, wrong, wrong & (second == truth), wrong & mended, right & ~mended)
        for name, pixels in zip(COUNTS, chosen, strict=True):
            counts = torch.bincount(cells[pixels], minlength=len(KINDS) * self.labels)
            self.counts[name] += counts.view(len(KINDS), -1).cpu()
        self._score("network", before, truth)
        self._score("MRF", after, truth)
        windows = within_windows(before, truth, wrong, self.labels)
        allowed = [other >= share for share in SECONDS]
        fixes = {"kept": mended} | {f"{kind} right": kinds == index for index, kind in enumerate(KINDS)}
        fixes |= {f"window {w}": pixels for w, pixels in zip(WINDOWS, windows, strict=True)}
        fixes |= {f"second {s:g}": p & (second == truth) for s, p in zip(SECONDS, allowed, strict=True)}
        fixes["both"] = fixes["window 9"] & fixes["second 0.05"]
        fixes |= {f"border {d}": pixels for d, pixels in zip(BORDERS, borders, strict=True)}
        for name, pixels in fixes.items():
            self._score(name, torch.where(pixels & wrong, truth, before), truth)
        self._score("regions", best_of_regions(before, truth, valid, self.labels), truth)
        self._score("sharp", sharpened(truth, self.ignore), truth)
        for stride in STRIDES:
            self._score(f"stride {stride}", truth_at_stride(truth, stride, self.labels, self.ignore), truth)

    def _score(self, name: str, labels: Tensor, truth: Tensor) -> None:
        self.oracles[name] += confusion(labels, truth, self.labels, self.ignore).cpu()

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """Plain numbers: per cent, but for counts of pixels."""
        wrong = [float(matrix.sum() - matrix.diagonal().sum()) for matrix in self.oracles.values()]
        scores = {}
        for (name, matrix), errors in zip(self.oracles.items(), wrong, strict=True):
            right = matrix.diagonal().double()
            iou = right / (matrix.sum(0) + matrix.sum(1) - right)
            scores[name] = {
                "miou": round(100 * float(iou.nanmean()), 3),
                "mended": round(100 * (1 - errors / max(wrong[0], 1)), 2),
                "iou": {
                    label: round(100 * value, 2)
                    for label, value in zip(names, iou.tolist(), strict=True)
                    if value == value
                },
            }
        kinds = {kind: {name: self.counts[name][i].tolist() for name in COUNTS} for i, kind in enumerate(KINDS)}
        return {"names": list(names), "scores": scores, "kinds": kinds}


@torch.inference_mode()
def measure(name: str, data: str, split: str, device: torch.device, most: int | None = None) -> dict[str, Any]:
    """The errors of a model on a split; `most`: on so many images, spread evenly."""
    (model,), images = open_models([name], data, split)
    model = model.to(device).eval()
    if most is not None and most < len(images):
        images = images.subset(images[int(index)] for index in np.linspace(0, len(images) - 1, most).round())
    errors, confusions = Errors(len(images.labels), images.labels.ignore), ImageConfusions(images)
    for item, image, mask in labelled_images(images):
        image, mask = image.to(device), mask.to(device)
        log_p = model.log_unary(image)
        after = model.refined(log_p, image).argmax(1)[0]
        errors.add(log_p[0], after, mask[0])
        confusions.add(item, image[0], mask[0], {NETWORK: log_p[0].argmax(0), MODEL: after})
    folder = Path(name)
    return {
        "model": folder.parent.name if folder.name == "model" else folder.name,
        "data": f"{data.partition(':')[0]}, {split}, {len(images)} images",
        "gain": confusions.gain(NETWORK, MODEL).to_dict(),
        **errors.to_dict(images.labels.names),
    }


def kinds_table(result: dict[str, Any]) -> str:
    """What the errors of a model are, and what its MRF makes of each kind."""
    kinds = {kind: {name: sum(values) for name, values in counts.items()} for kind, counts in result["kinds"].items()}
    pixels, wrong = (sum(counts[name] for counts in kinds.values()) for name in ("pixels", "wrong"))
    rows = [
        "| kind | pixels | errors | second-best is right | mended | broken | errors less | mIoU if all were right |"
    ]
    rows.append("|---" * 8 + "|")
    kinds["all"] = {name: sum(counts[name] for counts in kinds.values()) for name in COUNTS}
    for kind, counts in kinds.items():
        share = [100 * counts[name] / max(counts["wrong"], 1) for name in ("second", "mended", "broken")]
        less = 100 * (counts["mended"] - counts["broken"]) / max(wrong, 1)
        miou = result["scores"][f"{kind} right"]["miou"] if kind != "all" else 100
        rows.append(
            f"| {kind} | {100 * counts['pixels'] / pixels:.1f} | {100 * counts['wrong'] / max(wrong, 1):.1f} | "
            f"{share[0]:.0f} | {share[1]:.0f} | {share[2]:.0f} | {less:+.1f} | {miou:.1f} |"
        )
    return "\n".join(rows)


def oracles_table(results: Sequence[dict[str, Any]]) -> str:
    """The mIoU of every oracle, and what share of the errors it mends, a column per model."""
    names = [name for name in results[0]["scores"] if not name.endswith("right")]
    rows = ["| | " + " | ".join(result["model"] for result in results) + " |", "|---" * (len(results) + 1) + "|"]
    for name in names:
        scores = [result["scores"][name] for result in results]
        bare = name.startswith(("network", "sharp", "stride"))
        cells = [f"{score['miou']:.1f}" + f" ({score['mended']:.0f})" * (not bare) for score in scores]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def classes_table(result: dict[str, Any]) -> str:
    """The IoU of each class, and the kinds of the errors in its true pixels."""
    groups = {"smeared": KINDS[:1], "thin": KINDS[1:3], "small, lost": KINDS[3:4], "lost": KINDS[4:5]}
    groups |= {"invented": KINDS[5:6], "border 1-4": KINDS[6:9], "farther": KINDS[9:]}
    columns = ("network", "MRF", "window 9", "border 2")
    rows = ["| class | " + " | ".join([*columns, *groups]) + " |", "|---" * (1 + len(columns) + len(groups)) + "|"]
    for index, name in enumerate(result["names"]):
        wrong = [sum(result["kinds"][kind]["wrong"][index] for kind in group) for group in groups.values()]
        cells = [f"{result['scores'][column]['iou'].get(name, float('nan')):.1f}" for column in columns]
        cells += [f"{100 * value / max(sum(wrong), 1):.0f}" for value in wrong]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def report(results: Sequence[dict[str, Any]]) -> str:
    """All tables, as Markdown."""
    parts = []
    for result in results:
        gain = [
            f"{100 * result['gain'][name]:+.2f}" if result["gain"][name] is not None else "-"
            for name in ("miou", "low", "high")
        ]
        parts.append(f"`{result['model']}`: {result['data']}; the MRF adds {gain[0]} ({gain[1]} to {gain[2]}).")
        parts += [kinds_table(result), classes_table(result)]
    parts.append(oracles_table(results))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names or folders")
    parser.add_argument("--data", help="such as camvid:PATH")
    parser.add_argument("--split", default="val")
    parser.add_argument("--most", type=int, help="so many images, spread evenly (default: all)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument("--out", type=Path, default=Path("errors"), help="folder for MODEL.json (default: errors)")
    parser.add_argument(
        "--tables", nargs="+", type=Path, metavar="JSON", help="print the tables of these files instead"
    )
    given = parser.parse_args()
    if given.tables:
        print(report([json.loads(path.read_text()) for path in given.tables]))
        return
    if not given.models or not given.data:
        parser.error("give models and --data, or --tables with files of earlier runs.")
    results = []
    for name in given.models:
        results.append(measure(name, given.data, given.split, chosen_device(given.device), given.most))
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / f"{results[-1]['model']}.json").write_text(json.dumps(results[-1]) + "\n")
    print(report(results))


if __name__ == "__main__":
    main()
