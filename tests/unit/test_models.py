"""Every architecture says what transformers says, however its prompt is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends import every_kernels
from outrider import kernels
from outrider.errors import UserError
from outrider.kernels import Weight
from outrider.kernels.cpu import quantize_weight
from outrider.models import Model, build
from outrider.weights import open_checkpoint
from tiny import CASES, Memory, batch, checkpoint, folder, original, pages_for, prompt, run

TOKENS = prompt(23)


@pytest.fixture(params=every_kernels())
def ops(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def reference() -> kernels.Kernels:
    return kernels.load("reference")


@torch.no_grad()
def expected(name: str, tokens: list[int]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Logits [T, V], and the states [T, E] that enter each layer, then the last one's after the final norm."""
    out = original(name)(torch.tensor([tokens]), output_hidden_states=True)
    return out.logits[0], tuple(state[0] for state in out.hidden_states)


def assert_near(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, len(TOKENS)])
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, chunk: int, ops: kernels.Kernels) -> None:
    wanted, _ = expected(name, TOKENS)
    assert wanted.std() > 0.3  # else the tolerance would mean nothing
    logits, _ = run(build(checkpoint(name), ops), TOKENS, chunk)
    assert logits.dtype == torch.float32
    assert_near(logits, wanted)


@pytest.mark.parametrize("chunk", [1, 12])
def test_longrope_in_its_original_context_equals_transformers(chunk: int, ops: kernels.Kernels) -> None:
    logits, _ = run(build(checkpoint("phi3-long"), ops, max_context=16), TOKENS[:12], chunk)
    assert_near(logits, expected("phi3-long", TOKENS[:12])[0])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_aux_states_equal_the_hidden_states_of_transformers(name: str, ops: kernels.Kernels) -> None:
    model = build(checkpoint(name), ops)
    aux_layers = range(model.config.layers + 1)
    _, states = run(model, TOKENS, 7, aux_layers)
    *entering, last = expected(name, TOKENS)[1]
    for state, wanted in zip(states, entering, strict=False):
        assert_near(state, wanted)
    assert_near(ops.rms_norm(states[-1], model.norm, model.config.eps), last)


def test_aux_states_come_in_the_order_asked_for_and_are_copies(reference: kernels.Kernels) -> None:
    model = build(checkpoint("llama"), reference)
    _, (last, first) = run(model, TOKENS, len(TOKENS), (3, 0))
    _, (again,) = run(model, TOKENS, len(TOKENS), (0,))
    assert torch.equal(first, again)
    assert not torch.equal(first, last)


def test_rows_of_a_batch_do_not_see_each_other(ops: kernels.Kernels) -> None:
    model = build(checkpoint("qwen2"), ops)
    first, second = prompt(11, seed=1), prompt(9, seed=2)
    storage = pages_for(model, 6)
    tables = [5, 0, 3], [1, 4, 2]
    hidden, _ = model.forward(batch([(first[:8], 0, tables[0]), (second, 0, tables[1])], 4), storage.layers)
    ends, _ = model.forward(batch([(second[:0], 9, tables[1]), (first[8:], 8, tables[0])], 4), storage.layers)
    logits = model.logits(torch.cat([hidden[:8], ends, hidden[8:]]))
    assert_near(logits, torch.cat([expected("qwen2", first)[0], expected("qwen2", second)[0]]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pages_may_have_half_precision(dtype: str, ops: kernels.Kernels) -> None:
    wanted, _ = expected("llama", TOKENS)
    logits, _ = run(build(checkpoint("llama"), ops), TOKENS, 7, dtype=dtype)
    error = (logits - wanted).abs().max()
    assert 1e-4 < error < 0.15  # rounded, and not lost


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-moe"])
def test_quantised_weights_stay_near(name: str, quantize: str, reference: kernels.Kernels) -> None:
    plain = build(checkpoint(name), reference)
    small = build(checkpoint(name), reference, quantize=quantize)
    assert small.weight_bytes < plain.weight_bytes * (0.4 if quantize == "int8" else 0.3)
    wanted, _ = expected(name, TOKENS)
    logits, _ = run(small, TOKENS, 7)
    error = float((logits - wanted).norm() / wanted.norm())
    assert 1e-4 < error < (0.1 if quantize == "int8" else 0.6)


@pytest.mark.parametrize("shard", ["1GB", "60KB"])
@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "mixtral", "qwen2-moe", "qwen3-next-moe", "qwen3.5", "granite4-moe"]
)
def test_folders_load(name: str, shard: str, reference: kernels.Kernels) -> None:
    where = folder(name, shard)
    assert (len(list(where.glob("*.safetensors"))) > 1) == (shard == "60KB")
    logits, _ = run(build(open_checkpoint(where), reference), TOKENS, len(TOKENS))
    assert_near(logits, expected(name, TOKENS)[0])


