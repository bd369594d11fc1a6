"""ModelConfig: a normalized config.json, with all differences between architectures (architectures.py) as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..kernels import Activation
from .architectures import ARCHITECTURES, Architecture
from .fields import ConfigFields, positive
from .rope import Rope, read_rope

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
SWIGLU_OAI: Mapping[str, float] = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # as the kernels have them
# Names of layers in hybrid models, the last two of Granite 4, and whether such a layer is recurrent.
RECURRENT_TYPES = {"linear_attention": True, "full_attention": False, "mamba": True, "attention": False}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # spellings of one key
# Limits on what a damaged file can make us allocate.
MAX_LAYERS = 1024
MAX_POSITIONS = 1 << 22  # the longest context of a published model; the rope tables grow with it
MAX_EXPERTS = 4096
MAX_CONV_SIZE = 64  # positions of a convolution; published models have 4


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that takes the place of the MLP in some layers or in all."""

    count: int
    top_k: int  # experts of a token
    width: int  # inner width of an expert
    shared_width: int  # inner width of the expert of every token; 0: none
    normalized: bool  # the scores of the chosen experts are divided by their sum
    layers: tuple[bool, ...]  # per layer; False: a plain MLP
    biased: bool = False  # the router and all matrices have biases
    interleaved: bool = False  # rows of gate and up in turns in merged tensors, whose floats are transposed


