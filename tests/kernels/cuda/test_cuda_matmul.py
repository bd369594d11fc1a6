"""Matmuls on CUDA: packing, every kernel path, independence of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from carried import Carried
from outrider import warm_up
from outrider.device import graphs
from outrider.kernels import Activation, Weight, cuda, reference
from outrider.kernels.cases import CASES, Case, difference, inputs, layers
from outrider.kernels.cases.case import LOOSE
from outrider.kernels.cases.inputs import Shape
from outrider.kernels.cpu import quantize_weight
from outrider.kernels.cuda import epilogue, matmul, matrices, pointwise, quantized_matmul
from outrider.kernels.cuda.device import DEVICE
from outrider.kernels.cuda.epilogue import Biases, Tiling, fitting_stages
from outrider.kernels.cuda.matrices import Matrix
from outrider.kernels.quantization import FORMATS, dequantize

EPS = 1e-5
BIASES = ("gate_bias", "up_bias", "down_bias")
STORED = {"float": "bf16", "int8": "q8_0", "int8 with minima": "q5_1", "int4": "q4_1", "fp8": "fp8", "table": "iq4_nl"}


@pytest.fixture(autouse=True)
def quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, too, short rows stay as they are stored."""
    monkeypatch.setattr(matrices, "EXPANDED", 0)


def normal(seed: int, *shape: int) -> Tensor:
    return inputs.normal(inputs.generator(seed), *shape).to(DEVICE)


def weight(kind: str, rows: int, columns: int, seed: int = 1) -> Weight:
    return inputs.random_weight(inputs.generator(seed), kind, rows, columns)


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    return difference(found.to(expected.dtype), expected.to(found.device)) <= LOOSE[dtype]


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_weights_on_the_device_become_the_blocks_of_the_host(to: str) -> None:
    values = normal(4, 300, 96).bfloat16()
    host, device = (Weight("bf16", (300, 96), each) for each in (values.cpu(), values))
    assert torch.equal(quantize_weight(device, to).data.cpu(), quantize_weight(host, to).data)


def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * scale


CASES = [
    *[layers.linear(kind, rows, 52, 512) for kind in FORMATS for rows in (3, 40)],
    *[case for case in CASES if case.op in ("matrix", "embed", "rms_norm", "norm_linear", "soft_cap")],
    *[layers.linear("f32", 3, 33, 100), layers.linear("f16", 2, 16, 31), layers.linear("bf16", 2, 7, 65)],
    layers.linear("q8_0", 5, 1, 32),
    layers.mlp("f32", "gelu_tanh", ["norm", "post_norm"]),
    layers.mlp("f32", "swiglu_oai", list(BIASES)),
    layers.mlp("bf16", "swiglu_oai", [], tokens=70),
    layers.mlp("f16", "silu", []),
    layers.mlp("q4_0", "silu", ["norm", *BIASES, "post_norm"], tokens=17, shape=Shape(width=96, inner=160)),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.op}: {case.name}" for case in CASES])
def test_matmuls_agree_with_the_reference(case: Case) -> None:
    found = case.build(Carried(cuda, DEVICE), 1)(None)
    for result, meant in zip(found, case.build(reference, 1)(None), strict=True):
        assert difference(result, meant) <= case.loose


@pytest.mark.parametrize(
    "kinds", [["f32"], ["bf16", "f16"], ["f16", "q8_0"], ["q4_0", "q4_k"], ["q4_k", "q6_k", "q8_0"]]
)
def test_packed_matrices_are_stacked(kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "CHUNK", 512 * 3)  # rows are converted three at a time
    weights = [weight(kind, 5 + index, 512, index) for index, kind in enumerate(kinds)]
    packed = matrices.pack(weights, batch_invariant=True)
    meant = torch.cat([dequantize(part) for part in weights])
    assert packed.shape == tuple(meant.shape)
    assert packed.batch_invariant
    if packed.kind != "float":
        assert near(quantized_matmul.dequantized_rows(packed, 0, packed.shape[0]).float(), meant, packed.compute)
    some = matrices.rows(packed, 1, 5)
    assert some.shape == (4, 512)
    assert some.data.data_ptr() == packed.data[1].data_ptr()
    x = normal(3, 2, 512)
    assert near(matmul.linear(x, some), x.cpu() @ meant[1:5].T, packed.compute)


