"""Milliseconds of one core that each part of a video takes per frame: network, flow, links and mean field.

python benchmarks/video_parts.py drive.mp4 --model street              # the first frames of a video, at its own size
python benchmarks/video_parts.py drive.mp4 --model street --labels 19  # the MRF for as many labels, at random

Prints one line of JSON: the CPU time of one thread, the least of some runs, so that others' work counts little.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import cv2
import numpy as np
import torch

import deepmrf
from deepmrf import MeanField, video
from deepmrf.flow import join
from deepmrf.flow.estimation import both_directions, flow_of_pairs
from deepmrf.predict.scales import enlarged_labels

FRAMES, CENTRE = 5, 2
RUNS = 7


@torch.inference_mode()
def main() -> None:
    """Measure the parts of one frame between its neighbours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a video")
    parser.add_argument("--model", default="street")
    parser.add_argument("--labels", type=int, default=None, help="measure the MRF with as many labels instead")
    given = parser.parse_args()
    cv2.setNumThreads(1)
    model = deepmrf.load(given.model, device="cpu").model
    clips = model.for_video()
    if clips is model or model.mean_field is None:
        raise SystemExit(f"{given.model} has no part for video.")
    frames = [frame.image for frame in itertools.islice(video.open_source(given.source).frames(), FRAMES)]
    images = [torch.from_numpy(np.ascontiguousarray(frame.transpose(2, 0, 1)))[None] for frame in frames]
    facts: dict[str, Any] = {"size": list(images[0].shape[2:]), "labels": given.labels or len(model.labels)}
    facts["network"] = milliseconds(lambda: model.log_unary(images[0]))
    if model.video.allows_bfloat16:
        clips.unary = model.unary.in_bfloat16()
        facts["network, bfloat16"] = milliseconds(lambda: clips.log_unary(images[0]))
    log_ps = [model.log_unary(image) for image in images]
    flat, linked = model.mean_field, clips.mean_field
    assert linked is not None  # it comes from `flat`
    if given.labels is not None:
        torch.manual_seed(0)
        flat = MeanField(**flat.settings | {"labels": given.labels})
        torch.nn.init.normal_(flat.label_contexts.weight, std=0.01)
        linked = model.video.inflated(flat)
        log_ps = [torch.randn(1, given.labels, *image.shape[2:]).log_softmax(1) for image in images]
    for method in ("dis-fast", "dis"):
        facts[f"flow, {method}"] = milliseconds(lambda method=method: both_directions(*frames[:2], method))
    pairs = [both_directions(a, b, "dis-fast") for a, b in itertools.pairwise(frames)]
    size = pairs[0].shape[2:]
    facts["flow, reliability"] = milliseconds(lambda: flow_of_pairs(pairs[:1], size))
    flow = join([flow_of_pairs([pair], size) for pair in pairs])
    here = slice(CENTRE, CENTRE + 1)
    facts["flow, trajectories"] = milliseconds(lambda: flow.trajectories(CENTRE, CENTRE, here))
    links = {dt: (way[:, :, 0], known[:, :, 0]) for dt, (way, known) in flow.trajectories(CENTRE, CENTRE, here).items()}
    facts["mrf, belief"] = milliseconds(lambda: linked.belief(log_ps[0]))
    beliefs = {dt: linked.belief(log_p) for dt, log_p in enumerate(log_ps, -CENTRE)}
    beliefs |= {dt: maps.contiguous(memory_format=torch.channels_last) for dt, maps in beliefs.items() if dt}
    facts["mrf, linked"] = milliseconds(
        lambda: linked.linked_frame(log_ps[CENTRE], images[CENTRE], beliefs, links).exp()
    )
    facts["mrf, frame by frame"] = milliseconds(lambda: flat(log_ps[CENTRE], images[CENTRE]))
    facts["labels of probabilities"] = milliseconds(lambda: enlarged_labels(log_ps[0][0], *images[0].shape[2:]))
    print(json.dumps(facts))


def milliseconds(work: Callable[[], object]) -> float:
    """The least CPU time of some calls, after one that compiles kernels."""
    torch.set_num_threads(1)
    work()
    times = []
    for _ in range(RUNS):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return round(1000 * min(times), 1)


if __name__ == "__main__":
    main()
