"""Do the label contexts of a model show how scenes are laid out?

    python benchmarks/layout.py camvid --data camvid:PATH

For each pair of labels A:B that meet, "above or below" is the mean over the rows below A less that over the rows
above it. Printed: in how many pairs its sign is that of the labels, where `arrangement` finds B around A,

- in what the model has learned: B's gains by A, weighted by how often each context won where B meets A;
- in what the labels ask of the first step of stage 3: the sum over pixels of (y - q) t, with q of stage 2's model.

If the second is at chance, too, then the network knows the layout, and its errors hold nothing of it to be learned.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from deepmrf.data import open_data
from deepmrf.evaluation.explain import pictures_of
from deepmrf.evaluation.steps import context_weight, layer_steps, stage_two
from deepmrf.figures.contexts import arrangement, label_gains, meeting_shares
from deepmrf.models.names import open_model

CLEAR = 0.3
"""Logarithms by which B's share above A and below it must differ: pairs with less of a layout are left out."""


@torch.no_grad()
def asked(model, pictures, size):
    """What the labels ask for, (A, B, h, w): how B's score at d from A should change."""
    mrf, labels = model.mean_field, len(model.labels)
    total = np.zeros((labels, labels, *size))
    sign = torch.sign(mrf.triple_penalty.scale)
    for picture in pictures:
        pixels = torch.from_numpy(picture.image).permute(2, 0, 1)[None]
        log_p = model.log_unary(pixels)
        t = sign * mrf.triple_penalty(mrf.belief(log_p), pixels)[0]
        q = stage_two(mrf)(log_p, pixels)[0].exp()
        truth = torch.from_numpy(picture.truth).long()
        wrong = (truth == torch.arange(labels)[:, None, None]).float() - q
        wrong[:, truth == model.labels.ignore] = 0
        height, width = truth.shape
        for y in range(size[0]):
            for x in range(size[1]):
                dy, dx = y - size[0] // 2, x - size[1] // 2
                a = t[:, max(0, -dy) : height - max(0, dy), max(0, -dx) : width - max(0, dx)]
                b = wrong[:, max(0, dy) : height + min(0, dy), max(0, dx) : width + min(0, dx)]
                total[:, :, y, x] += (a.flatten(1) @ b.flatten(1).T).numpy()
    return total


def below(maps):
    """The mean over the rows below the centre less that over the rows above it."""
    middle = maps.shape[-2] // 2
    return float(maps[middle + 1 :].mean() - maps[:middle].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", default="val")
    parser.add_argument("--images", type=int, default=16, help="pictures, spread evenly (default: 16)")
    given = parser.parse_args()
    model = open_model(given.model).eval()
    contexts, names = model.mean_field.label_contexts, model.labels.names
    pictures = pictures_of(open_data(given.data, given.split), given.images)
    weight, scale = context_weight(contexts).numpy(), float(model.mean_field.triple_penalty.scale.detach())
    gains = label_gains(weight, scale, contexts.contexts)
    results = [layer_steps(model, picture.image) for picture in pictures]
    maps = [(result.label_maps[-1][1], result.active) for result in results]
    truths = [picture.truth for picture in pictures]
    wanted = asked(model, pictures, contexts.size)
    rows = []
    for a in range(len(names)):
        for b in range(len(names)):
            shares = meeting_shares(maps, (a, b), contexts.contexts, contexts.size)
            if a == b or shares is None:
                continue
            layout = below(arrangement(truths, (a, b), contexts.size))
            if np.isnan(layout) or abs(layout) < CLEAR:
                continue
            learned = below(np.average(gains[a, b], axis=0, weights=shares))
            rows.append((f"{names[a]}:{names[b]}", layout, learned, below(wanted[a, b])))
    for name, layout, learned, first in rows:
        print(f"{name:<24} labels {layout:+.2f}  learned {learned:+.3f}  asked {first:+.1f}")
    for number, what in ((2, "learned"), (3, "asked of stage 3's first step")):
        agree = sum(np.sign(row[1]) == np.sign(row[number]) for row in rows)
        print(f"{what}: {agree} of {len(rows)} pairs have B on the side where the labels have it")


if __name__ == "__main__":
    main()
