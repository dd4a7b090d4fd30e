"""What a network of CamVid's labels is worth on a drive that it never saw, and what an MRF adds there.

    python benchmarks/mix_streets.py camvid:PATH cityscapes:PATH --held-out 0 --without 0001TP -o data/streets-without
    deepmrf train benchmarks/camvid-mixed.toml -o runs/mixed --set data.train=folder:data/streets-without
    python benchmarks/unseen_drive.py street runs/mixed/model --camvid camvid:PATH --cityscapes cityscapes:PATH --mrf

A row is a network: its mIoU on the unseen drive (with --drive "": the share of CamVid that --held-out leaves out), on
CamVid val, and on every third image of Cityscapes val in CamVid's labels. With --mrf, MRFs learn by the stages of
`deepmrf fit`: from images that the network learned from, from val, or from the unseen ones. Printed is what they add to
the network, with 95 % intervals; where an MRF is measured on the images that taught it, the row says so.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from held_out import Outputs
from links import CAMVID_OF_CITYSCAPES
from torch import Tensor

from deepmrf.data import open_data
from deepmrf.data.dataset import Dataset
from deepmrf.data.files import VOID
from deepmrf.data.labels import LabelSet
from deepmrf.evaluation.intervals import Gain, measure_gain
from deepmrf.evaluation.metrics import confusion
from deepmrf.layers import MeanField
from deepmrf.models.names import open_model
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.refine.learn import Learner
from deepmrf.refine.settings import Choice, FitSettings
from deepmrf.training.mean_field import calibrated_temperature
from deepmrf.training.samples import hold_out

CONTEXTS_STEPS = 200
LEAST_P = 1e-12
SETTINGS = FitSettings(gate=False, contexts_rate=5e-3, batch=6)
MRFS = (
    replace(SETTINGS, kernel="gaussian", label_scaling=False, contexts=5),
    replace(SETTINGS, kernel="distance", label_scaling=True),
)


def table_to(camvid: LabelSet, labels: LabelSet) -> Tensor:
    """The table (256,) from the labels of a model or a data set, CamVid's or Cityscapes', to CamVid's."""
    table = torch.full((256,), VOID)
    names = [name if labels.names == camvid.names else CAMVID_OF_CITYSCAPES[name] for name in labels.names]
    table[: len(names)] = torch.tensor([camvid.names.index(name) for name in names])
    return table


def in_labels_of(camvid: LabelSet, model: DeepParsingNetwork, data: Dataset) -> Outputs:
    """The network's output of each image, and the masks, in CamVid's labels."""
    outputs, of_model, of_data = Outputs(model, data), table_to(camvid, model.labels), table_to(camvid, data.labels)
    for index, example in enumerate(outputs.examples):
        p = torch.zeros(len(camvid), *example.mask.shape)
        p.index_add_(0, of_model[: len(model.labels)], example.log_p.float().exp())
        log_p, mask = p.clamp_min(LEAST_P).log().half(), of_data[example.mask.long()].byte()
        outputs.examples[index] = replace(example, log_p=log_p, mask=mask)
    outputs.labels = camvid
    return outputs


@torch.inference_mode()
def confusions(outputs: Outputs, mrf: MeanField | None) -> list[Tensor]:
    """The confusion matrix of each image; no MRF: of the network alone."""
    matrices = []
    for example in outputs.examples:
        log_p = example.log_p[None].float()
        log_q = log_p if mrf is None else mrf(log_p, example.image[None])
        matrices.append(confusion(log_q[0].argmax(0), example.mask, len(outputs.labels), VOID))
    return matrices


def miou(matrices: list[Tensor]) -> float:
    """The mIoU of all images together, over the labels that occur, in per cent."""
    pairs = torch.stack(matrices).sum(0).double()
    both, true = pairs.diag(), pairs.sum(1)
    return 100 * float((both / (pairs.sum(0) + true - both))[true > 0].mean())


def text(gain: Gain) -> str:
    """A gain in points, and its interval."""
    low, high = ("?" if end is None else f"{100 * end:+.2f}" for end in (gain.miou.low, gain.miou.high))
    return f"{100 * gain.miou.value:+.2f} ({low} to {high})"


def learn(outputs: Outputs, settings: FitSettings) -> MeanField:
    """An MRF after all stages."""
    logs, masks = ([getattr(example, name) for example in outputs.examples] for name in ("log_p", "mask"))
    choice = Choice(
        settings.kernel or "distance", False, calibrated_temperature(logs, masks, VOID), bool(settings.label_scaling)
    )
    learner = Learner(outputs, range(len(outputs)), settings, choice)
    learner.learn_contexts(CONTEXTS_STEPS)
    return learner.models()["label contexts"]


def main() -> None:
    """Print the rows of each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--camvid", required=True)
    parser.add_argument("--cityscapes", required=True)
    parser.add_argument("--drive", default="0001TP", help='the drive that no network saw; "" for none')
    parser.add_argument("--held-out", type=float, default=0.15, help="share of CamVid that none saw, without a drive")
    parser.add_argument("--mrf", action="store_true")
    given = parser.parse_args()
    train = open_data(given.camvid, "train")
    seen, unseen = hold_out(train, given.held_out)
    if given.drive:
        seen, unseen = (train.subset(i for i in train if (i.sequence == given.drive) == out) for out in (False, True))
    sets = {
        "unseen": unseen,
        "val": open_data(given.camvid, "val"),
        "Frankfurt": open_data(given.cityscapes, "val")[::3],
    }
    for name in given.models:
        model = open_model(name).eval()
        outputs = {part: in_labels_of(train.labels, model, data) for part, data in sets.items()}
        before = {part: confusions(output, None) for part, output in outputs.items()}
        print(name, *(f"{part} {miou(matrices):.2f}" for part, matrices in before.items()), sep="  ", flush=True)
        if not given.mrf:
            continue
        taught = {"images seen": in_labels_of(train.labels, model, seen[::3]), **outputs}
        del taught["Frankfurt"]
        for teacher, settings in ((teacher, settings) for teacher in taught for settings in MRFS):
            mrf = learn(taught[teacher], settings)
            gains = {part: measure_gain(before[part], confusions(outputs[part], mrf)) for part in outputs}
            row = (f"{part} {text(gain)}{' taught' if part == teacher else ''}" for part, gain in gains.items())
            print(f"  {settings.kernel}, learned from {teacher}", *row, sep="  ", flush=True)


if __name__ == "__main__":
    main()
