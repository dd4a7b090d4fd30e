"""Average the weights of networks that began alike: the bundled models street and camvid.

    deepmrf train street-more                                              # from street's network, on all images
    python benchmarks/average.py STREET runs/street-more/model --data cityscapes:PATH -o street
    python benchmarks/average.py CAMVID street --shares 0.85 0.15 --data camvid:PATH -o camvid

A network that trained on, or that was tuned for other data, lies elsewhere around the same minimum; a mean of both is
better on new images. The first model gives all but the weights of the network, and those whose shapes differ. Written
is the model in half precision, with its scores on val.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from held_out import stage_scores

from deepmrf.data import open_data
from deepmrf.models.names import open_model
from deepmrf.models.parsing_network import DeepParsingNetwork, write_model


@torch.no_grad()
def average(models: Sequence[DeepParsingNetwork], shares: Sequence[float]) -> None:
    """Give the first model's network the mean of all networks' weights and running statistics, in half precision."""
    states = [model.unary.state_dict() for model in models]
    for name, value in states[0].items():
        if value.is_floating_point() and all(state[name].shape == value.shape for state in states):
            mean = sum(share * state[name].float() for share, state in zip(shares, states, strict=True))
            value.copy_(torch.as_tensor(mean).half())


def main() -> None:
    """Average, score and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--shares", type=float, nargs="+", help="of each model; by default all have the same")
    parser.add_argument("--data", required=True)
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    models = [open_model(name).eval() for name in given.models]
    average(models, given.shares or [1 / len(models)] * len(models))
    model = models[0]
    data = open_data(given.data, "val")
    assert model.mean_field is not None, "the first model has no MRF"
    scores = stage_scores(model, {"label contexts": model.mean_field}, data)
    model.card.metrics["val"] = scores
    write_model(model, given.out, half=True)
    for name, values in scores.items():
        print(f"{name:32} {100 * values['miou']:.2f}")  # type: ignore[index]


if __name__ == "__main__":
    main()
