"""The reference backend against torch's own operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional

from outrider.kernels import reference
from outrider.kernels.cases import inputs
from outrider.kernels.cases.inputs import PAGE, SMALL
from outrider.kernels.cases.layers import EVERYTHING


def test_norm_and_linear() -> None:
    random = inputs.generator(1)
    x, weight = inputs.normal(random, 4, 48), inputs.normal(random, 48)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-6), functional.rms_norm(x, (48,), weight, 1e-6))
    other = inputs.normal(random, 5, 48)
    torch.testing.assert_close(reference.linear(x, other), functional.linear(x, other))


@pytest.mark.parametrize("window", [0, 7])
def test_a_prompt_through_attention_equals_torch(window: int) -> None:
    random = inputs.generator(2)
    weights = inputs.attention_weights(random, "f32", SMALL, EVERYTHING, window)
    layer, batch = reference.attention_layer(weights), inputs.random_batch(random, [(0, 40)])
    pages = inputs.random_pages(random, batch, SMALL, torch.float32)
    x = inputs.normal(random, 40, SMALL.width)
    normed = functional.rms_norm(x, (SMALL.width,), weights.norm, weights.eps)

    def heads(matrix: torch.Tensor, bias: torch.Tensor | None, norm: torch.Tensor | None) -> torch.Tensor:
        out = functional.linear(normed, matrix, bias).unflatten(1, (-1, SMALL.head_dim)).transpose(0, 1)
        if norm is None:
            return out  # [heads, T, D]
        out = functional.rms_norm(out, (SMALL.head_dim,), norm, weights.eps)
        assert weights.cos is not None and weights.sin is not None
        # Rotation as a complex product: dimension i is the real part of i + D / 2.
        rotation = torch.complex(weights.cos[:40], weights.sin[:40])
        rotated = torch.complex(*out.chunk(2, -1)) * rotation
        return torch.cat([rotated.real, rotated.imag], -1)

    query = heads(layer.query, weights.query_bias, weights.query_norm)
    key = heads(layer.key, weights.key_bias, weights.key_norm)
    value = heads(layer.value, weights.value_bias, None)
    here = torch.arange(40)
    seen = (here[:, None] >= here) & (here[:, None] - here < (window or 40))
    mixed = functional.scaled_dot_product_attention(query, key, value, seen, scale=weights.scale, enable_gqa=True)
    out = functional.linear(mixed.transpose(0, 1).flatten(1), layer.output, weights.output_bias)
    expected = x + functional.rms_norm(out, (SMALL.width,), weights.post_norm, weights.eps)

    queries = reference.project_qkv(x, layer, batch, pages)
    torch.testing.assert_close(queries.unflatten(1, (-1, SMALL.head_dim)).transpose(0, 1), query, rtol=1e-4, atol=1e-5)
    page = batch.page_tables[0, here // PAGE].long()
    torch.testing.assert_close(pages.keys[page, :, here % PAGE].transpose(0, 1), key, rtol=1e-4, atol=1e-5)
    reference.attend(queries, layer, batch, pages, x)
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-4)


def test_stored_halves_are_rounded_and_read_as_they_are() -> None:
    random = inputs.generator(3)
    layer = reference.attention_layer(inputs.attention_weights(random, "f32", SMALL))
    batch = inputs.random_batch(random, [(0, 3)])
    full = inputs.random_pages(random, batch, SMALL, torch.float32)
    half = replace(full, keys=full.keys.half(), values=full.values.half())
    x = inputs.normal(random, 3, SMALL.width)
    reference.project_qkv(x, layer, batch, full)
    queries = reference.project_qkv(x, layer, batch, half)
    page, slot = batch.slots.long() // PAGE, batch.slots.long() % PAGE
    assert torch.equal(half.keys[page, :, slot], full.keys[page, :, slot].half())
    rounded = replace(full, keys=half.keys.float(), values=half.values.float())
    found, expected = x.clone(), x.clone()
    reference.attend(queries, layer, batch, half, found)
    reference.attend(queries, layer, batch, rounded, expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_mlp(activation: str) -> None:
    random = inputs.generator(4)
    options = ["norm", "post_norm", "gate_bias", "up_bias", "down_bias"]
    weights = inputs.mlp_weights(random, "f32", SMALL, activation, options)
    layer, x = reference.mlp_layer(weights), inputs.normal(random, 3, SMALL.width)
    normed = functional.rms_norm(x, (SMALL.width,), weights.norm, weights.eps)
    gate = functional.linear(normed, layer.gate, weights.gate_bias)
    gate = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    inner = gate * functional.linear(normed, layer.up, weights.up_bias)
    out = functional.linear(inner, layer.down, weights.down_bias)
    expected = x + functional.rms_norm(out, (SMALL.width,), weights.post_norm, weights.eps)
    reference.mlp(x, layer)
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5)


def test_process_logits() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.5]])
    processors = inputs.make_processors(
        [(False, {0: (2.0, 0.5), 1: (2.0, 0.0), 3: (1.0, -torch.inf)}), (True, {1: (1.0, 1.0)})]
    )
    reference.process_logits(logits, processors)
    assert logits.tolist() == [[1.5, -4.0, 1.0, -torch.inf], [-torch.inf, -1.0, -torch.inf, -torch.inf]]


def test_top_logprobs() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -torch.inf, 0.0]])
    top = reference.top_logprobs(logits, torch.tensor([0], dtype=torch.int32), 4)
    assert (top.tokens.tolist(), top.rank.tolist()) == ([[1, 2, 0, 4]], [3])
    expected = torch.log_softmax(logits, -1)[0]
    torch.testing.assert_close(top.values[0], expected[[1, 2, 0, 4]])
    assert top.chosen.item() == expected[0].item()
    assert reference.top_logprobs(logits, torch.tensor([4], dtype=torch.int32), 0).values.shape == (1, 0)
