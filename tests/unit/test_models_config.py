"""Configurations of every age are read alike, ropes turn as in transformers, and the unsupported is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from outrider.errors import UserError
from outrider.models import read_config
from outrider.models.config import Experts
from outrider.models.decoder import rounded_scale
from outrider.models.rope import Rope, cos_sin_tables
from tiny import CASES, LLAMA3, checkpoint, original

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
OLD_LLAMA3 = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
DEEP = {**LLAMA, "num_hidden_layers": 32}
SLIDING = {"use_sliding_window": True, "sliding_window": 9}


def test_defaults_of_a_sparse_configuration() -> None:
    config = read_config(LLAMA)
    assert (config.kv_heads, config.head_dim, config.eps) == (4, 16, 1e-6)
    assert config.ropes == (Rope(10_000.0),) * 4
    assert config.windows == (0, 0, 0, 0)
    assert not (config.tied_head or config.qkv_bias or config.output_bias or config.mlp_bias or config.head_norms)
    assert config.end_tokens == ()


def test_the_class_name_will_do_without_a_model_type() -> None:
    config = read_config({**LLAMA, "model_type": None, "architectures": ["Qwen2ForCausalLM"]})
    assert config.architecture == "qwen2"
    assert config.qkv_bias
    assert not config.output_bias


@pytest.mark.parametrize(("given", "tokens"), [(2, (2,)), ([2, 7], (2, 7)), (None, ())])
def test_end_tokens(given: Any, tokens: tuple[int, ...]) -> None:
    assert read_config({**LLAMA, "eos_token_id": given}).end_tokens == tokens


def test_old_and_new_spellings_of_rope_are_one() -> None:
    old = read_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {**OLD_LLAMA3, "type": "llama3"}})
    new = read_config({**LLAMA, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}})
    assert old == new
    assert old.ropes[0] == Rope(5e5, "llama3", 8.0, 1.0, 4.0, 64)


def test_old_and_new_spellings_of_gemma3_are_one() -> None:
    base = {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
    old = {
        "sliding_window_pattern": 2,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    new = {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    }
    config = read_config({**base, **old})
    assert config == read_config({**base, **new})
    assert config.windows == (8, 0, 8, 0)
    assert config.ropes[:2] == (Rope(1e4), Rope(1e6, "linear", 8.0))
    assert (config.embedding_scale, config.attention_scale, config.activation) == (8.0, 0.25, "gelu_tanh")
    assert config.tied_head
    assert config.post_norms


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 9}, (9,) * 32),
        ({"model_type": "mistral", "sliding_window": None}, (0,) * 32),
        ({"model_type": "qwen2", "sliding_window": 9}, (0,) * 32),
        ({"model_type": "qwen2", **SLIDING}, (0,) * 28 + (9,) * 4),
        ({"model_type": "qwen3", **SLIDING, "max_window_layers": 30}, (0,) * 30 + (9,) * 2),
        ({"model_type": "smollm3", **SLIDING}, (0, 0, 0, 9) * 8),
        ({"model_type": "llama", **SLIDING}, (0,) * 32),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, **SLIDING}, (9,) * 32),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}, (0,) * 32),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert read_config({**DEEP, **changes}).windows == windows


def test_experts_of_every_layer_or_of_some() -> None:
    config = read_config({**LLAMA, "model_type": "mixtral"})
    assert config.experts == Experts(8, 2, 96, 0, True, (True,) * 4)
    some = {"model_type": "qwen2_moe", "num_experts": 16, "mlp_only_layers": [1], "decoder_sparse_step": 2}
    config = read_config({**LLAMA, **some})
    assert config.experts == Experts(16, 4, 1408, 5632, False, (False, False, False, True))
    newer = {"model_type": "qwen3_moe", "num_local_experts": 16, "norm_topk_prob": True}
    assert read_config({**LLAMA, **newer}).experts == Experts(16, 8, 768, 0, True, (True,) * 4)


@pytest.mark.parametrize("name", CASES)
def test_rope_tables_equal_transformers(name: str) -> None:
    config = read_config(checkpoint(name).config)
    model = original(name).model
    for layer, rope in enumerate(config.ropes):
        if rope is None:
            continue
        arguments = [torch.zeros(1), torch.arange(config.context)[None]]
        if name == "gemma3":
            arguments.append(model.config.layer_types[layer])
        pairs = (rope.dims or config.head_dim) // 2
        cos, sin = (table[0, :, :pairs] for table in model.rotary_emb(*arguments))
        own_cos, own_sin = cos_sin_tables(rope, config.head_dim, config.context)
        torch.testing.assert_close((own_cos[:, :pairs], own_sin[:, :pairs]), (cos, sin), atol=1e-6, rtol=0)
        assert torch.all(own_cos[:, pairs:] == 1) and torch.all(own_sin[:, pairs:] == 0)


def test_longrope_takes_the_factors_of_the_served_context() -> None:
    """One text has one table: short factors up to the original context, else long ones, at every position."""
    config, model = read_config(checkpoint("phi3-long").config), original("phi3-long").model
    assert config.ropes[0] is not None and config.ropes[0].attention_factor > 1
    for positions in (16, 17):
        cos, sin = (table[0, :, :6] for table in model.rotary_emb(torch.zeros(1), torch.arange(positions)[None]))
        own_cos, own_sin = cos_sin_tables(config.ropes[0], 16, positions)
        torch.testing.assert_close((own_cos[:, :6], own_sin[:, :6]), (cos, sin), atol=1e-6, rtol=0)


def test_yarn_extends_the_context() -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read_config({**LLAMA, "rope_scaling": scaled}).context == 512
    stated = read_config({**LLAMA, "rope_scaling": {**scaled, "factor": None}, "max_position_embeddings": 256})
    assert (stated.context, stated.ropes[0].factor) == (256, 2.0)


def test_names_of_early_phi3_ropes() -> None:
    scaling = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi = {**LLAMA, "model_type": "phi3", "original_max_position_embeddings": 64}
    found = {
        read_config({**phi, "rope_scaling": {**scaling, "type": kind}}).ropes for kind in ("su", "yarn", "longrope")
    }
    assert len(found) == 1
    (rope,) = set(found.pop())
    assert (rope.kind, rope.original_context, rope.long) == ("longrope", 64, (2.0,) * 8)


def test_factors_of_a_gguf_file_are_the_same_scaling() -> None:
    config = read_config({**LLAMA, "rope_parameters": LLAMA3})
    plain = 1 / 10_000.0 ** (torch.arange(0, 16, 2) / 16)
    reference, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](original("llama3-rope").config)
    rope = config.ropes[0]
    assert rope is not None
    by_rule = cos_sin_tables(rope, 16, 128)
    divisors = tuple((plain / reference).tolist())
    by_factors = cos_sin_tables(Rope(10_000.0, "longrope", short=divisors, long=divisors), 16, 128)
    torch.testing.assert_close(by_rule, by_factors, atol=1e-5, rtol=0)


def test_the_embedding_scale_is_rounded_as_the_embedding_is() -> None:
    exact = 640**0.5
    assert rounded_scale(exact, torch.bfloat16) == 25.25
    assert rounded_scale(exact, torch.float32) == exact
    assert rounded_scale(exact, torch.uint8) == exact


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"`mamba` is not supported: pick a model of Llama \(also SmolLM2\), Mistral, Qwen2"),
        ({"model_type": None, "architectures": ["GPT2LMHeadModel"]}, "`GPT2LMHeadModel` is not supported"),
        ({"model_type": None}, "`unnamed` is not supported"),
        ({"num_local_experts": 8}, "experts .`num_local_experts`. are not supported"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "`num_experts_per_tok` is 9, but has 8 experts"),
        ({"model_type": "qwen3_moe"}, "lacks `num_experts`"),
        ({"final_logit_softcapping": 30.0}, "`final_logit_softcapping`"),
        ({"clip_qkv": 8.0}, "`clip_qkv`"),
        ({"use_bidirectional_attention": True}, "`use_bidirectional_attention`"),
        ({"hidden_act": "relu"}, "activation `relu`"),
        (
            {"rope_scaling": {"type": "ntk", "factor": 4.0}},
            "rope type `ntk` is not supported: expected one of default",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1.0}, "`rope_theta` 1.0"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "`short_factor` is 1 numbers: expected a list of 8",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [0] * 8, "long_factor": [0] * 8}},
            "`short_factor` is 0: expected a number above 0",
        ),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1}}, "at least 2 positions"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope type `dynamic`"),
        ({"rope_parameters": {"rope_type": "linear"}}, "`factor` is None"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "`low_freq_factor` and `high_freq_factor`"),
        ({"partial_rotary_factor": 0.2}, "`partial_rotary_factor` is 0.2, which is 3 of 16 dimensions"),
        ({"partial_rotary_factor": 1.5}, "`partial_rotary_factor` is 1.5"),
        ({"rope_theta": float("nan")}, "`rope_theta` is nan"),
        ({"vocab_size": None}, "lacks `vocab_size`"),
        ({"hidden_size": "64"}, "`hidden_size` is '64'"),
        ({"num_hidden_layers": 10**12}, "`num_hidden_layers` is 1000000000000: expected a whole number from 1 to 1024"),
        ({"max_position_embeddings": 1 << 40}, "`max_position_embeddings`"),
        ({"num_key_value_heads": 3}, "`num_key_value_heads` 3"),
        ({"head_dim": 15}, "`head_dim` is 15"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "2 `no_rope_layers` for 4 layers"),
        ({"model_type": "qwen2", **SLIDING, "layer_types": ["full_attention"]}, "1 `layer_types` for 4 layers"),
        ({"model_type": "qwen2", **SLIDING, "layer_types": ["linear"] * 4}, "layer type `linear`"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config({**LLAMA, **changes})
