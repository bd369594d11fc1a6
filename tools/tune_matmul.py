"""Choose the tilings of the fused matmuls on this GPU: those that are fastest in chains of layers.

A matrix after the other takes the candidate with which the whole chain is fastest. Alone, other tilings win: under PDL
the programs of a matmul start while those of the kernel before hold memory and registers of some multiprocessors. Each
time is the median of several replays of a CUDA graph of about 32 layers, whose matrices exceed the cache. The results
are printed as entries of TUNED in matmul.py or quantized_matmul.py.

Usage: tune_matmul.py [--models 8B,...] [--kinds float,int4,int8,fp8] [--rows 8,16,64]. All candidates of 8B in int4
with 8 rows take about a minute on an H200, most of it for compilation, which uses all cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from outrider.kernels.cuda import matmul, quantized_matmul
from outrider.kernels.cuda.device import DEVICE
from outrider.kernels.cuda.epilogue import ROWS, Biases, Tiling
from outrider.kernels.cuda.matrices import Kind, Matrix, pack
from outrider.kernels.quantization import quantize_fp8, quantize_int4, quantize_int8
from outrider.kernels.structures import Activation, Weight

LAYERS = 32  # of a chain, about
DISTINCT_BYTES = 400_000_000  # of the matrices of a chain: several times the L2 cache
REPLAYS = 7
LEAST_GAIN = 0.1  # us a layer, below which the former tiling stays: about the spread of equal runs
EPS = 1e-5
BYTES = {"float": 2.0, "int8": 1.1, "int4": 0.63, "fp8": 1.0}  # of a weight, with scales
QUANTIZE = {"int8": quantize_int8, "int4": quantize_int4, "fp8": quantize_fp8}


class Shape(NamedTuple):
    outputs: int  # rows of the matrix
    columns: int
    gated: bool


@dataclass(frozen=True)
class Model:
    """Matrices of a layer: their rows and columns."""

    width: int
    qkv: int
    heads: int  # columns of the attention output
    inner: int
    vocabulary: int

    def shapes(self) -> dict[str, Shape]:
        """Return those of a layer, the one that depends most on its tiling first."""
        return {
            "down": Shape(self.width, self.inner, False),
            "gate": Shape(2 * self.inner, self.width, True),
            "out": Shape(self.width, self.heads, False),
            "qkv": Shape(self.qkv, self.width, False),
        }

    def head(self) -> dict[str, Shape]:
        return {"head": Shape(self.vocabulary, self.width, False)}


MODELS = {
    "135M": Model(576, 960, 576, 1536, 49152),
    "1B": Model(2048, 3072, 2048, 8192, 128256),
    "1.5B": Model(1536, 2048, 1536, 8960, 151936),
    "4B": Model(2560, 6144, 4096, 9728, 151936),
    "8B": Model(4096, 6144, 4096, 14336, 128256),
    "14B": Model(5120, 7168, 5120, 17408, 151936),
}


class Job(NamedTuple):
    kind: Kind
    shape: Shape
    tile: Tiling


def candidates(kind: Kind, shape: Shape, rows: int) -> Iterator[Tiling]:
    """Yield tilings that fill the GPU, and do not split a matrix into more programs than help."""
    outputs = shape.outputs // 2 if shape.gated else shape.outputs
    if kind == "float" and rows > ROWS:
        many = [(32, 4), (64, 4), (64, 8), (128, 8)] if shape.gated else [(64, 4), (128, 4), (128, 8), (256, 8)]
        for (tile_outputs, warps), columns, stages, parts in product(many, (64, 128), (4, 8), (1, 2, 4, 8)):
            programs = -(-outputs // tile_outputs) * parts
            if 96 <= programs <= 528 and shape.columns / columns / parts >= 2:
                yield Tiling(tile_outputs, columns, warps, stages, rows, parts)
        return
    sizes = [(16, 4), (32, 4), (64, 4), (128, 8)]
    if kind != "float":
        sizes = [(16, 2), (32, 2), (32, 4), (64, 4), (64, 8)] if shape.gated else [(32, 2), (64, 4), (128, 4), (128, 8)]
    for (tile_outputs, warps), columns, stages, parts in product(sizes, (128, 256, 512), (3, 4, 6), (1, 2, 4, 8)):
        programs = -(-outputs // tile_outputs) * parts
        steps = shape.columns / columns / parts  # of a program's loop
        if shape.columns % columns or steps < 1.5 or (shape.gated and parts > 2):
            continue
        if programs >= 96 and (parts == 1 or programs <= 640) and tile_outputs * columns <= 1 << 15:
            yield Tiling(tile_outputs, columns, warps, stages, rows, parts)
    for columns, warps in product((256, 512), (2, 4)):
        if kind != "float" and rows == 8 and not shape.gated and shape.columns % columns == 0:
            yield Tiling(16, columns, warps, 4, rows, slices=warps)


def tiling_of(kind: Kind, shape: Shape, rows: int) -> Tiling | None:
    """Return the tiling in use; None: cuBLAS."""
    if kind == "float":
        return matmul.choose(2, *shape, rows)
    return quantized_matmul.choose(kind, *shape, rows, 1)


def use(kind: Kind, shape: Shape, rows: int, tile: Tiling | None) -> None:
    if kind != "float":
        assert tile is not None
        quantized_matmul.TUNED[(kind, *shape, rows)] = tile
        quantized_matmul.choose.cache_clear()
        return
    if tile is None:
        matmul.TUNED.pop((2, *shape, rows), None)
    else:
        matmul.TUNED[(2, *shape, rows)] = tile
    matmul.choose.cache_clear()


def random_matrix(kind: Kind, shape: Shape) -> Matrix:
    size = (shape.outputs, shape.columns)
    weight = Weight("bf16", size, torch.randn(size, dtype=torch.bfloat16, device=DEVICE) / shape.columns**0.5)
    return pack([weight if kind == "float" else QUANTIZE[kind](weight)], expand=False)


@dataclass(frozen=True)
class Chain:
    layers: list[dict[str, Matrix]]
    norm: Tensor  # [E] f32
    x: Tensor  # [T, E] f32
    mixed: Tensor  # [T, H * D], as it is multiplied

    def run(self, layers: list[dict[str, Matrix]]) -> None:
        """Run the matmuls and norms of layers, without attention, or those of LM heads."""
        for layer in layers:
            if "head" in layer:
                matmul.norm_linear(self.x, self.norm, EPS, layer["head"])
                continue
            matmul.matmul(self.x, layer["qkv"], norm=self.norm, eps=EPS)
            matmul.matmul(self.mixed, layer["out"], add=self.x)
            inner = matmul.gated_matmul(
                self.x, layer["gate"], norm=self.norm, eps=EPS, gate_bias=None, up_bias=None, activation="silu"
            )
            matmul.matmul(inner, layer["down"], add=self.x)

    def microseconds(self) -> float:
        """Return the time of a layer."""
        self.run(self.layers[:1])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(self.layers)
        graph.replay()
        times = []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1000 * float(begin.elapsed_time(end)) / len(self.layers))
        return statistics.median(times)


def random_layers(shapes: dict[str, Shape], kind: Kind) -> list[dict[str, Matrix]]:
    layer_bytes = BYTES[kind] * sum(shape.outputs * shape.columns for shape in shapes.values())
    distinct = min(max(2, int(DISTINCT_BYTES / layer_bytes)), LAYERS)
    layers = [{name: random_matrix(kind, shape) for name, shape in shapes.items()} for _ in range(distinct)]
    return layers * (LAYERS // distinct)


def chain_of(model: Model, layers: list[dict[str, Matrix]], tokens: int) -> Chain:
    x = torch.randn(tokens, model.width, device=DEVICE)  # [T, E]
    mixed = torch.randn(tokens, model.heads, device=DEVICE).to(torch.bfloat16)  # [T, H * D]
    return Chain(layers, torch.rand(model.width, device=DEVICE), x, mixed)


def tune(chain: Chain, kind: Kind, shapes: dict[str, Shape], rows: int) -> None:
    """Print the times of all candidates, and use the fastest of each matrix."""
    say(f"{kind}, tiles of {rows} rows, {len(chain.x)} tokens: {chain.microseconds():.2f} us")
    for matrix, shape in shapes.items():
        chosen = tiling_of(kind, shape, rows)
        use(kind, shape, rows, chosen)
        least = chain.microseconds()
        found = [f"{described(chosen)} {least:.2f}"]
        for tile in candidates(kind, shape, rows):
            use(kind, shape, rows, tile)
            try:
                time = chain.microseconds()
            except Exception as problem:  # too much shared memory, or registers
                found.append(f"{described(tile)} {type(problem).__name__}")
                continue
            found.append(f"{described(tile)} {time:.2f}")
            if time < least - LEAST_GAIN:
                least, chosen = time, tile
        use(kind, shape, rows, chosen)
        say(f"  {matrix}: {described(chosen)} of {'; '.join(found)}")


def described(tile: Tiling | None) -> str:
    if tile is None:
        return "cuBLAS"
    sliced = f", slices={tile.slices}" if tile.slices > 1 else ""
    return f"({tile.outputs}, {tile.columns}, {tile.warps}, {tile.stages}, {tile.parts}{sliced})"


def compile_tiling(job: Job) -> None:
    """Run a tiling once in a process of its own, so that its kernel is in Triton's cache on disk."""
    kind, shape, tile = job
    few = shape._replace(outputs=min(shape.outputs, 4 * tile.outputs))
    matrix = random_matrix(kind, few)
    x = torch.randn(1, shape.columns, device=DEVICE)  # [T, K]
    norm = torch.ones(shape.columns, device=DEVICE)
    none = Biases(None, None)
    outputs = few.outputs // 2 if shape.gated else few.outputs
    out = torch.zeros(1, outputs, dtype=matrix.compute if shape.gated else torch.float32, device=DEVICE)  # [T, N]
    for add in (False,) if shape.gated else (False, True):
        activation: Activation | None = "silu" if shape.gated else None
        try:
            if kind == "float":
                states, weight = (x.to(matrix.compute), None) if add or tile.rows > ROWS else (x, norm)
                matmul.launch(states, matrix, weight, EPS, none, out, tile, activation, add)
            else:
                quantized_matmul.launch(x.to(matrix.compute), matrix, none, out, activation, add, tile)
        except Exception:  # it is reported where it is measured
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8B", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--kinds", default="int4,fp8,int8", help=f"of {', '.join(get_args(Kind))}")
    parser.add_argument("--rows", default="8", help="rows of a tile; of float matrices 16, 32 or 64")
    asked = parser.parse_args()
    kinds: list[Kind] = asked.kinds.split(",")
    models = {name: MODELS[name] for name in asked.models.split(",")}
    asked_rows = [int(each) for each in asked.rows.split(",")]
    if "float" in kinds and any(each not in (8, ROWS, *matmul.MANY_ROWS) for each in asked_rows):
        parser.error(f"tiles of float matrices have {ROWS} rows, or {' or '.join(map(str, matmul.MANY_ROWS))}")
    rows = {kind: sorted({max(each, ROWS) if kind == "float" else each for each in asked_rows}) for kind in kinds}
    jobs = [
        Job(kind, shape, tile)
        for model, kind in product(models.values(), kinds)
        for shape, each in product((model.shapes() | model.head()).values(), rows[kind])
        for tile in candidates(kind, shape, each)
    ]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_tiling, jobs))
    for (name, model), kind in product(models.items(), kinds):
        for shapes in (model.shapes(), model.head()):
            layers = random_layers(shapes, kind)
            for each in rows[kind]:
                say(f"{name}, {', '.join(shapes)}")
                tokens = 1 if each == (ROWS if kind == "float" else 8) else each
                tune(chain_of(model, layers, tokens), kind, shapes, each)
            del layers
    for table in (matmul.TUNED, quantized_matmul.TUNED):
        for key, tile in table.items():
            say(f"{key}: {tile}".replace("'", '"'))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
