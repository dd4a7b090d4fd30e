"""Give a network of Cityscapes' labels the 11 of CamVid: where the recipe benchmarks/camvid-mixed.toml starts.

    python benchmarks/relabel.py street -o runs/relabelled/model
    deepmrf train benchmarks/camvid-mixed.toml

A last layer at random spoils, in its first steps, what the layers before it know of Cityscapes. So each label of CamVid
gets the weights of the label that is most like it; all other weights stay as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from deepmrf.data.labels import LabelSet
from deepmrf.models.names import open_model
from deepmrf.models.parsing_network import Card, DeepParsingNetwork, write_model

CITYSCAPES_OF_CAMVID = {
    "sky": "sky", "building": "building", "pole": "pole", "road": "road", "pavement": "sidewalk", "tree": "vegetation",
    "sign": "traffic sign", "fence": "fence", "car": "car", "pedestrian": "person", "bicyclist": "bicycle",
}  # fmt: skip
LAST_LAYER = "classify.1."


@torch.no_grad()
def relabelled(model: DeepParsingNetwork, labels: LabelSet) -> DeepParsingNetwork:
    """Return the model's network with labels of CamVid, the rows of its last layer by the table above."""
    rows = [model.labels.names.index(CITYSCAPES_OF_CAMVID[name]) for name in labels.names]
    network = type(model.unary)(**{**model.unary.config, "labels": len(labels)})
    source = model.unary.state_dict()
    for name, value in network.state_dict().items():
        value.copy_(source[name][rows] if name.startswith(LAST_LAYER) else source[name])
    return DeepParsingNetwork(network, None, labels)


def main() -> None:
    """Write the network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="street", help="a model whose network is fast or strong")
    parser.add_argument("-o", "--out", type=Path, default=Path("runs/relabelled/model"))
    given = parser.parse_args()
    model = relabelled(open_model(given.model), open_model("camvid").labels)
    model.card = Card({}, {})
    write_model(model, given.out)
    print(f"Wrote {given.out}; train it: deepmrf train benchmarks/camvid-mixed.toml")


if __name__ == "__main__":
    main()
