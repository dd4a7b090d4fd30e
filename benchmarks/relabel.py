"""Give the network of `street` the 11 labels of CamVid: where the recipe benchmarks/camvid-mixed.toml starts.

    python benchmarks/relabel.py -o runs/relabelled/model
    deepmrf train benchmarks/camvid-mixed.toml

A last layer at random spoils, in its first steps, what the layers before it know of Cityscapes. So each label of CamVid
gets the weights of the label that is most like it; all other weights stay as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from deepmrf.models.names import open_model
from deepmrf.models.parsing_network import Card, DeepParsingNetwork, write_model
from deepmrf.unary.fast import Fast

CITYSCAPES_OF_CAMVID = {
    "sky": "sky", "building": "building", "pole": "pole", "road": "road", "pavement": "sidewalk", "tree": "vegetation",
    "sign": "traffic sign", "fence": "fence", "car": "car", "pedestrian": "person", "bicyclist": "bicycle",
}  # fmt: skip
LAST_LAYER = "classify.1."


@torch.no_grad()
def relabel(street: DeepParsingNetwork, camvid: DeepParsingNetwork) -> None:
    """Give the network of `camvid` the weights of `street`, the rows of its last layer by the table above."""
    names = [CITYSCAPES_OF_CAMVID[name] for name in camvid.labels.names]
    rows = [street.labels.names.index(name) for name in names]
    source = street.unary.state_dict()
    for name, value in camvid.unary.state_dict().items():
        value.copy_(source[name][rows] if name.startswith(LAST_LAYER) else source[name])


def main() -> None:
    """Write the network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=Path("runs/relabelled/model"))
    given = parser.parse_args()
    bundled = open_model("camvid")
    assert isinstance(bundled.unary, Fast)
    model = DeepParsingNetwork(Fast(**bundled.unary.config), None, bundled.labels)
    relabel(open_model("street"), model)
    model.card = Card({}, {})
    write_model(model, given.out)
    print(f"Wrote {given.out}; train it: deepmrf train benchmarks/camvid-mixed.toml")


if __name__ == "__main__":
    main()