@pytest.mark.parametrize("factor", [2.0**-24, 1.0, 2.0**14])
def test_scales_of_any_half_neither_overflow_nor_vanish(factor: float) -> None:
    """Weights of int4 are computed as tiny numbers, with scales that are as much larger."""
    stored = weight("q4_1", 6, 256)
    pairs = stored.data.view(-1, 20)
    halves = (torch.rand(len(pairs), 2) * 2 - 1) * factor
    pairs[:, :4] = halves.to(torch.float16).view(torch.uint8)
    meant = dequantize(stored)
    found = quantized_matmul.dequantized_rows(matrices.matrix(stored), 0, 6).float().cpu()
    largest = meant.view(-1, 32).abs().amax(1, keepdim=True)  # of each group
    assert ((found - meant).view(-1, 32).abs() <= largest / 64).all()
    assert found.isfinite().all() and meant.abs().amax() > 0


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e8])
def test_states_of_any_size_times_fp8(size: float) -> None:
    """States are multiplied by 2^96, because the weights are as tiny."""
    stored = weight("fp8", 21, 256)  # an odd number of rows: each has one scale
    matrix, x = matrices.matrix(stored), normal(1, 3, 256) * size
    assert matrix.channel is not None
    assert near(matmul.linear(x, matrix) / size, x.cpu() @ dequantize(stored).T / size, torch.bfloat16)


@pytest.mark.parametrize(("kinds", "storage"), [(["q4_0", "q4_1"], "int4"), (["q4_0", "q5_0"], "int8")])
def test_quantized_matrices_stay_quantized(kinds: list[str], storage: str) -> None:
    packed = matrices.pack([weight(kind, 4, 128) for kind in kinds])
    assert packed.kind == storage
    assert packed.paired == (storage == "int4")
    assert packed.data.nbytes == 8 * 128 // (2 if storage == "int4" else 1)


@pytest.mark.parametrize("kind", ["iq4_nl", "mxfp4"])
def test_nibbles_with_a_table_take_four_bits(kind: str) -> None:
    packed = matrices.pack([weight(kind, 4, 384), weight(kind, 3, 384, 2)])
    assert (packed.kind, packed.table, packed.paired) == ("int4", kind, False)
    assert packed.data.nbytes == 7 * 384 // 2 and packed.scales is not None and packed.scales.nbytes == 7 * 384 // 16
    assert matrices.pack([weight(kind, 4, 384), weight("q4_0", 4, 384)]).kind == "int8"  # two tables in one matrix


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("tokens", [1, 16, 17, 40, 70])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_norm_bias_and_residual(storage: str, tokens: int, batch_invariant: bool) -> None:
    stored = weight(STORED[storage], 70, 160)
    matrix, numbers = matrices.matrix(stored, batch_invariant=batch_invariant), dequantize(stored).to(DEVICE)
    x, scale, bias, before = normal(1, tokens, 160), normal(2, 160), normal(3, 70), normal(4, tokens, 70)
    meant = rms_norm(x, scale) @ numbers.T + bias
    buffer = torch.full((tokens + 2, 70), torch.nan, device=DEVICE)
    found = matmul.matmul(x, matrix, norm=scale, eps=EPS, bias=bias, out=buffer[1:-1])
    assert found.data_ptr() == buffer[1].data_ptr()
    assert near(found, meant, torch.bfloat16)
    assert buffer[0].isnan().all()
    assert buffer[-1].isnan().all()
    residual = before.clone()
    assert matmul.matmul(x, matrix, norm=scale, eps=EPS, bias=bias, add=residual) is residual
    assert near(residual, before + meant, torch.bfloat16)
    halves = x.to(matrix.compute)
    assert near(matmul.linear(halves, matrix), halves.float() @ numbers.T, torch.bfloat16)


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [5, 20, 40, 70])
def test_the_gate_of_an_mlp(storage: str, activation: Activation, tokens: int) -> None:
    gate, up = weight(STORED[storage], 70, 96, 1), weight(STORED[storage], 70, 96, 2)
    x, scale, gate_bias, up_bias = normal(1, tokens, 96), normal(2, 96), normal(3, 70), normal(4, 70)
    found = matmul.gated_matmul(
        x,
        matrices.pack([gate, up]),
        norm=scale,
        eps=EPS,
        gate_bias=gate_bias,
        up_bias=up_bias,
        activation=activation,
    )
    states = rms_norm(x, scale)
    gated = states @ dequantize(gate).to(DEVICE).T + gate_bias
    active = functional.silu(gated) if activation == "silu" else functional.gelu(gated, approximate="tanh")
    meant = active * (states @ dequantize(up).to(DEVICE).T + up_bias)
    assert found.dtype == torch.bfloat16
    assert near(found, meant.bfloat16(), torch.bfloat16)


