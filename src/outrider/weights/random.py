"""Models with random weights, to measure the speed of a model without its files.

`random/llama-3.1-8b` has a shape of SHAPES, `random/PATH` that of a config.json, and `random/eagle3-NAME` is an EAGLE-3
head for `random/NAME`. Tensors are made on the device when they are read. A tensor depends only on its name and on the
type of device.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..catalog.names import RANDOM as PREFIX
from ..errors import UserError
from ..kernels import Weight
from .checkpoint import Checkpoint, Stored, read_json
from .hf_folder import normalize

HEAD = "eagle3-"
HOST = torch.device("cpu")
NORMAL, UNUSED, BYTE = 1, 5, 6  # token types of GGUF
EXPERT_COUNTS = ("num_experts", "num_local_experts")  # spellings of one key
DRAFT_VOCABULARY = 32_000  # tokens, as in most published EAGLE-3 heads

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        **LLAMA,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
    "granite-4-h-micro": {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "shared_intermediate_size": 8192,
        "num_local_experts": 0,
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "position_embedding_type": "nope",
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "vocab_size": 100_352,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_value_head_dim": 128,
        "linear_key_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 151_936,
        "max_position_embeddings": 262_144,
        "rope_theta": 10_000_000.0,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        **LLAMA,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
    },
    "tiny": {
        **LLAMA,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Traits:
    """Tensors that a decoder has in addition to Llama's."""

    biases: tuple[str, ...] = ()  # always present; others depend on the configuration
    head_norms: bool = False
    whole_norms: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    fused: bool = False  # one matrix of queries, keys and values, and one of gate and up
    expert_width: str = ""  # key of config.json: inner width of an expert
    gpt_oss: bool = False  # sinks of heads; router and experts with biases, transposed
    gated: bool = False  # queries have gates of the attention's output beside them
    recurrent: Literal["", "fused", "split", "mamba"] = ""  # projections of Gated DeltaNet; Mamba-2 in Granite 4


KINDS = {
    "llama": Traits(),
    "mistral": Traits(),
    "smollm3": Traits(),
    "qwen2": Traits(biases=("q_proj", "k_proj", "v_proj")),
    "qwen3": Traits(head_norms=True),
    "phi3": Traits(fused=True),
    "olmo2": Traits(whole_norms=True, pre_norms=False, post_norms=True),
    "granite": Traits(),
    "mixtral": Traits(expert_width="intermediate_size"),
    "gpt_oss": Traits(biases=("q_proj", "k_proj", "v_proj", "o_proj"), expert_width="intermediate_size", gpt_oss=True),
    "olmoe": Traits(whole_norms=True, expert_width="intermediate_size"),
    "qwen2_moe": Traits(biases=("q_proj", "k_proj", "v_proj"), expert_width="moe_intermediate_size"),
    "qwen3_moe": Traits(head_norms=True, expert_width="moe_intermediate_size"),
    "qwen3_next": Traits(head_norms=True, expert_width="moe_intermediate_size", gated=True, recurrent="fused"),
    "qwen3_5_text": Traits(head_norms=True, gated=True, recurrent="split"),
    "qwen3_5_moe_text": Traits(head_norms=True, expert_width="moe_intermediate_size", gated=True, recurrent="split"),
    "granitemoehybrid": Traits(expert_width="intermediate_size", recurrent="mamba"),
    "gemma2": Traits(post_norms=True),
    "gemma3_text": Traits(head_norms=True, post_norms=True),
}

TIED_KINDS = ("gemma2", "gemma3_text", "smollm3")  # whose heads are tied unless config.json says otherwise


@dataclass(frozen=True)
class RandomTensor(Stored):
    """A tensor that is made when it is read; `data` only has its shape."""

    name: str = ""
    device: torch.device = HOST

    def load(self) -> Weight:
        return Weight(self.kind, self.shape, random_tensor(self.name, self.shape, self.device))


def is_random(source: object) -> bool:
    return isinstance(source, str) and source.startswith(PREFIX)


