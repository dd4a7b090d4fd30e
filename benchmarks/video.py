"""How fast `deepmrf predict` is on a video, which stage takes the time, and the peak of its memory.

python benchmarks/video.py drive.mp4 --model street               # a video of one's own, every frame of it
python benchmarks/video.py drive.mp4 --frame-by-frame             # without the links between frames
python benchmarks/video.py --frames 2000 --width 320 --height 180 # made up: memory must not grow with its length

Prints one line of JSON. Stages overlap: their seconds add up to more than the time that passed. "network" is the unary
network with the shrinking and enlarging around it, "mrf" the mean field. cpu_seconds says what others' work cannot slow
down; set OMP_WAIT_POLICY=passive where cores are shared.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

import deepmrf
from deepmrf import video
from deepmrf.predict.segmenter import Segmenter


def main() -> None:
    """Measure one video."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="a video; without one, frames are made up")
    parser.add_argument("--model", default="street")
    parser.add_argument("--frames", type=int, default=None, help="how many frames to make up, or to take at most")
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--height", type=int, default=180)
    parser.add_argument("--size", type=int, default=None, help="as of deepmrf predict")
    parser.add_argument("--frame-by-frame", action="store_true", help="link no frames")
    parser.add_argument("--flow", default="dis-fast", choices=("dis-fast", "dis"))
    parser.add_argument("--consistency", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="keep the video that is written")
    given = parser.parse_args()
    segmenter = deepmrf.load(given.model, size=given.size, device="cpu")
    watch = Watch(segmenter)
    with tempfile.TemporaryDirectory() as folder:
        source = given.source
        if source is None:
            source = Path(folder) / "made_up.mp4"
            make_up(source, given.frames or 200, given.height, given.width)
        start, worked = time.perf_counter(), time.process_time()
        out = given.out or Path(folder) / "out.mp4"
        report = video.record(
            segmenter,
            source,
            out,
            flow=given.flow,
            consistency=given.consistency,
            max_frames=given.frames,
            frame_by_frame=given.frame_by_frame,
        )
        passed, worked = time.perf_counter() - start, time.process_time() - worked
    seconds = report.seconds
    if "mrf" not in seconds:  # models of single frames run both at once
        seconds |= {"network": seconds["network"] - watch.seconds, "mrf": watch.seconds}
    facts = {
        "frames": report.frames,
        "seconds": round(passed, 1),
        "cpu_seconds": round(worked, 1),
        "frames_per_second": round(report.frames / passed, 3),
        "by_stage": {stage: round(value, 1) for stage, value in seconds.items()},
        "consistency": report.consistency,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(facts))


class Watch:
    """How long the mean field of a segmenter's model has worked."""

    def __init__(self, segmenter: Segmenter) -> None:
        self.seconds, self._start = 0.0, 0.0
        field = segmenter.model.mean_field
        assert field is not None, "the model has no mean field"
        field.register_forward_pre_hook(self._begin)
        field.register_forward_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._start = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start


def make_up(path: Path, frames: int, height: int, width: int) -> None:
    """A video of a pattern that drifts."""
    rng = np.random.default_rng(0)
    scenery = rng.integers(0, 256, (height // 8 + 2, 2 * width // 8 + 2, 3), dtype=np.uint8)
    scenery = scenery.repeat(8, 0).repeat(8, 1)
    writer = video.Writer(path, (height, width), time_base=Fraction(1, 25))
    for number in range(frames):
        left = number % width
        writer.write(np.ascontiguousarray(scenery[:height, left : left + width]), Fraction(number, 25))
    writer.close()


if __name__ == "__main__":
    main()