@dataclass(frozen=True)
class Recurrent:
    """The recurrent layers that take the place of attention in some layers; see kernels/recurrence.py."""

    delta: bool  # Gated DeltaNet, else Mamba-2
    heads: int
    key_heads: int
    head_dim: int
    state_dim: int
    conv_size: int  # positions that the convolution reads
    layers: tuple[bool, ...]  # per layer; False: attention
    conv_bias: bool = False

    @property
    def values(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.key_heads * self.state_dim

    @property
    def inputs(self) -> int:
        """Return the numbers of a token that a layer keeps: channels and controls."""
        return 2 * self.keys + self.values + self.heads * (2 if self.delta else 1)


@dataclass(frozen=True)
class ModelConfig:
    architecture: str  # a key of ARCHITECTURES
    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    eps: float
    context: int  # positions that the model was trained for
    tied_head: bool  # the embedding matrix is also the LM head
    activation: Activation
    embedding_scale: float
    rounds_scale: bool  # the embedding scale is rounded to the dtype of the embedding
    attention_scale: float
    attention_cap: float  # soft cap of attention scores; 0: none
    logit_scale: float  # factor on the logits
    logit_cap: float  # soft cap of the logits; 0: none
    residual_scale: float  # factor on what attention and MLP add to the residual stream
    ropes: tuple[Rope | None, ...]  # per layer; None: no rotary embedding
    windows: tuple[int, ...]  # per layer, the sliding window in tokens, the query's included; 0: full attention
    head_norms: bool  # RMS norm on each query and key head
    whole_norms: bool  # RMS norm on all query heads together, and on all key heads
    qkv_bias: bool
    output_bias: bool
    sinks: bool  # a learned score in the softmax of each head
    mlp_bias: bool
    pre_norms: bool  # norms before attention and before the MLP
    post_norms: bool  # norms after attention and after the MLP
    end_tokens: tuple[int, ...]  # empty when the configuration names none
    experts: Experts | None = None
    recurrent: Recurrent | None = None
    gated_attention: bool = False  # what the heads return is multiplied by the sigmoid of a projection

    @property
    def attention_layers(self) -> int:
        """Return the number of layers with keys and values."""
        return self.layers - (sum(self.recurrent.layers) if self.recurrent is not None else 0)

    @property
    def stream_eps(self) -> float:
        """Return the epsilon of norms of the residual stream, which the decoder keeps divided by `residual_scale`."""
        return self.eps / self.residual_scale**2


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Normalize a config.json, of any version of transformers."""
    name = _architecture_name(config)
    architecture = ARCHITECTURES[name]
    _refuse_unsupported(config, architecture)
    fields = ConfigFields(config, architecture.defaults or {})
    width, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UserError(
            f"the model's configuration says `num_attention_heads` is {heads} and `num_key_value_heads` {kv_heads}: "
            "the first must be a multiple of the second"
        )
    head_dim = fields.count("head_dim", width // heads)
    if head_dim % 2:
        raise UserError(f"the model's configuration says `head_dim` is {head_dim}: it must be even")
    layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    attention_bias = fields.flag("attention_bias")
    layer_types = _layer_types(fields, architecture, layers)
    ropes = _ropes(fields, architecture, layer_types, head_dim)

    def multiplier(name: str) -> float:
        return fields.number(name, 1.0) if architecture.multipliers else 1.0

    return ModelConfig(
        architecture=name,
        vocabulary=fields.count("vocab_size"),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=fields.count(
            "shared_intermediate_size" if architecture.recurrent == "mamba" else "intermediate_size"
        ),
        eps=fields.number("rms_norm_eps", 1e-6),
        context=_context(fields, ropes),
        tied_head=fields.flag("tie_word_embeddings"),
        activation=architecture.activation or _activation(fields),
        embedding_scale=math.sqrt(width) if architecture.gemma else multiplier("embedding_multiplier"),
        rounds_scale=architecture.gemma,
        attention_scale=_attention_scale(fields, architecture, head_dim),
        attention_cap=_cap(fields, architecture, "attn_logit_softcapping"),
        logit_scale=1 / multiplier("logits_scaling"),
        logit_cap=_cap(fields, architecture, "final_logit_softcapping"),
        residual_scale=multiplier("residual_multiplier"),
        ropes=ropes,
        windows=tuple(fields.count("sliding_window") if kind == "sliding_attention" else 0 for kind in layer_types),
        head_norms=architecture.head_norms,
        whole_norms=architecture.whole_norms,
        qkv_bias=attention_bias if architecture.qkv_bias is None else architecture.qkv_bias,
        output_bias=attention_bias and architecture.qkv_bias is None,
        sinks=architecture.sinks,
        mlp_bias=architecture.mlp_bias and fields.flag("mlp_bias"),
        pre_norms=architecture.pre_norms,
        post_norms=architecture.post_norms,
        end_tokens=_end_tokens(config),
        experts=_experts(fields, architecture, layers),
        recurrent=_recurrent(fields, architecture, layers),
        gated_attention=architecture.gated_attention,
    )


def _architecture_name(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    classes = [str(name) for name in names] if isinstance(names, list) else [str(names)]
    by_class = {architecture.class_name: name for name, architecture in ARCHITECTURES.items()}
    name = str(config.get("model_type") or next((by_class[each] for each in classes if each in by_class), ""))
    if name in ARCHITECTURES:
        return name
    labels = ", ".join(each.label for each in ARCHITECTURES.values())
    unknown = name or ", ".join(classes) or "unnamed"
    raise UserError(f"the architecture `{unknown}` is not supported: pick a model of {labels}")


def _attention_scale(fields: ConfigFields, architecture: Architecture, head_dim: int) -> float:
    if architecture.multipliers:
        return fields.number("attention_multiplier", 1.0)
    size = fields.number("query_pre_attn_scalar", 256) if architecture.gemma else float(head_dim)
    return float(size**-0.5)


def _cap(fields: ConfigFields, architecture: Architecture, name: str) -> float:
    """Return a soft cap of an architecture that has them; 0: none."""
    stated = fields.values.get(name)
    return positive(stated, name) if architecture.soft_caps and stated is not None else 0.0


def _refuse_unsupported(config: Mapping[str, Any], architecture: Architecture) -> None:
    for name in EXPERT_COUNTS:
        if config.get(name) and architecture.experts == "none":
            known = ", ".join(each.label for each in ARCHITECTURES.values() if each.experts != "none")
            raise UserError(
                f"mixtures of experts (`{name}`) are not supported in a model of {architecture.label}: pick one of "
                f"{known}, or a dense model"
            )
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name) and not architecture.soft_caps:
            raise UserError(f"soft-capped logits (`{name}`) are supported in Gemma 2 alone: pick a model without them")
    for name, only in SWIGLU_OAI.items():
        if architecture.activation == "swiglu_oai" and config.get(name, only) != only:
            raise UserError(f"`{name}` is {config[name]!r}: a model of {architecture.label} is supported with {only}")
    if config.get("clip_qkv"):
        raise UserError("clipped queries, keys and values (`clip_qkv`) are not supported: pick a model without them")
    if config.get("use_bidirectional_attention"):
        raise UserError("`use_bidirectional_attention` is not supported: pick a model that generates text")


def _experts(fields: ConfigFields, architecture: Architecture, layers: int) -> Experts | None:
    rule = architecture.experts
    if rule == "none" or _is_dense_hybrid(fields, architecture):
        return None
    name = next((name for name in EXPERT_COUNTS if fields.values.get(name)), EXPERT_COUNTS[0])
    count, top_k = fields.count(name, most=MAX_EXPERTS), fields.count("num_experts_per_tok")
    if top_k > count:
        raise UserError(f"the model's configuration says `num_experts_per_tok` is {top_k}, but has {count} experts")
    shared = "shared_intermediate_size" if architecture.recurrent == "mamba" else "shared_expert_intermediate_size"
    return Experts(
        count=count,
        top_k=top_k,
        width=fields.count("intermediate_size" if rule == "all" else "moe_intermediate_size"),
        shared_width=fields.count(shared) if fields.values.get(shared) else 0,
        normalized=fields.flag("norm_topk_prob", architecture.normalized_scores),
        layers=(True,) * layers if rule == "all" else _sparse_layers(fields, layers),
        biased=architecture.gpt_oss_experts,
        interleaved=architecture.gpt_oss_experts,
    )


def _is_dense_hybrid(fields: ConfigFields, architecture: Architecture) -> bool:
    """Return whether a model with recurrent layers, whose family has experts, has none."""
    return architecture.recurrent != "none" and any(fields.values.get(name) == 0 for name in EXPERT_COUNTS)


def _recurrent(fields: ConfigFields, architecture: Architecture, layers: int) -> Recurrent | None:
    if architecture.recurrent == "none":
        return None
    if architecture.recurrent == "mamba":
        return _mamba(fields, layers)
    heads, key_heads = fields.count("linear_num_value_heads"), fields.count("linear_num_key_heads")
    if heads % key_heads:
        raise UserError(
            f"the model's configuration says `linear_num_value_heads` is {heads} and `linear_num_key_heads` "
            f"{key_heads}: the first must be a multiple of the second"
        )
    return Recurrent(
        delta=True,
        heads=heads,
        key_heads=key_heads,
        head_dim=fields.count("linear_value_head_dim"),
        state_dim=fields.count("linear_key_head_dim"),
        conv_size=fields.count("linear_conv_kernel_dim", most=MAX_CONV_SIZE),
        layers=_recurrent_layers(fields, layers),
    )


def _mamba(fields: ConfigFields, layers: int) -> Recurrent:
    if fields.flag("mamba_proj_bias"):
        raise UserError("biases of Mamba projections (`mamba_proj_bias`) are not supported: pick a model without them")
    limit = fields.items("time_step_limit") or [0.0, math.inf]
    if limit[0] != 0 or limit[1] not in (math.inf, {"__float__": "Infinity"}):  # the latter: as transformers writes it
        raise UserError(f"limited time steps (`time_step_limit` {limit}) are not supported: pick a model without them")
    heads, key_heads = fields.count("mamba_n_heads"), fields.count("mamba_n_groups")
    values = fields.count("mamba_expand") * fields.count("hidden_size")
    if values % heads or heads % key_heads:
        raise UserError(
            f"the model's configuration says `mamba_n_heads` is {heads}: expected a divisor of {values} values, and a "
            f"multiple of `mamba_n_groups` ({key_heads})"
        )
    return Recurrent(
        delta=False,
        heads=heads,
        key_heads=key_heads,
        head_dim=values // heads,
        state_dim=fields.count("mamba_d_state"),
        conv_size=fields.count("mamba_d_conv", most=MAX_CONV_SIZE),
        layers=_recurrent_layers(fields, layers),
        conv_bias=fields.flag("mamba_conv_bias"),
    )


def _recurrent_layers(fields: ConfigFields, layers: int) -> tuple[bool, ...]:
    """Return which layers are recurrent: those of `layer_types`, or all but every `full_attention_interval`-th."""
    kinds = fields.items("layer_types") or fields.items("layers_block_type")
    if kinds is None:
        interval = fields.count("full_attention_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if len(kinds) != layers:
        raise UserError(f"the model's configuration lists {len(kinds)} `layer_types` for {layers} layers")
    for kind in kinds:
        if kind not in RECURRENT_TYPES:
            raise UserError(f"the layer type `{kind}` is not supported: expected one of {', '.join(RECURRENT_TYPES)}")
    found = tuple(RECURRENT_TYPES[kind] for kind in kinds)
    if all(found):
        raise UserError("no layer of the model has attention: pick a model with attention in at least one layer")
    return found


def _sparse_layers(fields: ConfigFields, layers: int) -> tuple[bool, ...]:
    """Return which layers of Qwen have experts: every `decoder_sparse_step`-th, without `mlp_only_layers`."""
    dense, step = fields.items("mlp_only_layers") or [], fields.count("decoder_sparse_step", 1)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _activation(fields: ConfigFields) -> Activation:
    name = fields.values.get("hidden_activation") or fields.values.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UserError(f"the activation `{name}` is not supported: expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _layer_types(fields: ConfigFields, architecture: Architecture, layers: int) -> list[str]:
    """Return `sliding_attention` or `full_attention` for each layer."""
    values = fields.values
    rule = architecture.windows
    flagged = rule not in ("flagged", "switched") or fields.flag("use_sliding_window")
    windowed = values.get("sliding_window") is not None and flagged
    if rule == "none" or not windowed:
        return ["full_attention"] * layers
    if rule in ("every", "switched"):
        return ["sliding_attention"] * layers
    kinds = fields.items("layer_types")
    if kinds is None and rule == "pattern":
        pattern = _pattern(fields)
        kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]
    elif kinds is None:
        kinds = _flagged_types(fields, architecture, layers)
    if len(kinds) != layers:
        raise UserError(f"the model's configuration lists {len(kinds)} `layer_types` for {layers} layers")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise UserError(f"the layer type `{kind}` is not supported: expected sliding_attention or full_attention")
    return list(kinds)


def _pattern(fields: ConfigFields) -> int:
    """Return every how many layers an older Gemma configuration has full attention; newer ones list the layers."""
    older = fields.values.get("_sliding_window_pattern")
    return fields.count("sliding_window_pattern", fields.count("_sliding_window_pattern") if older else 6)


def _flagged_types(fields: ConfigFields, architecture: Architecture, layers: int) -> list[str]:
    """Return the layer types of Qwen, sliding from `max_window_layers` on, and SmolLM3, sliding without rope."""
    if architecture.skips_rope:
        slides = [not has_rope for has_rope in _rope_layers(fields, layers)]
    else:
        first = fields.values.get("max_window_layers", 28)
        if type(first) is not int:
            raise UserError(f"the model's configuration says `max_window_layers` is {first!r}: expected a whole number")
        slides = [layer >= first for layer in range(layers)]
    return ["sliding_attention" if each else "full_attention" for each in slides]


def _rope_layers(fields: ConfigFields, layers: int) -> list[bool]:
    """Return which layers of SmolLM3 have a rotary embedding: those with 1 in `no_rope_layers`."""
    flags = fields.items("no_rope_layers")
    if flags is None:
        interval = fields.count("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(flags) != layers:
        raise UserError(f"the model's configuration lists {len(flags)} `no_rope_layers` for {layers} layers")
    return [bool(flag) for flag in flags]


def _context(fields: ConfigFields, ropes: tuple[Rope | None, ...]) -> int:
    """Return the positions that the model was trained for, or that YaRN extends them to."""
    stated = fields.count("max_position_embeddings", most=MAX_POSITIONS)
    extended = [
        int(min(rope.original_context * rope.factor, MAX_POSITIONS)) for rope in ropes if rope and rope.kind == "yarn"
    ]
    return max(stated, *extended) if extended else stated


def _ropes(
    fields: ConfigFields, architecture: Architecture, layer_types: list[str], head_dim: int
) -> tuple[Rope | None, ...]:
    values = fields.values
    if architecture.two_ropes:
        by_type = {kind: read_rope(each, fields, head_dim) for kind, each in _gemma3_rope_parameters(fields).items()}
        return tuple(by_type[kind] for kind in layer_types)
    parameters = fields.table("rope_parameters") or fields.table("rope_scaling")
    if architecture.image_positions:
        parameters = {name: value for name, value in parameters.items() if name != "mrope_section"}
    rope = read_rope({"rope_theta": values.get("rope_theta", 10_000.0), **parameters}, fields, head_dim)
    count = len(layer_types)
    rope_layers = _rope_layers(fields, count) if architecture.skips_rope else [True] * count
    if architecture.recurrent == "mamba" and values.get("position_embedding_type") != "rope":
        rope_layers = [False] * count
    return tuple(rope if has_rope else None for has_rope in rope_layers)


def _gemma3_rope_parameters(fields: ConfigFields) -> dict[str, Any]:
    """Return the rope parameters of each layer type. Sliding layers have a lower base and no scaling."""
    values = fields.values
    newer = ConfigFields(fields.table("rope_parameters"), {})  # by layer type, in newer configurations
    full = {"rope_theta": values.get("rope_theta", 1_000_000.0), **fields.table("rope_scaling")}
    sliding = {"rope_theta": values.get("rope_local_base_freq", 10_000.0)}
    return {
        "full_attention": {**full, **newer.table("full_attention")},
        "sliding_attention": {**sliding, **newer.table("sliding_attention")},
    }


def _end_tokens(config: Mapping[str, Any]) -> tuple[int, ...]:
    tokens = config.get("eos_token_id")
    if tokens is None:
        return ()
    return tuple(tokens) if isinstance(tokens, list) else (tokens,)