@pytest.mark.parametrize("kind", ["q4_k", "q5_1", "q6_k", "q8_0", "fp8", "iq4_nl", "mxfp4"])
def test_rows_of_a_quantized_matrix_are_dequantized(kind: str) -> None:
    """Ranges of rows that are no whole tiles, and rows that are padded."""
    columns = 256 if kind in ("q4_k", "q6_k") else 160
    stored = weight(kind, 75, columns)
    packed, meant = matrices.matrix(stored), dequantize(stored)
    for begin, end in ((0, 75), (33, 70), (74, 75), (5, 5)):
        found = quantized_matmul.dequantized_rows(packed, begin, end)
        assert found.shape == (end - begin, columns)
        assert near(found.float(), meant[begin:end], torch.bfloat16)


@pytest.mark.parametrize("kind", ["q4_k", "q6_k", "q8_0", "fp8"])
def test_many_rows_dequantize_a_matrix_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "EXPANDED_ROWS", 20)
    stored, x = weight(kind, 50, 256), normal(1, 21, 256)
    meant = x @ dequantize(stored).to(DEVICE).T
    for numbers in (matmul.EXPANDED, 256 * 7):
        monkeypatch.setattr(matmul, "EXPANDED", numbers)
        assert near(matmul.linear(x, matrices.matrix(stored)), meant, torch.bfloat16)
        before = normal(2, 21, 50)
        assert near(matmul.matmul(x, matrices.matrix(stored), add=before.clone()), before + meant, torch.bfloat16)


