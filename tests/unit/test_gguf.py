"""GGUF files as checkpoints: Hugging Face configs, Hugging Face names, rows in Hugging Face order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
import torch
from gguf_writer import Q8_0, Tensor, gguf

from outrider import catalog
from outrider.errors import UserError
from outrider.kernels.quantization import dequantize
from outrider.weights import Checkpoint, open_checkpoint

WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 64, 4, 2, 16, 40


def metadata(architecture: str = "llama", /, **changes: Any) -> dict[str, Any]:
    fields = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": WIDTH,
        "feed_forward_length": 96,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        **changes,
    }
    named = {f"{architecture}.{key}": value for key, value in fields.items() if value is not None}
    return {"general.architecture": architecture, "tokenizer.ggml.eos_token_id": 2, **named}


def floats(name: str, *shape: int) -> Tensor:
    numbers = np.random.default_rng(len(name)).standard_normal(shape, dtype=np.float32)
    return Tensor(name, shape, numbers.tobytes())


def make(path: Path, fields: dict[str, Any], *tensors: Tensor) -> Checkpoint:
    everything = [floats("token_embd.weight", VOCABULARY, WIDTH), *tensors]
    path.write_bytes(gguf(fields, everything))
    return open_checkpoint(str(path))


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order that llama.cpp's converter gives to the rows of q and k."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def test_llama_config(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "m.gguf", metadata())
    expected = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": None,
    }
    assert {key: checkpoint.config[key] for key in expected} == expected
    assert checkpoint.end_ids == [2]
    assert not checkpoint.norms_are_offset
    assert checkpoint.float32
    assert checkpoint.bytes == VOCABULARY * WIDTH * 4


def test_what_the_architectures_add(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    mistral = make(path, metadata(**{"attention.sliding_window": 32})).config
    assert (mistral["model_type"], mistral["sliding_window"]) == ("mistral", 32)
    qwen = make(path, metadata("qwen2"), floats("blk.0.attn_q.bias", WIDTH)).config
    assert (qwen["model_type"], qwen["attention_bias"]) == ("qwen2", True)
    smollm3 = make(path, metadata("smollm3", block_count=4), *(floats(f"t{n}", 1) for n in range(4))).config
    assert smollm3["no_rope_layers"] == [1, 1, 1, 0]
    fields: dict[str, Any] = {"attention.sliding_window": 8, "attention.key_length": 32, "block_count": 6}
    gemma = make(path, metadata("gemma3", **fields), *(floats(f"t{n}", 1) for n in range(6))).config
    assert gemma["model_type"] == "gemma3_text"
    assert gemma["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    assert (gemma["head_dim"], gemma["query_pre_attn_scalar"], gemma["rope_local_base_freq"]) == (32, 32, 10000.0)
    scaled: dict[str, Any] = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    assert make(path, metadata(**scaled)).config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_names(tmp_path: Path) -> None:
    tensors = [floats(f"blk.0.{name}.weight", 4) for name in ("attn_norm", "ffn_norm", "attn_q_norm", "ffn_down")]
    tensors += [floats("output_norm.weight", 4), floats("output.weight", 4, 4)]
    checkpoint = make(tmp_path / "m.gguf", metadata("qwen3"), *tensors)
    layer = "model.layers.0."
    assert set(checkpoint.names()) == {
        "model.embed_tokens.weight",
        layer + "input_layernorm.weight",
        layer + "post_attention_layernorm.weight",
        layer + "self_attn.q_norm.weight",
        layer + "mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    assert not checkpoint.config["tie_word_embeddings"]
    norms = ("post_attention_norm", "ffn_norm", "post_ffw_norm")
    gemma = make(tmp_path / "g.gguf", metadata("gemma3"), *(floats(f"blk.0.{name}.weight", 4) for name in norms))
    assert gemma.names()[1:] == [
        layer + "post_attention_layernorm.weight",
        layer + "pre_feedforward_layernorm.weight",
        layer + "post_feedforward_layernorm.weight",
    ]


@pytest.mark.parametrize("architecture", ["llama", "smollm3", "qwen2"])
def test_rows_of_queries_and_keys_are_in_hugging_face_order(architecture: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    query = random.standard_normal((HEADS * HEAD_DIM, WIDTH), dtype=np.float32)
    key = random.standard_normal((KV_HEADS * HEAD_DIM, WIDTH), dtype=np.float32)
    bias = random.standard_normal(KV_HEADS * HEAD_DIM, dtype=np.float32)
    value = random.standard_normal((KV_HEADS * HEAD_DIM, WIDTH), dtype=np.float32)
    permuted = architecture != "qwen2"
    stored_query = interleave(query, HEADS) if permuted else query
    stored_key = interleave(key, KV_HEADS) if permuted else key
    stored_bias = interleave(bias, KV_HEADS) if permuted else bias
    quantized = gguf_package.quantize(stored_query, gguf_package.GGMLQuantizationType.Q8_0)
    checkpoint = make(
        tmp_path / "m.gguf",
        metadata(architecture),
        Tensor("blk.0.attn_q.weight", query.shape, quantized.tobytes(), Q8_0),
        Tensor("blk.0.attn_k.weight", key.shape, stored_key.tobytes()),
        Tensor("blk.0.attn_k.bias", bias.shape, stored_bias.tobytes()),
        Tensor("blk.0.attn_v.weight", value.shape, value.tobytes()),
    )
    prefix = "model.layers.0.self_attn."
    expected = gguf_package.quantize(query, gguf_package.GGMLQuantizationType.Q8_0)
    loaded = checkpoint.weight(prefix + "q_proj.weight")
    assert (loaded.kind, loaded.shape, loaded.data.dtype) == ("q8_0", query.shape, torch.uint8)
    assert np.array_equal(loaded.data.numpy(), expected)
    assert np.array_equal(checkpoint.weight(prefix + "k_proj.weight").data.numpy(), key)
    assert np.array_equal(checkpoint.weight(prefix + "k_proj.bias").data.numpy(), bias)
    assert np.array_equal(checkpoint.weight(prefix + "v_proj.weight").data.numpy(), value)
    assert not checkpoint.float32


def test_tensors_stay_in_the_file_until_they_are_needed(tmp_path: Path) -> None:
    """A plain tensor is a view: two reads share their memory."""
    checkpoint = make(tmp_path / "m.gguf", metadata())
    first, second = (checkpoint.weight("model.embed_tokens.weight").data for _ in range(2))
    assert first.data_ptr() == second.data_ptr()


REFUSED = {
    "unknown architecture": (metadata("mamba"), "the architecture `mamba`"),
    "no architecture": ({"x": 1}, "the architecture `None`"),
    "missing count": (metadata(block_count=None), "`llama.block_count` is missing"),
    "zero heads": (metadata(**{"attention.head_count": 0}), "`llama.attention.head_count` is `0`"),
    "wrong type": (metadata(context_length="long"), "`llama.context_length` is `long`"),
    "more layers than tensors": (metadata(block_count=2**30), "claims 1073741824 layers"),
    "one of many": (metadata() | {"split.count": 3}, "does not end in `-00001-of-00003.gguf`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_makes_no_model(name: str, tmp_path: Path) -> None:
    fields, expected = REFUSED[name]
    with pytest.raises(UserError, match=r"m\.gguf") as refusal:
        make(tmp_path / "m.gguf", fields)
    assert expected in str(refusal.value)


def test_heads_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`blk\.0\.attn_q\.weight` do not fit 4 heads"):
        make(tmp_path / "m.gguf", metadata(), floats("blk.0.attn_q.weight", 36, WIDTH))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tensor `model\.norm\.weight`"):
        make(tmp_path / "m.gguf", metadata()).weight("model.norm.weight")


@pytest.mark.slow
def test_real_files_equal_the_gguf_package() -> None:
    """Every tensor of SmolLM2 and Gemma, dequantised, against the package's reader."""
    for model in (name for name, entry in catalog.CATALOG.items() if entry.sha256):
        path = catalog.pull(model)
        checkpoint = open_checkpoint(model)
        reader = gguf_package.GGUFReader(path)
        assert len(checkpoint.names()) == len(reader.tensors)
        by_name = {tensor.name: tensor for tensor in reader.tensors}
        layer = checkpoint.config["num_hidden_layers"] - 1
        pairs = {
            "model.embed_tokens.weight": "token_embd.weight",
            f"model.layers.{layer}.mlp.down_proj.weight": f"blk.{layer}.ffn_down.weight",
            f"model.layers.{layer}.self_attn.v_proj.weight": f"blk.{layer}.attn_v.weight",
            f"model.layers.{layer}.self_attn.k_proj.weight": f"blk.{layer}.attn_k.weight",
        }
        for name, original in pairs.items():
            tensor = by_name[original]
            expected = gguf_package.dequantize(tensor.data, tensor.tensor_type)
            ours = dequantize(checkpoint.weight(name)).numpy()
            if model == "smollm2-135m" and "k_proj" in name:
                ours = interleave(ours, checkpoint.config["num_key_value_heads"])
            assert np.array_equal(ours, expected), name
