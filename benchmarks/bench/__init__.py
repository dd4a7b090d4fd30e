"""`deepmrf bench`: what each layer costs in time and memory, beside what others offer, measured in the same run.

inputs    seeded log-probabilities and images with structure
peers     the other ways to do it: the direct loop, a windowed CRF in plain PyTorch, pydensecrf2
cases     one thing to measure, described by plain values, and the function to call for it
measure   times (interleaved) and peak memory
suite     which cases a run holds, and the run itself
report    the JSON file and the plot

__main__  the command: options in, table out

Only __main__ prints. matplotlib and pydensecrf2 are imported only where they are used.
"""

from benchmarks.bench import report
from benchmarks.bench.measure import Row
from benchmarks.bench.suite import Results, Settings, plan, run

__all__ = ["Results", "Row", "Settings", "plan", "report", "run"]
