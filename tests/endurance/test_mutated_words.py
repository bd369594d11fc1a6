"""Words of a configuration that the fuzzer found to be believed too soon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from outrider import kernels
from outrider.errors import MAX_MESSAGE_LENGTH, UserError
from outrider.kernels import Weight
from outrider.models import build, layers, read_config
from outrider.tokenizer import loading
from outrider.weights import gguf_writer, open_checkpoint
from outrider.weights.hf_folder import classic_rope

WORDS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": ["llama"]}, "the architecture"),
    ("llama", {"model_type": None, "architectures": 7}, "the architecture `7`"),
    ("llama", {"model_type": None, "architectures": [["LlamaForCausalLM"]]}, "the architecture"),
    ("llama", {"rms_norm_eps": 10**400}, "`rms_norm_eps`"),
    ("llama", {"rms_norm_eps": float("nan")}, "`rms_norm_eps`"),
    ("llama", {"max_position_embeddings": 1 << 24}, "`max_position_embeddings`"),
    ("gemma3", {"layer_types": 7}, "`layer_types`"),
    ("gemma3", {"layer_types": None, "sliding_window_pattern": "x"}, "`sliding_window_pattern`"),
    ("gemma3", {"rope_parameters": [1]}, "`rope_parameters`"),
    ("gemma3", {"rope_parameters": {"full_attention": [1]}}, "`full_attention`"),
    ("gemma3", {"rope_scaling": 3}, "`rope_scaling`"),
    ("smollm3-window", {"no_rope_layers": 4}, "`no_rope_layers`"),
    ("qwen3", {"sliding_window": 4, "use_sliding_window": True, "layer_types": None, "max_window_layers": "x"},
     "`max_window_layers`"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "changes", "culprit"), WORDS)
def test_an_absurd_word_is_refused_by_its_name(model: str, changes: dict[str, Any], culprit: str) -> None:
    config = tiny.checkpoint(model).config
    read_config(config)
    with pytest.raises(UserError) as refusal:
        read_config(config | changes)
    assert culprit in str(refusal.value)


def test_malformed_rope_settings_are_left_to_the_config_reader() -> None:
    assert classic_rope({"rope_parameters": {"full_attention": 5, "rope_theta": 7.0}})["rope_theta"] == 7.0


VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<s>", "a"],
    "tokenizer.ggml.scores": [0.0, -1.0],
    "path": "x.gguf",
}


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.token_type": 5},
        {"tokenizer.ggml.scores": ["a", "b"]},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": ["smollm"]},
    ],
)
def test_an_absurd_vocabulary_is_refused(changes: dict[str, Any]) -> None:
    loading.read_gguf(VOCABULARY)
    with pytest.raises(UserError, match=r"its tokenizer cannot be built"):
        loading.read_gguf(VOCABULARY | changes)


def test_an_architecture_that_is_no_word_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"".join(gguf_writer.encode({"general.architecture": [1, 2]}, {})))
    with pytest.raises(UserError, match="has the architecture"):
        open_checkpoint(file)


def test_a_head_width_that_is_a_lie_costs_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny.checkpoint("llama")
    checkpoint.config["head_dim"] = 1_000_000
    monkeypatch.setattr(layers, "cos_sin_tables", None)
    with pytest.raises(UserError, match="config and weights are not of the same model"):
        build(checkpoint, kernels.load("cpu"))


def test_a_vector_of_blocks_is_refused(tmp_path: Path) -> None:
    """As the queries of a layer, which are rows to be put into another order."""
    source = open_checkpoint(tiny.folder("llama"))
    weights = {name: source.weight(name) for name in source.names()}
    renamed = gguf_writer.rename(source.config, weights)
    renamed["blk.0.attn_k.weight"] = Weight("q8_0", (64,), torch.zeros(1, 68, dtype=torch.uint8))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"".join(gguf_writer.encode(gguf_writer.describe(source.config, "x", "f32"), renamed)))
    with pytest.raises(UserError, match="has the shape"):
        build(open_checkpoint(file), kernels.load("cpu"))


def test_a_refusal_is_one_sentence_whatever_it_quotes() -> None:
    said = str(UserError("`" + "9" * 100_000 + "\n\0\ud800` is no number: take another"))
    assert said.isprintable() and len(said) <= MAX_MESSAGE_LENGTH
    assert said.startswith("`999") and said.endswith("is no number: take another")
    assert str(UserError("two\nlines: join them")) == "two lines: join them"
