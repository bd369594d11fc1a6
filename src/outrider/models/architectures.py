"""The supported architectures as data: by `model_type` of config.json, their differences from Llama and their defaults.

All of them share one decoder (decoder.py). A new one is an entry here and, if a layer differs, a field of ModelConfig
that layers.py and the kernels honor (docs/add-a-model.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..kernels import Activation


@dataclass(frozen=True)
class Architecture:
    """What follows from the name of an architecture."""

    label: str  # for error messages
    class_name: str  # in `architectures` of config.json
    windows: Literal["none", "every", "switched", "flagged", "pattern"] = "none"
    qkv_bias: bool | None = False  # None: as `attention_bias` says, also for the output projection
    mlp_bias: bool = False  # whether `mlp_bias` is honored
    head_norms: bool = False
    whole_norms: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    skips_rope: bool = False  # whether `no_rope_layers` is honored
    two_ropes: bool = False  # sliding layers have a rope of their own
    gemma: bool = False  # the embedding is scaled by sqrt(width), attention by `query_pre_attn_scalar`
    multipliers: bool = False  # whether `embedding_multiplier` and the other multipliers of Granite are honored
    soft_caps: bool = False  # whether `attn_logit_softcapping` and `final_logit_softcapping` are honored
    experts: Literal["none", "all", "sparse"] = "none"  # sparse: as `mlp_only_layers` and `decoder_sparse_step` say
    normalized_scores: bool = False  # of the chosen experts, unless `norm_topk_prob` says otherwise
    gpt_oss_experts: bool = False  # experts with biases, and rows of gate and up in turns
    sinks: bool = False
    activation: Activation | None = None  # None: as `hidden_act` says
    recurrent: Literal["none", "delta", "mamba"] = "none"  # layers that are not attention: Gated DeltaNet, Mamba-2
    gated_attention: bool = False
    image_positions: bool = False  # whether `mrope_section` is ignored: it is for images, text has one axis
    defaults: Mapping[str, Any] | None = None


GEMMA2_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GPT_OSS_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 64,
    "attention_bias": True,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
MIXTRAL_DEFAULTS: Mapping[str, Any] = {
    "intermediate_size": 14_336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
}
OLMOE_DEFAULTS: Mapping[str, Any] = {
    "intermediate_size": 2048,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-5,
}
QWEN2_MOE_DEFAULTS: Mapping[str, Any] = {
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
GRANITE4_DEFAULTS: Mapping[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
QWEN3_NEXT_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "intermediate_size": 5632,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
QWEN35_DEFAULTS: Mapping[str, Any] = {**QWEN3_NEXT_DEFAULTS, "num_experts": 0}
QWEN35_MOE_DEFAULTS: Mapping[str, Any] = {**QWEN3_NEXT_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8}
QWEN3_MOE_DEFAULTS: Mapping[str, Any] = {"moe_intermediate_size": 768, "num_experts_per_tok": 8}

# By `model_type` of config.json. SmolLM2 has `llama`.
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("Llama (also SmolLM2)", "LlamaForCausalLM", qkv_bias=None, mlp_bias=True),
    "mistral": Architecture("Mistral", "MistralForCausalLM", windows="every", defaults={"sliding_window": 4096}),
    "qwen2": Architecture("Qwen2", "Qwen2ForCausalLM", windows="flagged", qkv_bias=True),
    "qwen3": Architecture(
        "Qwen3", "Qwen3ForCausalLM", windows="flagged", qkv_bias=None, head_norms=True, defaults={"head_dim": 128}
    ),
    "mixtral": Architecture(
        "Mixtral",
        "MixtralForCausalLM",
        windows="every",
        experts="all",
        normalized_scores=True,
        defaults=MIXTRAL_DEFAULTS,
    ),
    "gpt_oss": Architecture(
        "gpt-oss",
        "GptOssForCausalLM",
        windows="pattern",
        qkv_bias=None,
        sinks=True,
        experts="all",
        normalized_scores=True,
        gpt_oss_experts=True,
        activation="swiglu_oai",
        defaults=GPT_OSS_DEFAULTS,
    ),
    "olmoe": Architecture(
        "OLMoE", "OlmoeForCausalLM", qkv_bias=None, whole_norms=True, experts="all", defaults=OLMOE_DEFAULTS
    ),
    "qwen2_moe": Architecture(
        "Qwen2-MoE",
        "Qwen2MoeForCausalLM",
        windows="flagged",
        qkv_bias=True,
        experts="sparse",
        defaults=QWEN2_MOE_DEFAULTS,
    ),
    "qwen3_moe": Architecture(
        "Qwen3-MoE",
        "Qwen3MoeForCausalLM",
        windows="switched",
        qkv_bias=None,
        head_norms=True,
        experts="sparse",
        defaults=QWEN3_MOE_DEFAULTS,
    ),
    "qwen3_next": Architecture(
        "Qwen3-Next",
        "Qwen3NextForCausalLM",
        qkv_bias=None,
        head_norms=True,
        experts="sparse",
        normalized_scores=True,
        recurrent="delta",
        gated_attention=True,
        defaults=QWEN3_NEXT_DEFAULTS,
    ),
    "qwen3_5_text": Architecture(
        "Qwen3.5",
        "Qwen3_5ForCausalLM",
        qkv_bias=None,
        head_norms=True,
        experts="sparse",
        recurrent="delta",
        gated_attention=True,
        image_positions=True,
        defaults=QWEN35_DEFAULTS,
    ),
    "qwen3_5_moe_text": Architecture(
        "Qwen3.5-MoE",
        "Qwen3_5MoeForCausalLM",
        qkv_bias=None,
        head_norms=True,
        experts="sparse",
        normalized_scores=True,
        recurrent="delta",
        gated_attention=True,
        image_positions=True,
        defaults=QWEN35_MOE_DEFAULTS,
    ),
    "mimo": Architecture("MiMo", "MiMoForCausalLM", windows="flagged", qkv_bias=True),  # Qwen2 with MTP modules
    "smollm3": Architecture(
        "SmolLM3",
        "SmolLM3ForCausalLM",
        windows="flagged",
        qkv_bias=None,
        mlp_bias=True,
        skips_rope=True,
        defaults={"tie_word_embeddings": True},
    ),
    "phi3": Architecture("Phi-3 and Phi-4", "Phi3ForCausalLM", windows="every", defaults={"rms_norm_eps": 1e-5}),
    "olmo2": Architecture(
        "OLMo 2", "Olmo2ForCausalLM", qkv_bias=None, whole_norms=True, pre_norms=False, post_norms=True
    ),
    "granite": Architecture("Granite", "GraniteForCausalLM", qkv_bias=None, mlp_bias=True, multipliers=True),
    "granitemoehybrid": Architecture(
        "Granite 4",
        "GraniteMoeHybridForCausalLM",
        qkv_bias=None,
        multipliers=True,
        experts="all",
        normalized_scores=True,
        recurrent="mamba",
        defaults=GRANITE4_DEFAULTS,
    ),
    "gemma2": Architecture(
        "Gemma 2",
        "Gemma2ForCausalLM",
        windows="pattern",
        qkv_bias=None,
        post_norms=True,
        gemma=True,
        soft_caps=True,
        defaults=GEMMA2_DEFAULTS,
    ),
    "gemma3_text": Architecture(
        "Gemma 3 text",
        "Gemma3ForCausalLM",
        windows="pattern",
        qkv_bias=None,
        head_norms=True,
        post_norms=True,
        two_ropes=True,
        gemma=True,
        defaults=GEMMA3_DEFAULTS,
    ),
}
