"""Print how the Gaussian kernel's products wait when it is compiled for a GPU of compute capability 9.0, without one.

A line per kernel: its name, and the numbers of groups of products that may still run behind each wait.
"""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deepmrf.ops.gaussian import gpu, gpu_kernels

LABELS, FEATURES = 32, 3
POINTERS = {
    "keys": "fp16", "queries": "fp16", **dict.fromkeys(
        ("colours", "bandwidths", "scale", "key_scale", "query_scale", "q", "grad", "ungated", "weights", "out",
         "partials", "pull"), "fp32",
    ),
}  # fmt: skip
COMMON = {"F": FEATURES, "COLOURS": 4, "LABELS": LABELS, "GROUP": LABELS, "TY": 8, "TX": 8}


def waits(kernel: Any, constants: dict[str, Any], maxnreg: int | None) -> list[int]:
    """Compile; return the numbers that stand in the waits, in the order of the program."""
    names = kernel.arg_names
    types = {
        name: "constexpr" if name in constants else "*" + POINTERS[name] if name in POINTERS
        else "fp32" if name.startswith("square") else "i32" for name in names
    }  # fmt: skip
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in POINTERS}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=aligned)
    options = {"num_warps": gpu.WARPS, "num_stages": gpu.KEYS_IN_FLIGHT}
    if maxnreg is not None:
        options["maxnreg"] = maxnreg
    program = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return [int(number) for number in re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", program)]


def main() -> None:
    """Compile all three programs."""
    for back in (False, True):
        keys = gpu.MAX_KEYS_BACKWARD if back else gpu.MAX_KEYS
        constants = {**COMMON, "BACK": back, "GATE": False, "KEEP": False, "KEYS": keys}
        registers = gpu.MAX_REGISTERS_BACKWARD if back else gpu.MAX_REGISTERS
        print("backward" if back else "forward", *waits(gpu_kernels.window_sums, constants, registers))
    constants = {**COMMON, "ADD": False, "KEYS": gpu.MAX_KEYS_BACKWARD}
    print("feature_pull", *waits(gpu_kernels.feature_pull, constants, None))


if __name__ == "__main__":
    main()
