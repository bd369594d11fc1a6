"""Compile the Triton kernels of the cases of some operations, for a GPU of compute capability 9.0 that is not there.

Usage: compile_kernels.py COUNT OPERATION, with the number of cases. Launches compile and do nothing, so results are not
checked.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Driver:
    """What Triton's compiler asks of a GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def run(count: int, operation: str) -> None:
    driver.set_active(Driver())
    launch = JITFunction.run

    refused: list[Exception] = []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        try:
            return launch(self, *args, grid=grid, warmup=True, **options)
        except Exception as error:
            refused.append(error)
            raise

    JITFunction.run = compile_only
    from outrider.kernels import cuda
    from outrider.kernels.cases import CASES
    from outrider.kernels.cuda import matrices

    for name, module in list(sys.modules.items()):
        if name.startswith("outrider.kernels.cuda") and hasattr(module, "DEVICE"):
            module.DEVICE = torch.device("cpu")
    matrices.EXPANDED = 0  # short rows stay quantized
    vars(sys.modules["outrider.kernels.cuda.matmul"])["_cublas"] = lambda *_: None
    cases = [case for case in CASES if case.op == operation and not case.timed]
    for case in cases[:: -(-len(cases) // count)]:
        sys.stdout.write(f"{operation}: {case.name}\n")
        with contextlib.suppress(Exception):  # a case may stumble over results that are not there
            case.build(cuda, 1)(None)
    if refused:
        raise refused[0]


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2])