def test_a_tied_head_is_the_embedding(reference: kernels.Kernels) -> None:
    tied, untied = build(checkpoint("qwen3"), reference), build(checkpoint("llama"), reference)
    assert tied.head is tied.embedding
    assert untied.head is not untied.embedding


def test_layers_with_equal_rope_share_their_tables(reference: kernels.Kernels) -> None:
    layers = [layer.weights for layer, _ in build(checkpoint("gemma3"), reference).layers]
    assert len({layer.cos.data_ptr() for layer in layers}) == 2
    assert layers[0].cos is layers[1].cos
    assert layers[0].cos is not layers[2].cos
    assert [layer.weights.cos is None for layer, _ in build(checkpoint("smollm3"), reference).layers] == [
        False,
        False,
        False,
        True,
        False,
    ]


def test_a_shorter_context_means_shorter_tables(reference: kernels.Kernels) -> None:
    model = build(checkpoint("llama"), reference, max_context=16)
    assert model.layers[0][0].weights.cos.shape == (16, 8)
    assert model.config.context == 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_load(dtype: torch.dtype, ops: kernels.Kernels) -> None:
    logits, _ = run(build(checkpoint("gemma3", dtype), ops), TOKENS, len(TOKENS))
    assert float((logits - expected("gemma3", TOKENS)[0]).abs().mean()) < 0.05


def test_default_aux_layers(reference: kernels.Kernels) -> None:
    assert build(checkpoint("gemma3"), reference).default_aux_layers() == (2, 3, 4)
    with pytest.raises(UserError, match="has 3 layers, too few for the default aux layers"):
        build(checkpoint("llama"), reference).default_aux_layers()


def changed(**tensors: torch.Tensor | None) -> Model:
    """A tiny Llama with tensors replaced, added, or taken away (None); `__` in a name stands for a dot."""
    source = checkpoint("llama")
    for name, tensor in tensors.items():
        if tensor is None:
            del source.tensors[name.replace("__", ".")]
        else:
            source.tensors[name.replace("__", ".")] = tensor
    return build(source, kernels.load("reference"))


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(
        UserError, match=r"lacks the tensor `model\.layers\.1\.mlp\.up_proj\.weight` of shape \[96, 64\]"
    ):
        changed(model__layers__1__mlp__up_proj__weight=None)


def test_a_misshapen_tensor_is_named_with_both_shapes() -> None:
    with pytest.raises(UserError, match=r"`model\.norm\.weight` has the shape \[63\].* asks for \[64\]"):
        changed(model__norm__weight=torch.ones(63))


def test_a_tensor_too_many_is_named() -> None:
    with pytest.raises(UserError, match=r"`model\.layers\.3\.mlp\.up_proj\.weight` of shape \[2, 3\] and 1 more"):
        changed(model__layers__3__mlp__up_proj__weight=torch.ones(2, 3), model__layers__4__strange=torch.ones(1))


def test_old_leftovers_are_no_tensor_too_many() -> None:
    assert changed(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8)).config.layers == 3


class StoredInBlocks(Memory):
    """A checkpoint whose matrices are quantized already, as in a GGUF file."""

    def weight(self, name: str) -> Weight:
        weight = super().weight(name)
        return quantize_weight(weight, "int8") if len(weight.shape) == 2 else weight


def test_quantize_without_effect_is_reported(reference: kernels.Kernels, caplog: pytest.LogCaptureFixture) -> None:
    source = checkpoint("llama")
    build(source, reference, quantize="int4")
    build(StoredInBlocks(source.config, source.tensors, False), reference)
    assert caplog.messages == []
    build(StoredInBlocks(source.config, source.tensors, False), reference, quantize="int4")
    (said,) = caplog.messages
    assert said.startswith("`quantize=int4` has no effect on weights that are stored as ")