def open_random(source: str, device: torch.device = HOST) -> Checkpoint:
    """Open the model `random/NAME`, with tensors made on `device`."""
    config = dict(shape_of(source))
    tensors = {name: lazy_tensor(name, shape, device) for name, shape in tensor_shapes(source, config).items()}
    return Checkpoint(
        path=Path(source),
        config=config,
        tensors=tensors,
        tokenizer_source=byte_tokens(source, config["vocab_size"]),
        generation={"bos_token_id": None, "eos_token_id": []},
    )


def head_config(source: str) -> dict[str, Any]:
    """Return the configuration of the EAGLE-3 head `random/eagle3-NAME`."""
    name = source.removeprefix(PREFIX)
    if not name.startswith(HEAD):
        raise UserError(f"`{source}` is not a draft head: pass `{PREFIX}{HEAD}NAME`, the head for `{PREFIX}NAME`")
    target = shape_of(PREFIX + name.removeprefix(HEAD))
    layers = target["num_hidden_layers"]
    middle = layers // 2
    return {
        **target,
        "num_hidden_layers": 1,
        "draft_vocab_size": min(DRAFT_VOCABULARY, target["vocab_size"] // 2),
        "eagle_aux_hidden_state_layer_ids": [min(2, layers // 4), middle, max(layers - 3, middle + 1)],
    }


def open_random_head(source: str, device: torch.device = HOST) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and tensors of the EAGLE-3 head `random/eagle3-NAME`."""
    config = head_config(source)
    width, vocabulary, drafted = config["hidden_size"], config["vocab_size"], config["draft_vocab_size"]
    shapes = layer_shapes(config, Traits(), "model.layers.0.")
    for part in ("q_proj", "k_proj", "v_proj"):  # inputs are [token, state]
        rows, columns = shapes[f"model.layers.0.self_attn.{part}.weight"]
        shapes[f"model.layers.0.self_attn.{part}.weight"] = (rows, 2 * columns)
    shapes |= {
        "model.layers.0.hidden_norm.weight": (width,),
        "model.norm.weight": (width,),
        "model.fc.weight": (width, 3 * width),
        "lm_head.weight": (drafted, width),
    }
    tensors = {each: random_tensor(f"head.{each}", shape, device) for each, shape in shapes.items()}
    ids = torch.arange(drafted)
    return config, tensors | {"d2t": ids * vocabulary // drafted - ids}


def shape_of(source: str) -> Mapping[str, Any]:
    """Return the configuration of `random/NAME` or `random/PATH`."""
    name = source.removeprefix(PREFIX)
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        known = ", ".join(f"`{PREFIX}{each}`" for each in SHAPES)
        raise UserError(
            f"`{source}` is not a known shape: pass one of {known}, or `{PREFIX}` and the path of a config.json"
        )
    return normalize(read_json(path))


def tensor_shapes(source: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a decoder with this configuration."""
    kind = str(config.get("model_type"))
    if kind not in KINDS:
        raise UserError(f"`{source}` is a `{kind}`, whose tensors are not known: pick one of {', '.join(KINDS)}")
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if type(config.get(key)) is not int or config[key] < 1:
            raise UserError(f"`{source}` says `{key}` is {config.get(key)!r}: state a whole number in its config.json")
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(config["num_hidden_layers"]):
        traits = KINDS[kind] if has_experts(config, layer) else replace(KINDS[kind], expert_width="")
        shapes |= layer_shapes(config, traits, f"model.layers.{layer}.", is_recurrent(config, traits, layer))
    shapes["model.norm.weight"] = (width,)
    if not config.get("tie_word_embeddings", kind in TIED_KINDS):
        shapes["lm_head.weight"] = (vocabulary, width)
    return shapes


def layer_shapes(
    config: Mapping[str, Any], traits: Traits, prefix: str, recurrent: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer. recurrent: it has a recurrent layer in the place of attention."""
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    queries, keys = heads * head, (config.get("num_key_value_heads") or heads) * head
    gated = 2 if traits.gated else 1
    attention = {"q_proj": (gated * queries, width), "k_proj": (keys, width), "v_proj": (keys, width)}
    mlp = {"gate_proj": (inner, width), "up_proj": (inner, width)}
    if traits.fused:
        attention, mlp = {"qkv_proj": (queries + 2 * keys, width)}, {"gate_up_proj": (2 * inner, width)}
    attention["o_proj"], mlp["down_proj"] = (width, queries), (width, inner)
    found: dict[str, tuple[int, ...]] = {}
    if recurrent:
        attention = {}
        shapes = mamba_shapes(config) if traits.recurrent == "mamba" else delta_shapes(config, traits.recurrent)
        found |= {prefix + name: shape for name, shape in shapes.items()}
    if traits.recurrent == "mamba":
        mlp = {}
        found |= {prefix + name: shape for name, shape in granite_mlp_shapes(config, traits.expert_width).items()}
    elif traits.expert_width:
        mlp = {}
        shapes_of = gpt_oss_expert_shapes if traits.gpt_oss else expert_shapes
        found |= shapes_of(config, traits.expert_width, f"{prefix}mlp.")
    if traits.gpt_oss:
        found[f"{prefix}self_attn.sinks"] = (heads,)
    for part, matrices in (("self_attn", attention), ("mlp", mlp)):
        stated = config.get("attention_bias" if part == "self_attn" else "mlp_bias")
        for name, shape in matrices.items():
            found[f"{prefix}{part}.{name}.weight"] = shape
            if stated or name in traits.biases:
                found[f"{prefix}{part}.{name}.bias"] = shape[:1]
    norms = ["input_layernorm"] if traits.pre_norms else []
    norms += ["post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm"] if traits.pre_norms and traits.post_norms else []
    norms += ["post_feedforward_layernorm"] if traits.post_norms else []
    found |= {f"{prefix}{norm}.weight": (width,) for norm in norms}
    if (traits.head_norms or traits.whole_norms) and not recurrent:
        sizes = (queries, keys) if traits.whole_norms else (head, head)
        found |= {
            f"{prefix}self_attn.{norm}.weight": (size,) for norm, size in zip(("q_norm", "k_norm"), sizes, strict=True)
        }
    return found


def is_recurrent(config: Mapping[str, Any], traits: Traits, layer: int) -> bool:
    """Return whether a layer is recurrent, as `layer_types` says, or all but every `full_attention_interval`-th."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if not traits.recurrent:
        return False
    if kinds is None:
        return (layer + 1) % (config.get("full_attention_interval") or 4) != 0
    return layer < len(kinds) and kinds[layer] in ("linear_attention", "mamba")


def sizes_of(config: Mapping[str, Any], *keys: str) -> list[int]:
    """Return these sizes of recurrent layers."""
    for key in keys:
        if type(config.get(key)) is not int or config[key] < 1:
            raise UserError(f"a recurrent layer has `{key}` {config.get(key)!r}: state a whole number in config.json")
    return [config[key] for key in keys]


def delta_shapes(config: Mapping[str, Any], projections: str) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Gated DeltaNet layer, with fused (Qwen3-Next) or split projections (Qwen3.5)."""
    width, heads, key_heads, head, state, conv = sizes_of(
        config,
        "hidden_size",
        "linear_num_value_heads",
        "linear_num_key_heads",
        "linear_value_head_dim",
        "linear_key_head_dim",
        "linear_conv_kernel_dim",
    )
    values, channels = heads * head, 2 * key_heads * state + heads * head
    parts = {"in_proj_qkvz.weight": (channels + values, width), "in_proj_ba.weight": (2 * heads, width)}
    if projections == "split":
        parts = {f"in_proj_{name}.weight": (heads, width) for name in "ab"}
        parts |= {"in_proj_qkv.weight": (channels, width), "in_proj_z.weight": (values, width)}
    found: dict[str, tuple[int, ...]] = {
        **parts,
        "conv1d.weight": (channels, 1, conv),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (head,),
        "out_proj.weight": (width, values),
    }
    return {f"linear_attn.{name}": shape for name, shape in found.items()}


def mamba_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Mamba-2 layer."""
    width, heads, groups, state, conv, expand = sizes_of(
        config, "hidden_size", "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand"
    )
    values, channels = expand * width, 2 * groups * state + expand * width
    found: dict[str, tuple[int, ...]] = {
        "in_proj.weight": (values + channels + heads, width),
        "conv1d.weight": (channels, 1, conv),
        "A_log": (heads,),
        "D": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (values,),
        "out_proj.weight": (width, values),
    }
    if config.get("mamba_conv_bias", True):
        found["conv1d.bias"] = (channels,)
    return {f"mamba.{name}": shape for name, shape in found.items()}


def granite_mlp_shapes(config: Mapping[str, Any], width_key: str) -> dict[str, tuple[int, ...]]:
    """Return the tensors of an MLP of Granite 4, and of its experts if it has some."""
    width, inner = sizes_of(config, "hidden_size", "shared_intermediate_size")
    found: dict[str, tuple[int, ...]] = {
        "shared_mlp.input_linear.weight": (2 * inner, width),
        "shared_mlp.output_linear.weight": (width, inner),
    }
    if width_key:
        count, inner = expert_sizes(config, width_key)
        found |= {
            "block_sparse_moe.router.weight": (count, width),
            "block_sparse_moe.experts.gate_up_proj": (count, 2 * inner, width),
            "block_sparse_moe.experts.down_proj": (count, width, inner),
        }
    return found


def expert_sizes(config: Mapping[str, Any], width_key: str) -> tuple[int, int]:
    """Return the number of experts and their inner width."""
    inner, count = config.get(width_key), next((config[key] for key in EXPERT_COUNTS if config.get(key)), None)
    if type(inner) is not int or type(count) is not int:
        raise UserError(f"a mixture has {count!r} experts of width {inner!r}: state `num_experts` and `{width_key}`")
    return count, inner


def gpt_oss_expert_shapes(config: Mapping[str, Any], width_key: str, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a mixture of experts of gpt-oss."""
    width, (count, inner) = config["hidden_size"], expert_sizes(config, width_key)
    return {
        f"{prefix}router.weight": (count, width),
        f"{prefix}router.bias": (count,),
        f"{prefix}experts.gate_up_proj": (count, width, 2 * inner),
        f"{prefix}experts.gate_up_proj_bias": (count, 2 * inner),
        f"{prefix}experts.down_proj": (count, inner, width),
        f"{prefix}experts.down_proj_bias": (count, width),
    }


def expert_shapes(config: Mapping[str, Any], width_key: str, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a mixture of experts."""
    width, (count, inner) = config["hidden_size"], expert_sizes(config, width_key)
    found: dict[str, tuple[int, ...]] = {
        f"{prefix}gate.weight": (count, width),
        f"{prefix}experts.gate_up_proj": (count, 2 * inner, width),
        f"{prefix}experts.down_proj": (count, width, inner),
    }
    if shared := config.get("shared_expert_intermediate_size"):
        module = prefix + "shared_expert"
        found |= {f"{module}_gate.weight": (1, width), f"{module}.down_proj.weight": (width, shared)}
        found |= {f"{module}.{part}_proj.weight": (shared, width) for part in ("gate", "up")}
    return found


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    if any(config.get(key) == 0 for key in EXPERT_COUNTS):  # a hybrid model without experts says so
        return False
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    return layer not in dense and (layer + 1) % step == 0


def lazy_tensor(name: str, shape: tuple[int, ...], device: torch.device) -> RandomTensor:
    data = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return RandomTensor("bf16", shape, data, name=name, device=device)


def random_tensor(name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Sample bf16 normals: matrices [..., N, K] preserve the scale of their input, norms are near 1, biases near 0."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
    deviation = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
    return tensor.normal_(float("norm" in name), deviation, generator=generator)


def byte_tokens(source: str, vocabulary: int) -> dict[str, Any]:
    """Return GGUF metadata of a tokenizer whose first 256 tokens are the bytes; the others never come from text."""
    tokens = [f"<0x{token:02X}>" if token < 256 else f"<{token}>" for token in range(vocabulary)]
    kinds = [BYTE if token < 256 else UNUSED for token in range(vocabulary)]
    tokens[32:33], kinds[32:33] = [" "], [NORMAL]  # SentencePiece has no byte token for a space
    tokens, kinds = tokens[:vocabulary], kinds[:vocabulary]
    return {
        "path": source,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * vocabulary,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }
