"""Do the kernels compile for a GPU? Triton compiles without one; its interpreter lets more pass."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMMON = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

def build(kernel, constants, halves=(), integers=(), reals=(), wholes=(), bytes=(), longs=(), warps=4):
    kinds = {**dict.fromkeys(halves, "*fp16"), **dict.fromkeys(integers, "i32"), **dict.fromkeys(reals, "fp32")}
    kinds |= {**dict.fromkeys(wholes, "*i32"), **dict.fromkeys(bytes, "*u8"), **dict.fromkeys(longs, "*i64")}
    signature = {n: "constexpr" if n in constants else kinds.get(n, "*fp32") for n in kernel.arg_names}
    constants = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["cubin"]

REACHES = ["before_t", "after_t", "before_y", "after_y", "before_x", "after_x"]
SQUARES = ["square_t", "square_y", "square_x"]
"""
DISTANCE = """
from deepmrf.ops.distance import gpu_kernels as kernels
build(
    kernels.shift_features, {"SAMPLES": 256, "ROWS": 8, "P": 64}, integers=["planes", "H", "W", "before", "after"],
    reals=["scale"],
)
for back, frames, keep in ((False, False, True), (True, False, False), (False, True, True), (True, True, False)):
    build(
        kernels.window_sums,
        {"BACK": back, "GATE": True, "KEEP": keep, "FRAMES": frames, "F": 1, "G": 2, "NB": 2, "K": 16, "UNROLL": 1,
         "STAGES": 1 if back else 3},
        integers=["L", "T", "H", "W", "first", "shown", "strip", "strips", "groups", "rows", *REACHES], reals=SQUARES,
        warps=1,
    )
for mirrored in (False, True):
    build(
        kernels.feature_pull,
        {"MIRRORED": mirrored, "GATE": True, "F": 3, "G": 2, "NB": 2, "K": 16, "UNROLL": 4},
        integers=["L", "T", "H", "W", "strip", "strips", "groups", "chunk", "chunks", *REACHES], warps=1,
    )
"""
GAUSSIAN = """
from deepmrf.ops.gaussian import gpu_kernels as kernels
tile = {"F": 3, "COLOURS": 4, "LABELS": 32, "GROUP": 32, "TY": 8, "TX": 8, "KEYS": 32}
build(
    kernels.pack, {"F": 3, "LABELS": 32, "COLOURS": 4, "BLOCK": 64, "GROUP": 32}, halves=["packed"], wholes=["bits"],
    integers=["L", "pixels"], reals=["feature_scale"],
)
integers = ["L", "T", "H", "W", "first", "shown", "tiles_x", *REACHES]
for back in (False, True):
    build(
        kernels.window_sums, {**tile, "BACK": back, "GATE": True, "KEEP": not back}, halves=["keys"],
        integers=integers, reals=SQUARES,
    )
build(kernels.feature_pull, {**tile, "ADD": True}, halves=["queries", "keys"], integers=integers, reals=SQUARES)
"""
CONTEXTS = """
from deepmrf.ops.contexts import gpu_kernels as kernels
for minimum, chunk in ((True, 0), (False, 16)):
    build(
        kernels.correlate,
        {"OUTPUTS": 21, "LABELS": 21, "K": 5 if minimum else 1, "GROUP": 1, "CHANNELS": 64, "SHIFTS": 1, "STEPS_ROW": 9,
         "STEPS": 81, "BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "LOG": 4, "GROUPS": 1, "MINIMUM": minimum,
         "STAGES": 3, "CHUNK": chunk},
        halves=["buffer", "packed"], wholes=["bits_x", "bits_w"], bytes=["active"],
        integers=["height", "width", "rows_in", "columns_in", "tiles"],
    )
"""
LATTICE = """
from deepmrf.ops.lattice import gpu_kernels as kernels
for axes in (1, 5):
    build(
        kernels.simplices, {"AXES": axes, "BLOCK": 256}, longs=["multipliers", "keys"], integers=["points", "total"]
    )
block = {"BLOCK_R": 32, "BLOCK_C": 32}
sizes = ["channels", "stride"]
build(
    kernels.splat, block, wholes=["pixels", "starts", "targets"], integers=["chunks", "entries", *sizes]
)
build(kernels.combine, block, wholes=["many", "starts"], integers=["first", *sizes])
build(kernels.blur, block, wholes=["neighbours"], integers=["vertices", *sizes])
for softmax in (False, True):
    build(
        kernels.slice_rows, {**block, "CORNERS": 9, "SOFTMAX": softmax}, wholes=["vertex"],
        integers=["points", *sizes], reals=["scale"],
    )
"""


def test_for_a_gpu(tmp_path) -> None:  # type: ignore[no-untyped-def]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    program = COMMON + DISTANCE + GAUSSIAN + CONTEXTS + LATTICE
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
