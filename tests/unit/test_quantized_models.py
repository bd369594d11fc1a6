"""Models with quantized checkpoints say what transformers says with the same weights in floats."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tiny_heads
import tiny_modules
import tiny_quantized
from backends import every_kernels
from outrider import LLM, kernels
from outrider.kernels import cpu
from outrider.kernels.cases import inputs
from outrider.kernels.quantization import FORMATS, dequantize
from outrider.models import build
from outrider.speculation.checkpoints import open_head
from outrider.types import SamplingParams
from outrider.weights import open_checkpoint
from outrider.weights.integers import unpack_words
from tiny import CASES, prompt, run
from tiny_quantized import SCHEMES

TOKENS = prompt(23)
ROUNDED = 8e-3 if cpu.facts()["level"] == "amx" else 2e-3  # limit on differences of logits of about 1
ARCHITECTURE_SCHEMES = ("gptq-asymmetric", "awq", "w4a16-asymmetric", "w8a8", "fp8-block")


@pytest.fixture(params=every_kernels())
def ops(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_logits_equal_transformers(scheme: str, backend: str, tmp_path: Path) -> None:
    folder, original = tiny_quantized.folder("qwen3", scheme, tmp_path)
    wanted = original(torch.tensor([TOKENS])).logits[0]
    assert wanted.std() > 0.3
    logits, _ = run(build(open_checkpoint(folder), kernels.load(backend)), TOKENS, 7)
    # Beside integer weights, the CPU rounds activations to 14 bits, with AMX to 12. Matrices of one input whose orders
    # differ become halves: tiny_quantized orders those with different numbers of rows differently.
    limit = ROUNDED if backend == "cpu" and "fp8" not in scheme else 1e-4
    limit = 1e-2 if backend == "cpu" and scheme == "gptq-orders" else limit
    torch.testing.assert_close(logits, wanted, atol=limit, rtol=0)


@pytest.mark.parametrize(("name", "scheme"), list(zip(CASES, itertools.cycle(ARCHITECTURE_SCHEMES), strict=False)))
@torch.no_grad()
def test_every_architecture_may_be_quantized(name: str, scheme: str, tmp_path: Path) -> None:
    folder, original = tiny_quantized.folder(name, scheme, tmp_path)
    wanted = original(torch.tensor([TOKENS])).logits[0]
    logits, _ = run(build(open_checkpoint(folder), kernels.load("reference")), TOKENS, 7)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


def test_words_of_one_column_are_unpacked_whatever_their_stride() -> None:
    """A matrix of eight rows has its zero points in one word of each group, with any stride."""
    words = torch.arange(4, dtype=torch.int32).view(1, 4).T
    assert words.is_contiguous() and words.stride() == (1, 4)
    assert unpack_words(words, 4).tolist() == [[row, *[0] * 7] for row in range(4)]


@torch.no_grad()
def test_mxfp4_experts_of_gpt_oss_equal_transformers(ops: kernels.Kernels, tmp_path: Path) -> None:
    folder, original = tiny_quantized.gpt_oss_folder(tmp_path)
    wanted = original(torch.tensor([TOKENS])).logits[0]
    assert wanted.std() > 0.3
    model = build(open_checkpoint(folder), ops)
    logits, _ = run(model, TOKENS, 7)
    torch.testing.assert_close(logits, wanted, atol=1e-4 if ops is kernels.load("reference") else ROUNDED, rtol=0)
    config = original.config
    numbers = 3 * config.num_hidden_layers * config.hidden_size * config.intermediate_size
    assert model.idle_bytes == numbers * (config.num_local_experts - config.num_experts_per_tok) * 17 // 32


# What transformers needs to load a checkpoint of each scheme itself. w8a8 is left out: it rounds activations, too.
LOADERS = {
    "gptq": "gptqmodel",
    "gptq-act-order": "gptqmodel",
    "awq": "gptqmodel",
    "w4a16": "compressed_tensors",
    "w4a16-asymmetric": "compressed_tensors",
    "fp8-channel": "compressed_tensors",
    "fp8-block": "accelerate",
}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", LOADERS)
@torch.no_grad()
def test_logits_equal_the_checkpoint_loaded_by_transformers(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip(LOADERS[scheme])
    folder, _ = tiny_quantized.folder("llama", scheme, tmp_path)
    options = {}
    if scheme == "fp8-block":
        config = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=tiny_quantized.BLOCK)
        options["quantization_config"] = config
    original = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    wanted = original(torch.tensor([TOKENS])).logits[0]
    logits, _ = run(build(open_checkpoint(folder), kernels.load("reference")), TOKENS, 7)
    torch.testing.assert_close(logits, wanted, atol=5e-3, rtol=0)  # GPTQModel computes in half precision


@pytest.mark.parametrize("kind", ["q4_z", "q8_0", "fp8", "f32"])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_columns_in_another_order_multiply_their_inputs(kind: str, rows: int) -> None:
    random = inputs.generator(1)
    order = torch.randperm(128, generator=random).to(torch.int32)
    weight = replace(inputs.random_weight(random, kind, 40, 128), order=order)
    plain = dequantize(weight)
    assert torch.equal(plain[:, order], dequantize(replace(weight, order=None)))
    ops = kernels.load("cpu")
    matrix, x = ops.matrix(weight), inputs.normal(random, rows, 128)
    torch.testing.assert_close(ops.linear(x, matrix), x @ plain.T, atol=3e-3, rtol=0)
    tokens = torch.arange(40, dtype=torch.int32)
    assert torch.equal(ops.embed(matrix, tokens, 1.0), plain)


@pytest.mark.parametrize("scheme", ["gptq", "gptq-act-order", "awq", "w4a16", "w8a8", "fp8-block"])
def test_quantized_weights_take_less_memory(scheme: str, tmp_path: Path) -> None:
    folder, _ = tiny_quantized.folder("llama", scheme, tmp_path / "m")
    plain = build(open_checkpoint(tiny_quantized.tiny.folder("llama")), kernels.load("cpu"))
    small = build(open_checkpoint(folder), kernels.load("cpu"))
    head = plain.config.vocabulary * plain.config.width * 4
    assert small.weight_bytes - head < (plain.weight_bytes - head) * (0.3 if "8" in scheme else 0.17)


@pytest.mark.parametrize("scheme", ["gptq-asymmetric", "gptq-act-order", "w8a8", "fp8-channel"])
def test_speculation_changes_nothing(scheme: str, tmp_path: Path) -> None:
    folder, _ = tiny_quantized.folder("llama", scheme, tmp_path)
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
    prompts = ["abcabcabc", "the the the"]
    with LLM(str(folder), backend="cpu") as plain, LLM(str(folder), backend="cpu", speculate="ngram") as speculative:
        expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
        assert [output.outputs[0].token_ids for output in speculative.generate(prompts, params)] == expected


@pytest.mark.parametrize("scheme", ["gptq", "awq", "w4a16", "w8a8", "fp8-block"])
@pytest.mark.parametrize(("method", "layout"), [("eagle3", "specforge"), ("mtp", "deepseek"), ("mtp", "mimo")])
def test_draft_heads_may_be_quantized(method: str, layout: str, scheme: str, tmp_path: Path) -> None:
    (tiny_heads if method == "eagle3" else tiny_modules).make(method, tmp_path, layout=layout)
    plain = tiny_quantized.requantize(tmp_path, scheme)
    head = open_head(str(tmp_path))
    found = {name: head.weight(name) for name in head.names()}
    quantized = {name for name, weight in found.items() if FORMATS[weight.kind].quantized}
    assert len(quantized) == len(plain)
    worth = [dequantize(found[name]) for name in quantized]
    for tensor in plain:
        assert any(tensor.shape == each.shape and torch.equal(tensor, each) for each in worth)


def test_speculation_with_a_quantized_head_changes_nothing(tmp_path: Path) -> None:
    tiny_heads.make("eagle3", tmp_path / "head", layout="specforge")
    tiny_quantized.requantize(tmp_path / "head", "w4a16")
    folder, _ = tiny_quantized.folder("llama", "awq", tmp_path / "model")
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
    drafter = f"eagle3:model={tmp_path / 'head'}"
    with LLM(str(folder), backend="cpu") as plain, LLM(str(folder), backend="cpu", speculate=drafter) as speculative:
        expected = plain.generate(["abcabcabc"], params)[0].outputs[0].token_ids
        assert speculative.generate(["abcabcabc"], params)[0].outputs[0].token_ids == expected
