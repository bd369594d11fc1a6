"""An NVIDIA GPU as a device: asynchronous copies, fences on its stream, captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import collect_env

from .collection import suspended_collection
from .interface import NUMPY, Buffer, DeviceDefaults, Fence, Result, Values

MIN_CAPABILITY = (8, 0)  # Ampere, the first with bf16 matmul and asynchronous copies
FP8_CAPABILITY = (8, 9)  # Ada, the first with conversions of e4m3
RESERVE = 1 << 30  # bytes left free for graphs, library workspaces and fragmentation


def why_unavailable() -> str | None:
    """Return the reason that the CUDA kernels cannot run here, or None if they can."""
    if torch.version.hip:
        return "this torch is built for AMD GPUs (the kernels are for those of NVIDIA)"
    if not torch.version.cuda:
        return "this torch is built without CUDA (an NVIDIA GPU needs one that is built with it)"
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU (see `nvidia-smi`, the driver and `CUDA_VISIBLE_DEVICES`)"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return (
            f"the GPU `{torch.cuda.get_device_name()}` has compute capability {capability[0]}.{capability[1]}, "
            f"and the kernels need {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
        )
    if find_spec("triton") is None:
        return "Triton is not installed (`pip install triton`)"
    return None


def why_no_fp8() -> str | None:
    """Return the reason that kernels cannot convert e4m3 on this GPU, or None if they can."""
    capability = torch.cuda.get_device_capability()
    if capability >= FP8_CAPABILITY:
        return None
    needed = ".".join(map(str, FP8_CAPABILITY))
    return (
        f"the GPU `{torch.cuda.get_device_name()}` has compute capability {capability[0]}.{capability[1]}, and e4m3 "
        f"needs {needed}"
    )


def describe() -> dict[str, Any] | None:
    """Describe the GPU that torch sees, supported or not; None if there is none."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": collect_env.get_nvidia_driver_version(collect_env.run),  # type: ignore[no-untyped-call]
        "cuda": torch.version.cuda,
    }


class CudaFence:
    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def wait(self) -> None:
        self.event.synchronize()

    def since(self, earlier: CudaFence) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaBuffer:
    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(count, dtype=dtype, device=device)
        self._staging = torch.zeros(count, dtype=dtype).pin_memory()
        self._array: np.ndarray[Any, Any] = self._staging.numpy()
        self._copied: CudaFence | None = None

    def fill(self, values: Values) -> None:
        if self._copied is not None:
            self._copied.wait()
        self._array[:] = values
        self.tensor.copy_(self._staging, non_blocking=True)
        self._copied = CudaFence()

    def read(self, count: int) -> list[Any]:
        return self.tensor[:count].tolist()


class Cuda:
    defaults = DeviceDefaults(cache_share=0.95, step_tokens=2048, decode_steps=64, warms_up=True)
    alignment = 4  # 16 bytes: Triton compiles a kernel for aligned addresses and another for all
    has_graphs = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.torch_device)
        self._pool: Any = None  # memory shared by all graphs, which never run at the same time
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def upload(self, values: Values, dtype: torch.dtype) -> Tensor:
        return _pinned(values, dtype).to(self.torch_device, non_blocking=True)

    def buffer(self, count: int, dtype: torch.dtype) -> Buffer:
        return CudaBuffer(count, dtype, self.torch_device)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.torch_device)

    def host_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def fence(self) -> Fence:
        return CudaFence()

    def free_bytes(self) -> int:
        """Return the driver's free memory plus the unused part of torch's pool, less RESERVE."""
        free, _ = torch.cuda.mem_get_info()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return max(free + unused - RESERVE, 0)

    def empty_cache(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def peak_bytes(self, run: Callable[[], object]) -> int:
        self.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def capture(self, run: Callable[[], Result]) -> Callable[[], Result]:
        if self._pool is None:
            # The pool is freed with its last graph. This graph keeps it when all others are dropped.
            self._pool = torch.cuda.graph_pool_handle()
            self._anchor = self._capture(lambda: torch.zeros(1, device=self.torch_device))
        graph, result = self._capture(run)

        def replay() -> Result:
            graph.replay()
            return result

        return replay

    def _capture(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # A collection may destroy graphs and memory of another engine, which invalidates a capture.
        with torch.cuda.stream(self._stream), suspended_collection():
            try:
                # thread_local: calls of other threads (a profiler, another engine) do not invalidate this capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = run()
                finally:
                    graph.capture_end()
            except Exception:
                self._pool = None  # the allocator goes on recording to the pool of a failed capture
                raise
        torch.cuda.synchronize()
        return graph, result


def _pinned(values: Values, dtype: torch.dtype) -> Tensor:
    """Copy values to pinned memory; torch keeps it until the asynchronous copy is done."""
    array = np.asarray(values, NUMPY[dtype])
    if not array.size:
        return torch.from_numpy(array)
    return torch.from_numpy(array).pin_memory()