@pytest.mark.parametrize(
    ("storage", "tiling"),
    [
        ("f32", Tiling(16, 64, 4, 3)),
        ("f16", Tiling(32, 128, 4, 3)),
        ("bf16", Tiling(16, 64, 4, 8)),
        ("bf16", Tiling(64, 256, 4, 4)),
        ("bf16", Tiling(16, 32, 2, 4, parts=2, slices=2)),
        ("q5_1", Tiling(32, 128, 4, 3)),
        ("q8_0", Tiling(16, 128, 4, 3, rows=8)),
        ("q4_1", Tiling(32, 128, 4, 3)),
        ("q4_1", Tiling(16, 128, 4, 3, rows=8, slices=4)),
        ("q6_k", Tiling(64, 128, 4, 3, parts=2)),
        ("fp8", Tiling(64, 128, 4, 3)),
    ],
)
def test_rows_do_not_depend_on_each_other(storage: str, tiling: Tiling, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, five, forty: the same bits, for tilings that divide neither side of the matrix."""
    for module in (matmul, quantized_matmul):
        monkeypatch.setattr(module, "tiling", lambda *ignored: tiling)
    columns = 256 if storage == "q6_k" else 96
    matrix = matrices.matrix(weight(storage, 37, columns), batch_invariant=True)
    x, scale = normal(1, 40, columns), normal(2, columns)
    whole = matmul.norm_linear(x, scale, EPS, matrix)
    x[20:] = torch.nan
    for rows in (slice(0, 1), slice(3, 8), slice(4, 20), slice(0, 40)):
        found = matmul.norm_linear(x[rows], scale, EPS, matrix)
        assert torch.equal(found[: 20 - rows.start], whole[rows][: 20 - rows.start])


def test_fast_matmuls_of_few_rows_have_the_batch_invariant_bits() -> None:
    stored, x = weight("bf16", 40, 96), normal(1, 16, 96)
    batch_invariant = matmul.linear(x, matrices.matrix(stored, batch_invariant=True))
    assert torch.equal(matmul.linear(x[:3], matrices.matrix(stored)), batch_invariant[:3])


def test_tilings_depend_on_the_matrix_alone() -> None:
    matrix = matrices.matrix(weight("q4_1", 40, 96), batch_invariant=True)
    tilings = [quantized_matmul.tiling(matrix, False, tokens) for tokens in (1, 16, 17, 1000)]
    assert len({(tile.outputs, tile.columns, tile.warps, tile.parts) for tile in tilings}) == 1


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tiling]]:
    """Return the tiling on a GPU for N, K, gated, a number of rows and a kind; the interpreter has one for all."""
    monkeypatch.setattr(quantized_matmul, "INTERPRETED", False)
    quantized_matmul.choose.cache_clear()

    def choose(outputs: int, columns: int, gated: bool, tokens: int, kind: matrices.Kind = "fp8") -> Tiling:
        words = torch.empty(outputs, columns // matrices.PER_WORD[kind], dtype=torch.int16, device="meta")
        return quantized_matmul.tiling(matrices.Matrix(kind, (outputs, columns), words, torch.bfloat16), gated, tokens)

    yield choose
    quantized_matmul.choose.cache_clear()


SHAPES = [
    (2560, 9728, False),
    (19456, 2560, True),
    (4096, 14336, False),
    (5120, 17408, False),
    (1024, 2688, False),
    (1536, 8960, False),
    (9728, 896, True),
    (151936, 1536, False),
]


@pytest.mark.parametrize("kind", ["fp8", "int4", "int8"])
@pytest.mark.parametrize(("outputs", "columns", "gated"), [*SHAPES, *quantized_matmul.SHAPES])
def test_a_tiling_divides_its_matrix_and_fills_the_gpu(
    outputs: int, columns: int, gated: bool, kind: matrices.Kind, chosen: Callable[..., Tiling]
) -> None:
    for tokens in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 192, 193, 256, 257, 320, 384):
        tile = chosen(outputs, columns, gated, tokens, kind)
        assert columns % tile.columns == 0
        blocks = -(-tokens // tile.rows)
        assert blocks * tile.rows - tokens < (8 if tokens <= 16 else 64)  # rows of padding
        programs = blocks * -(-outputs // (1 + gated) // tile.outputs)
        if tile.rows == 8:
            assert programs * tile.parts >= 128 and (tile.parts == 1 or programs * tile.parts <= 640)
            continue
        known = blocks == 1 and (kind, outputs, columns, gated, tile.rows) in quantized_matmul.TUNED
        most = 132 if gated or tile.rows == 128 else 264 if tile.warps == 8 else 396
        if not known and tile.parts > 1:
            assert programs * tile.parts <= most
        steps = columns // tile.columns / tile.parts  # of a program's loop, on average
        assert known or 2 * programs * tile.parts > most or steps < 6


FLOAT_SHAPES = [*SHAPES, *quantized_matmul.SHAPES, (896, 896, False), (3072, 576, True), (34816, 5120, True)]


@pytest.mark.parametrize(("outputs", "columns", "gated"), FLOAT_SHAPES)
@pytest.mark.parametrize("rows", [16, 32])
def test_parts_of_a_float_matrix_fill_the_gpu_once(
    outputs: int, columns: int, gated: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "INTERPRETED", False)
    tile = matmul.choose.__wrapped__(torch.bfloat16.itemsize, outputs, columns, gated, rows)
    if rows == 32 and outputs >= 16384 and not gated:  # an LM head
        assert tile is None
        return
    assert tile is not None and (tile.rows == rows or tile.rows < rows == 16)
    programs, steps = tile.parts * -(-outputs // (1 + gated) // tile.outputs), -(-columns // tile.columns)
    assert tile.parts == 1 or (programs <= 132 and steps >= 2 * tile.parts)
    assert 2 * programs > 132 or steps < 4 * tile.parts


@pytest.mark.parametrize(("outputs", "columns", "gated"), FLOAT_SHAPES)
def test_gated_matmuls_of_64_rows_run_at_once_or_by_cublas(
    outputs: int, columns: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "INTERPRETED", False)
    key = torch.bfloat16.itemsize, outputs, columns, gated, 64
    tile = matmul.choose.__wrapped__(*key)
    at_once = gated and outputs <= 2 * 132 * 128
    assert (tile is not None) == at_once
    if tile is not None:
        assert tile.rows == 64
        assert key in matmul.TUNED or -(-outputs // 2 // tile.outputs) <= 132


@pytest.mark.parametrize("storage", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("gated", [False, True])
def test_cublas_multiplies_floats_of_many_rows_unless_results_are_batch_invariant(storage: str, gated: bool) -> None:
    fast, batch_invariant = (matrices.matrix(weight(storage, 64, 96), batch_invariant=each) for each in (False, True))
    most = 16 if storage == "f32" else 64 if gated else 32
    for tokens in (1, 16, 17, 32, 33, 64, 65, 1000):
        assert (matmul.tiling(fast, gated, tokens) is not None) == (tokens <= most)
        assert matmul.tiling(batch_invariant, gated, tokens) == matmul.tiling(batch_invariant, gated, 1) is not None


@pytest.mark.parametrize(("outputs", "columns"), [(8192, 128), (2048, 256), (57344, 256), (1024, 65536)])
def test_parts_of_few_rows_have_work(outputs: int, columns: int, chosen: Callable[..., Tiling]) -> None:
    """A program without an iteration would not wait for the kernel before it."""
    tile = chosen(outputs, columns, False, 1)
    assert columns // tile.columns >= tile.parts


def test_gated_matmuls_of_few_rows_have_one_tile_for_all_sizes(chosen: Callable[..., Tiling]) -> None:
    """Also one with as many outputs as an LM head."""
    shapes = ((16384, 2048), (28672, 4096), (57344, 8192))
    assert (
        len({chosen(outputs, columns, True, 5, kind) for outputs, columns in shapes for kind in ("fp8", "int4")}) == 1
    )


def test_prompts_of_the_warm_up_have_all_tilings(chosen: Callable[..., Tiling]) -> None:
    """A kernel is compiled for the rows of a tile, and for a split matrix."""
    assert min(warm_up.PROMPTS) > graphs.MAX_TOKENS and max(warm_up.PROMPTS) > matmul.EXPANDED_ROWS
    for outputs, (columns, gated) in product(range(1024, 32768, 512), ((4096, False), (14336, False), (4096, True))):

        def kernels(counts: Iterable[int], shape: tuple[int, int, bool] = (outputs, columns, gated)) -> set[Any]:
            tiles = [chosen(*shape, tokens) for tokens in counts if tokens <= matmul.EXPANDED_ROWS]
            return {(replace(tile, parts=1), tile.parts > 1) for tile in tiles}

        assert kernels(range(graphs.MAX_TOKENS + 1, 800)) == kernels(warm_up.PROMPTS)


@pytest.mark.parametrize(
    ("outputs", "columns", "kind"), [(512, 1024, "float"), (512, 1056, "int4"), (1 << 15, 32, "int4")]
)
def test_short_rows_are_floats_but_for_those_of_a_head(
    outputs: int, columns: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrices, "EXPANDED", 1024)
    assert matrices.matrix(weight("q4_1", outputs, columns)).kind == kind


@pytest.mark.parametrize("kind", ["f32", "q4_1", "q6_k"])
def test_ids_of_padding_read_the_ends_of_a_table(kind: str) -> None:
    stored = weight(kind, 11, 256)
    tokens = torch.tensor([-(1 << 31), -1, 0, 4, 10, 11, (1 << 31) - 1], dtype=torch.int32, device=DEVICE)
    meant = dequantize(stored)[tokens.cpu().long().clamp(0, 10)] * 2.5
    table = matrices.matrix(stored)
    assert near(pointwise.embed(table, tokens, 2.5), meant, table.compute)


def test_norms_of_any_width_add_to_their_output() -> None:
    for width in (1, 576, 12288):
        x, y, scale = normal(1, 3, width), 4 * normal(2, 3, width), normal(3, width)
        out = x.clone()
        pointwise.add_normed(out, y, scale, EPS)
        assert near(out, x + rms_norm(y, scale), torch.float32)
        assert near(pointwise.rms_norm(y, scale, EPS, torch.bfloat16).float(), rms_norm(y, scale), torch.bfloat16)


def test_large_states_before_a_norm_stay_finite_as_halves() -> None:
    stored, x = weight("f16", 16, 64), normal(1, 2, 64)
    x[0, 3] = 1e6
    found = matmul.norm_linear(x, torch.ones(64, device=DEVICE), EPS, matrices.matrix(stored))
    assert found.isfinite().all()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_empty_batches_are_accepted(batch_invariant: bool) -> None:
    matrix = matrices.matrix(weight("bf16", 8, 32), batch_invariant=batch_invariant)
    nothing = torch.empty(0, 32, device=DEVICE)
    assert matmul.linear(nothing, matrix).shape == (0, 8)
    assert pointwise.embed(matrix, torch.empty(0, dtype=torch.int32, device=DEVICE), 1.0).shape == (0, 32)
    assert pointwise.rms_norm(nothing, torch.ones(32, device=DEVICE), EPS).shape == (0, 32)
    both = matmul.gated_matmul(nothing, matrix, norm=None, eps=EPS, gate_bias=None, up_bias=None, activation="silu")
    assert both.shape == (0, 4)


def test_unaligned_matrices_are_copied() -> None:
    memory = torch.arange(65, dtype=torch.float32, device=DEVICE)
    matrix: Matrix = matrices.matrix(Weight("f32", (4, 16), memory[1:]))
    assert matrix.data.data_ptr() % matrices.ALIGNMENT == 0
    assert torch.equal(matrix.data.flatten(), memory[1:])


TILINGS = {
    "one step": Tiling(16, 256, 4, 1, rows=8),
    "one step in slices": Tiling(16, 256, 4, 1, rows=8, slices=4),
    "several steps in slices": Tiling(16, 64, 4, 2, slices=2),
    "parts of one step": Tiling(16, 64, 4, 1, rows=8, parts=3, slices=2),
    "parts of unequal length": Tiling(16, 32, 4, 2, parts=4),
    "many rows": Tiling(32, 64, 4, 2, rows=64),
    "parts of many rows": Tiling(16, 64, 4, 2, rows=32, parts=2),
}
QUANTIZED_TILINGS = {
    "one part": Tiling(16, 128, 4, 1),
    "several chunks, eight rows": Tiling(16, 256, 4, 2, rows=8),
    "three parts, many rows": Tiling(32, 256, 2, 2, parts=3, rows=128),
    "parts of unequal length": Tiling(16, 128, 4, 2, rows=8, parts=4),
    "more parts than are loaded at once": Tiling(16, 128, 4, 2, rows=8, parts=6),
    "slices of a chunk": Tiling(16, 256, 2, 2, rows=8, slices=2),
    "slices within a chunk, in parts": Tiling(16, 128, 4, 2, parts=2, slices=4),
}


def gated_if(activation: Activation | None, product: Tensor) -> Tensor:
    if activation is None:
        return product
    gate, up = product.chunk(2, 1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("name", TILINGS)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_any_tiling_gives_the_same_matmul(name: str, activation: Activation | None) -> None:
    columns, outputs = 192, 21
    stored = weight("bf16", outputs * (1 if activation is None else 2), columns)
    x, norm = normal(2, 10, columns), normal(3, columns)
    found = torch.empty(10, outputs, device=DEVICE)
    none = Biases(None, None)
    matmul.launch(x, matrices.matrix(stored), norm, EPS, none, found, TILINGS[name], activation, False)
    meant = gated_if(activation, rms_norm(x.cpu(), norm.cpu()) @ dequantize(stored).T)
    assert near(found, meant, torch.bfloat16)


@pytest.mark.parametrize("kind", ["q4_1", "q4_k", "q5_k", "q6_k", "q8_0", "fp8"])
@pytest.mark.parametrize("name", QUANTIZED_TILINGS)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_any_tiling_gives_the_same_quantized_matmul(name: str, activation: Activation | None, kind: str) -> None:
    columns, outputs = 768, 21
    stored = weight(kind, outputs * (1 if activation is None else 2), columns)
    x = normal(2, 10, columns).bfloat16()
    found = torch.empty(10, outputs, device=DEVICE)
    none, tile = Biases(None, None), QUANTIZED_TILINGS[name]
    quantized_matmul.launch(x, matrices.matrix(stored), none, found, activation, False, tile)
    meant = gated_if(activation, x.cpu().float() @ dequantize(stored).T)
    factors = 1 if activation is None else 2  # each has its error
    assert difference(found.cpu(), meant) <= factors * LOOSE[torch.bfloat16]


@pytest.mark.parametrize(
    ("period", "groups", "has_channel"), [(512, 0, True), (128, 1, False), (32, 2, False)], ids=["row", "block", "32"]
)
def test_scales_of_fp8_are_stored_once(period: int, groups: int, has_channel: bool) -> None:
    """A scale for each row is applied to the sums; one for 128 columns is not repeated for each 32."""
    stored = weight("fp8", 21, 512)
    blocks = stored.data.view(21, -1, 36)
    scales = 0.01 * (1 + torch.arange(21 * 16).view(21, -1) // (period // 32)).float()
    blocks[:, :, :4] = scales[:, :, None].view(torch.uint8)
    packed = matrices.matrix(stored)
    assert (packed.groups, packed.channel is not None) == (groups, has_channel)
    x = normal(1, 3, 512)
    assert near(matmul.linear(x, packed), x.cpu() @ dequantize(stored).T, torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "columns", "gated", "stages"),
    [
        ("bf16", 128, False, 5),
        ("bf16", 128, True, 3),
        ("f32", 64, True, 3),
        ("q8_0", 128, False, 6),
        ("q4_1", 512, True, 2),
    ],
)
def test_pipelines_fit_99_kib_of_shared_memory(
    kind: str, columns: int, gated: bool, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is what a program may use on GPUs of compute capability 8.6, 8.9 and 12.0."""
    tile, packed = Tiling(64, columns, 4, 6), cuda.matrix(weight(kind, 128, 1024))
    for shared_memory, expected in ((1 << 20, 6), (99 << 10, stages)):
        monkeypatch.setattr(epilogue, "shared_memory", lambda size=shared_memory: size)
        assert fitting_stages(tile, packed, packed.compute, gated) == expected
