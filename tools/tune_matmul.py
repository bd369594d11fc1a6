"""Time the tilings of the fused matmuls on this GPU, and print the tables TUNED of matmul.py and quantized_matmul.py.

Run it without arguments. Each time is that of one matmul in a CUDA graph of many, over copies of the matrix that
together exceed the cache. Afterwards whole stacks of layers are timed with the chosen tilings, with and without PDL.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from outrider.kernels.cuda import quantized_matmul
from outrider.kernels.cuda.device import DEVICE, LAUNCH
from outrider.kernels.cuda.epilogue import Biases, Tiling
from outrider.kernels.cuda.matmul import TUNED, choose, launch
from outrider.kernels.cuda.matrices import MOST_TILES, PADDED, PER_WORD, SUM_FACTOR, UNITS, Matrix

TOKENS = (1, 5)
MANY_BYTES = 250_000_000  # bytes of all copies of a matrix: several times the L2 cache
SECONDS = 140  # time limit of the search
FEWEST = 60  # programs: fewer leave most of the GPU idle
REPLAYS = 3  # graph replays per measurement
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    name: str
    outputs: int
    columns: int
    use: Literal["norm", "add", "gated"]  # what is fused: the norm before, the residual after, norm and gate
    kind: Literal["float", "int8", "int4", "fp8"] = "float"

    @property
    def gated(self) -> bool:
        return self.use == "gated"

    @property
    def rows(self) -> int:
        return 2 * self.outputs if self.gated else self.outputs

    @property
    def bytes(self) -> int:
        numbers = self.rows * self.columns
        if self.kind == "float":
            return 2 * numbers
        return numbers if self.kind == "fp8" else numbers + numbers // 16 if self.kind == "int8" else 5 * numbers // 8


LARGE = (
    Shape("8B qkv", 6144, 4096, "norm"),
    Shape("8B output", 4096, 4096, "add"),
    Shape("8B gate, up", 14336, 4096, "gated"),
    Shape("8B down", 4096, 14336, "add"),
)
LARGE_HEAD = Shape("8B head", 128256, 4096, "norm")
SMALL = (
    Shape("135M qkv", 960, 576, "norm"),
    Shape("135M output", 576, 576, "add"),
    Shape("135M gate, up", 1536, 576, "gated"),
    Shape("135M down", 576, 1536, "add"),
)
SMALL_HEAD = Shape("135M head", 49152, 576, "norm")
QUANTIZED_KINDS: tuple[Literal["fp8", "int4", "int8"], ...] = ("fp8", "int4", "int8")
QUANTISED = tuple(replace(shape, kind=kind) for kind in QUANTIZED_KINDS for shape in (*LARGE, LARGE_HEAD))
FOR_LARGE = [
    Tiling(16, 256, 4, 4),
    Tiling(16, 512, 4, 3),
    Tiling(32, 128, 4, 5),
    Tiling(32, 128, 4, 7),
    Tiling(32, 256, 4, 4),
    Tiling(32, 256, 4, 6),
    Tiling(32, 256, 8, 4),
    Tiling(32, 512, 8, 3),
    Tiling(64, 64, 4, 6),
    Tiling(64, 128, 4, 4),
    Tiling(64, 128, 4, 6),
    Tiling(128, 64, 4, 5),
    Tiling(128, 128, 8, 3),
]
FOR_SMALL = [
    Tiling(16, 64, 2, 8),
    Tiling(16, 64, 4, 8),
    Tiling(16, 128, 4, 5),
    Tiling(16, 256, 4, 4),
    Tiling(16, 512, 4, 3),
    Tiling(32, 64, 4, 8),
    Tiling(32, 128, 4, 5),
]
FOR_QUANTISED = [
    Tiling(outputs, columns, warps, stages, parts=parts)
    for outputs, warps in ((64, 4), (128, 4), (64, 2), (32, 1))
    for columns in (128, 256)
    for stages in (3, 4, 6)
    for parts in (1, 2, 4, 8)
]


def main() -> None:
    started = time.perf_counter()
    copy = copy_bandwidth()
    say(f"{torch.cuda.get_device_name()}: copies {copy / 1e9:,.0f} GB/s\n")
    for shapes, tilings in (
        ((*LARGE, LARGE_HEAD), FOR_LARGE),
        ((*SMALL, SMALL_HEAD), FOR_SMALL),
        (QUANTISED, FOR_QUANTISED),
    ):
        for shape in shapes:
            tune(shape, (tiling for tiling in tilings if time.perf_counter() - started < SECONDS), copy)
    say("TUNED = {")
    for key, tiling in (*TUNED.items(), *quantized_matmul.TUNED.items()):
        say(f"    {key}: {tiling},".replace("'", '"'))
    say("}\n")
    time_layers("8B", LARGE, LARGE_HEAD, 32, 8, copy)
    time_layers("135M", SMALL, SMALL_HEAD, 30, 30, copy)
    say(f"{time.perf_counter() - started:.0f} s")


def tune(shape: Shape, tilings: Iterable[Tiling], copy: float) -> None:
    """Print the times of every tiling, and put the best into TUNED."""
    matrices = [random_matrix(shape) for _ in range(min(max(MANY_BYTES // shape.bytes, 1), 200))]
    best: tuple[float, Tiling | None] = (torch.inf, None)
    others = [seconds(cublas(shape, matrices, tokens)) for tokens in TOKENS] if shape.kind == "float" else []
    say(f"{shape.name}: {shape.rows} x {shape.columns}, {shape.bytes / 1e6:.1f} MB")
    for tiling in tilings:
        if tiling.outputs > 16 and shape.outputs * tiling.parts < FEWEST * tiling.outputs:
            continue
        if tiling.parts > 1 and shape.outputs >= 2 * MOST_TILES * tiling.outputs // tiling.parts:
            continue
        try:
            times = [seconds(fused(shape, matrices, tokens, tiling)) for tokens in TOKENS]
        except Exception as problem:  # too much shared memory, or registers, for this shape
            say(f"  {tiling}: {type(problem).__name__}")
            continue
        best = min(best, (sum(times), tiling), key=lambda found: found[0])
        say(f"  {tiling}: {report(times, shape, copy)}")
    if others:
        say(f"  cuBLAS, nothing fused: {report(others, shape, copy)}")
    if best[1] is not None and shape.kind == "float":
        TUNED[(matrices[0].data.element_size(), shape.rows, shape.columns, shape.gated)] = best[1]
    elif best[1] is not None:
        quantized_matmul.TUNED[(shape.kind, shape.rows, shape.columns, shape.gated, best[1].rows)] = best[1]
    say(f"  best: {best[1]}\n")
    choose.cache_clear()


def report(times: list[float], shape: Shape, copy: float) -> str:
    return ", ".join(
        f"{tokens} rows {1e6 * found:.2f} us {shape.bytes / found / 1e9:,.0f} GB/s {shape.bytes / found / copy:.0%}"
        for tokens, found in zip(TOKENS, times, strict=True)
    )


def random_matrix(shape: Shape) -> Matrix:
    size = (shape.rows, shape.columns)
    if shape.kind == "float":
        data = torch.randn(size, dtype=torch.bfloat16, device=DEVICE) / shape.columns**0.5
        return Matrix("float", size, data, torch.bfloat16)
    per_word = PER_WORD[shape.kind]
    words = torch.randint(0, 1 << 14, (shape.rows, shape.columns // per_word), dtype=torch.int16, device=DEVICE)
    if shape.kind == "fp8":
        span, channel = PADDED // per_word, torch.rand(shape.rows, device=DEVICE)
        return Matrix(shape.kind, size, words, torch.bfloat16, span, channel=channel)
    entries = shape.columns // (per_word * 32), shape.rows, per_word  # a scale for 32 columns
    if shape.kind == "int8":
        scales = torch.rand(entries, dtype=torch.bfloat16, device=DEVICE)
    else:
        pairs = torch.rand(*entries, 2, dtype=torch.bfloat16, device=DEVICE) / SUM_FACTOR
        pairs[..., 0] *= 1 / UNITS["int4"]
        scales = pairs.view(torch.int32).squeeze(-1)
    paired = shape.kind == "int4"
    return Matrix(shape.kind, size, words, torch.bfloat16, 32, groups=per_word, paired=paired, scales=scales)


def fused(shape: Shape, matrices: list[Matrix], tokens: int, tiling: Tiling) -> list[Callable[[], Any]]:
    """Return one call for each copy of the matrix."""
    residual = shape.use == "add"
    x = torch.randn(tokens, shape.columns, dtype=torch.bfloat16 if residual else torch.float32, device=DEVICE)  # [T, K]
    norm = None if residual else torch.rand(shape.columns, device=DEVICE)
    out = torch.zeros(
        tokens, shape.outputs, dtype=torch.bfloat16 if shape.gated else torch.float32, device=DEVICE
    )  # [T, N]
    activation: Literal["silu"] | None = "silu" if shape.gated else None

    none = Biases(None, None)

    def call(matrix: Matrix) -> Callable[[], None]:
        if shape.kind == "float":
            return lambda: launch(x, matrix, norm, EPS, none, out, tiling, activation, residual)
        states = x.to(torch.bfloat16)
        return lambda: quantized_matmul.launch(states, matrix, none, out, activation, residual, tiling)

    return [call(matrix) for matrix in matrices]


def cublas(shape: Shape, matrices: list[Matrix], tokens: int) -> list[Callable[[], Any]]:
    x = torch.randn(tokens, shape.columns, dtype=torch.bfloat16, device=DEVICE)  # [T, K]
    out = torch.empty(tokens, shape.rows, dtype=torch.bfloat16, device=DEVICE)

    def call(data: Tensor) -> Callable[[], Tensor]:
        return lambda: torch.mm(x, data.T, out=out)

    return [call(matrix.data) for matrix in matrices]


def seconds(calls: list[Callable[[], Any]]) -> float:
    """Return the seconds of one call, measured in a CUDA graph of all calls."""
    calls = calls * max(8 // len(calls), 1)
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return replayed(graph) / len(calls)


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Return the least of several measurements, in seconds."""
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1000 / REPLAYS)
    return min(times)


