"""Results of a row do not depend on its batch, on chunking, or on the number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from outrider.kernels import Kernels, cpu, reference
from outrider.kernels.cases import CASES, Case, Run, inputs, layers, logits
from outrider.kernels.cpu import _native
from outrider.kernels.quantization import FORMATS

# Batches of seventeen, beside the cases: one more than a tile of sixteen.
SEVENTEEN = [
    *[layers.linear(kind, 17, 52, 512) for kind in FORMATS],
    *[layers.mlp(kind, "silu", tokens=17) for kind in ("f32", "bf16", "q4_1", "q8_0", "q6_k")],
    logits.sample("seventeen", [{"top_p": 0.9}, {"temperature": 0.0}, {}, {"top_k": 5}] * 4 + [{}]),
    logits.top_logprobs("seventeen", 4, 17),
]
SEVERAL = [case for case in [*CASES, *SEVENTEEN] if case.items > 1]
EACH = pytest.mark.parametrize("case", SEVERAL, ids=[f"{case.op}: {case.name}" for case in SEVERAL])


@pytest.fixture
def threads() -> Iterator[None]:
    before = cpu.facts()["threads"]
    yield
    _native.set_thread_count(before)


def check(case: Case, run: Run) -> None:
    """Alone, and in pieces of one, seven and the rest, as in one go."""
    whole = run(None)
    count = case.items
    alone = [[item] for item in sorted({0, 1, count // 2, count - 1})]
    pieces = [list(range(first, last)) for first, last in ((1, 8), (8, count)) if first < last <= count]
    for items in [*alone, *pieces]:
        for result, meant in zip(run(items), whole, strict=True):
            assert torch.equal(result, meant[items]), f"items {items}"


@EACH
def test_cpu_results_do_not_depend_on_the_batch(case: Case, level: str) -> None:
    check(case, case.build(cpu, 2))


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_large_batches_do_not_change_a_row(kind: str, sign: float, level: str) -> None:
    rows, outputs, inputs_count = 8, 16, 64
    weight = inputs.random_weight(inputs.generator(5), kind, outputs, inputs_count)
    scales = {"q4_0": 2, "q4_1": 4, "q8_0": 2}[kind]
    blocks = weight.data.view(outputs, 2, -1)  # [N, K / 32, bytes of a block]
    blocks[:, :, scales:] = torch.where(torch.arange(outputs) % 2 == 0, 0xFF, 0x00).to(torch.uint8).view(-1, 1, 1)
    matrix = cpu.matrix(weight)
    x = torch.full((rows, inputs_count), sign)  # [T, K]
    whole = cpu.linear(x, matrix)
    for row in range(rows):
        assert torch.equal(cpu.linear(x[row : row + 1], matrix)[0], whole[row])


@EACH
def test_reference_results_do_not_depend_on_the_batch(case: Case) -> None:
    check(case, case.build(reference, 2))


@EACH
def test_results_do_not_depend_on_threads(case: Case, level: str, threads: None) -> None:
    run = case.build(cpu, 2)
    results = []
    for count in (1, 2, 3, 5):  # from four on, threads take tiles on demand
        _native.set_thread_count(count)
        results.append(run(None))
    for other in results[1:]:
        assert all(torch.equal(found, meant) for found, meant in zip(other, results[0], strict=True))


@pytest.mark.parametrize("ops", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_prompt_in_chunks_leaves_the_same_keys_and_states(ops: Kernels, dtype: torch.dtype) -> None:
    random = inputs.generator(4)
    layer = ops.attention_layer(inputs.attention_weights(random, "q8_0", inputs.SMALL, ["norm", "rotary"], window=30))
    batch = inputs.random_batch(random, [(0, 50), (3, 20)])
    start = inputs.random_pages(random, batch, inputs.SMALL, dtype)
    states = inputs.normal(random, 70, inputs.SMALL.width)  # [T, E]

    def layer_in(chunks: list[list[int]]) -> tuple[torch.Tensor, ...]:
        pages, x = inputs.copy_pages(start), states.clone()
        for tokens in chunks:
            part, rows = inputs.take_tokens(batch, tokens), x[tokens]
            ops.attend(ops.project_qkv(rows, layer, part, pages), layer, part, pages, rows)
            x[tokens] = rows
        return x, *(part.view(torch.uint8) for part in pages.tensors)

    whole = layer_in([list(range(70))])
    for size in (1, 7, 64):
        pieces = [list(range(first, min(first + size, 70))) for first in range(0, 70, size)]
        assert all(torch.equal(found, meant) for found, meant in zip(layer_in(pieces), whole, strict=True))