def copy_bandwidth() -> float:
    """Return the memory bandwidth: bytes read and written per second."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.copy_(source)
    return 2 * source.numel() / replayed(graph)


def time_layers(name: str, shapes: tuple[Shape, ...], head: Shape, layers: int, distinct: int, copy: float) -> None:
    """Return all matmuls of a decode step: those of every layer, then the head."""
    many = [[random_matrix(shape) for shape in shapes] for _ in range(distinct)]
    last = random_matrix(head)
    total = layers * sum(shape.bytes for shape in shapes) + head.bytes
    for tokens in TOKENS:
        calls: list[Callable[[], Any]] = []
        for layer in range(layers):
            for shape, matrix in zip(shapes, many[layer % distinct], strict=True):
                calls += fused(shape, [matrix], tokens, chosen(shape))
        calls += fused(head, [last], tokens, chosen(head))
        times = {"overlapped": len(calls) * seconds(calls)}
        kept = dict(LAUNCH)
        LAUNCH.clear()
        times["one after the other"] = len(calls) * seconds(calls)
        LAUNCH.update(kept)
        for how, found in times.items():
            say(f"{name}, {tokens} rows, {how}: {1e6 * found:,.0f} us a step, {total / found / copy:.1%} of copies")


def chosen(shape: Shape) -> Tiling:
    return choose(2, shape.rows, shape.columns, shape.gated)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
