"""GGUF files: the metadata as a Hugging Face config, the tensors under Hugging Face names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..kernels.quantization import FORMATS
from .checkpoint import Checkpoint, Stored, listed_ids, view
from .gguf_header import GgufHeader, TensorInfo
from .gguf_hybrids import HYBRIDS, hybrid_keys, hybrid_name, kv_head_count, module_name, restore
from .gguf_parts import GgufParts

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
SANDWICH_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GPT_OSS_NAMES = LAYER_NAMES | {
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}
FUSED_NAMES = LAYER_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class GgufArchitecture:
    model_type: str
    class_name: str
    interleaved: bool = False  # rotary pairs are adjacent rows of q and k
    names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)


ARCHITECTURES = {
    "llama": GgufArchitecture("llama", "LlamaForCausalLM", interleaved=True),
    "smollm3": GgufArchitecture("smollm3", "SmolLM3ForCausalLM", interleaved=True),
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM"),
    "phi3": GgufArchitecture("phi3", "Phi3ForCausalLM", names=FUSED_NAMES),
    "olmo2": GgufArchitecture("olmo2", "Olmo2ForCausalLM", names=SANDWICH_NAMES),
    "granite": GgufArchitecture("granite", "GraniteForCausalLM", interleaved=True),
    "gemma2": GgufArchitecture("gemma2", "Gemma2ForCausalLM", names=SANDWICH_NAMES),
    "gpt-oss": GgufArchitecture("gpt_oss", "GptOssForCausalLM", names=GPT_OSS_NAMES),
    "olmoe": GgufArchitecture("olmoe", "OlmoeForCausalLM"),
    "qwen2moe": GgufArchitecture("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": GgufArchitecture("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma3": GgufArchitecture("gemma3_text", "Gemma3ForCausalLM", names=SANDWICH_NAMES),
    "qwen3next": GgufArchitecture("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen35": GgufArchitecture("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen35moe": GgufArchitecture("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    "granitehybrid": GgufArchitecture("granitemoehybrid", "GraniteMoeHybridForCausalLM", interleaved=True),
}
MISTRAL = GgufArchitecture("mistral", "MistralForCausalLM", interleaved=True)
MIXTRAL = GgufArchitecture("mixtral", "MixtralForCausalLM", interleaved=True)
# Whether the scores of the chosen experts are divided by their sum: as llama.cpp has it, files do not say.
NORMALIZED_SCORES = {
    "mixtral": True,
    "gpt_oss": True,
    "olmoe": False,
    "qwen2_moe": False,
    "qwen3_moe": True,
    "qwen3_next": True,
    "qwen3_5_moe_text": True,
    "granitemoehybrid": True,
}
GEMMA_LOCAL_BASE = 10_000.0  # rope base of the sliding layers, which most files leave out
GEMMA_PATTERN = 6  # every sixth layer has full attention
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}  # the only sizes whose attention scale does not follow from head_dim
GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # of files that state none
GRANITE_KEYS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
YARN_KEYS = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
LONG_ROPE = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
ROPE_FACTORS = "rope_freqs.weight"  # the scaling of Llama 3: divisors of the frequencies, in any context
OUTRIDER_PREFIX = "outrider."  # metadata keys with this prefix are keys of config.json
MAX_LAYERS = 1024  # of a model whose file may hold its MTP modules alone; no published one has more
SMOLLM3_PATTERN = 4  # every fourth layer has no rotary embedding


def open_gguf(path: Path) -> Checkpoint:
    parts = GgufParts(path)
    path, header = parts.path, parts.header
    fields = GgufFields(path, header)
    config = translate(fields)
    tensors: dict[str, Stored] = {}
    for tensor, mapped in parts.tensors:
        stored = Stored(
            tensor.kind,
            tensor.shape,
            view(mapped, tensor.offset, tensor.size, FORMATS[tensor.kind].dtype, tensor.shape),
            interleaved_heads(path, tensor, config) if fields.architecture.interleaved else 0,
        )
        name = hybrid_name(tensor.name, fields.name) if fields.name in HYBRIDS else None
        if name is None:
            name = hugging_face_name(tensor.name, fields.architecture.names)
        else:
            stored = restore(name, stored, fields.name, config)
        tensors[module_name(tensor.name, name, fields.layers()) if fields.modules else name] = stored
    if LONG_ROPE.keys() <= tensors.keys():
        config["rope_scaling"] = long_rope(fields, {LONG_ROPE[name]: tensors.pop(name) for name in LONG_ROPE})
    if ROPE_FACTORS in tensors:
        config["rope_scaling"] = llama3_rope(fields, config, tensors.pop(ROPE_FACTORS))
    tokenizer = {key: value for key, value in header.metadata.items() if key.startswith("tokenizer.")}
    ids = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    bos = header.metadata.get("tokenizer.ggml.bos_token_id")
    return Checkpoint(
        path=path,
        config=config,
        tensors=tensors,
        tokenizer_source={"path": str(path), "general.architecture": fields.name, **tokenizer},
        generation={"bos_token_id": bos, "eos_token_id": listed_ids(*ids)},
        mappings=parts.mappings,
    )


def hugging_face_name(name: str, layer_names: Mapping[str, str]) -> str:
    """Translate a tensor name; unknown names stay as they are."""
    match = LAYER.fullmatch(name)
    if match and match[2] in layer_names:
        return f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"
    stem, _, leaf = name.rpartition(".")
    return f"{NAMES[stem]}.{leaf}" if stem in NAMES else name


def interleaved_heads(path: Path, tensor: TensorInfo, config: dict[str, Any]) -> int:
    match = LAYER.fullmatch(tensor.name)
    # A quantized vector is a single row and is refused where it is read.
    is_vector = len(tensor.shape) == 1 and FORMATS[tensor.kind].quantized
    if is_vector or not match or match[2] not in ("attn_q", "attn_k"):
        return 0
    key = "num_attention_heads" if match[2] == "attn_q" else "num_key_value_heads"
    heads = config[key]
    if type(heads) is not int or heads < 1:
        given = str(heads)[:40]
        raise UserError(f"`{path}`: the metadata `{OUTRIDER_PREFIX}{key}` is `{given}`, expected a positive number")
    if tensor.shape[0] % (2 * heads):
        raise UserError(f"`{path}`: the {tensor.shape[0]} rows of `{tensor.name}` do not fit {heads} heads")
    return heads


class GgufFields:
    """Checked access to the metadata of one architecture."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self.path = path
        self.header = header
        self.tensors = {tensor.name: tensor for tensor in header.tensors}
        name = header.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UserError(f"`{path}` has the architecture `{name}`, which Outrider cannot run: pick one of {known}")
        self.name = name
        self.architecture = ARCHITECTURES[self.name]
        if self.name == "llama" and self.get("expert_count"):
            self.architecture = MIXTRAL
        elif self.name == "llama" and self.get("attention.sliding_window"):
            self.architecture = MISTRAL

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.name}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if isinstance(value, list) and len(set(value)) == 1:  # one entry per layer
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value < 2**31:
            given = "is missing" if value is None else f"is `{str(value)[:40]}`"
            raise UserError(f"`{self.path}`: the metadata `{self.name}.{key}` {given}, expected a positive number")
        return value

    def real(self, key: str, default: float) -> float:
        value = self.get(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise UserError(f"`{self.path}`: the metadata `{self.name}.{key}` is `{value}`, expected a positive number")
        return float(str(np.float32(value)))  # 1e-05 rather than the digits of the nearest float32

    @property
    def config_keys(self) -> dict[str, Any]:
        """Return the keys of config.json that Outrider wrote into the file."""
        metadata = self.header.metadata.items()
        return {key.removeprefix(OUTRIDER_PREFIX): value for key, value in metadata if key.startswith(OUTRIDER_PREFIX)}

    def expert_tensor(self, layer: int, part: str) -> TensorInfo | None:
        return self.tensors.get(f"blk.{layer}.ffn_{part}.weight")

    @property
    def modules(self) -> int:
        """Return the number of MTP modules, which `block_count` counts as layers."""
        return self.count("nextn_predict_layers") if self.get("nextn_predict_layers") else 0

    def layers(self) -> int:
        blocks, modules = self.count("block_count"), self.modules
        if blocks > (MAX_LAYERS if modules else len(self.tensors)):
            raise UserError(f"`{self.path}` claims {blocks} layers, but has only {len(self.tensors)} tensors")
        if modules >= blocks:
            raise UserError(f"`{self.path}` claims {modules} modules among {blocks} layers: fetch it again")
        return blocks - modules


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to the keys of config.json."""
    heads = fields.count("attention.head_count")
    width = fields.count("embedding_length")
    head_dim = fields.count("attention.key_length", default=max(width // heads, 1))
    embedding = fields.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"`{fields.path}` has no tensor `token_embd.weight`: it is not a complete language model")
    window = fields.count("attention.sliding_window", default=0) if fields.get("attention.sliding_window") else None
    config: dict[str, Any] = {
        "model_type": fields.architecture.model_type,
        "architectures": [fields.architecture.class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": mlp_width(fields),
        "num_hidden_layers": fields.layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_head_count(fields, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": fields.real("rope.freq_base", 10_000.0),
        "rope_scaling": rope_scaling(fields),
        "max_position_embeddings": fields.count("context_length"),
        "tie_word_embeddings": "output.weight" not in fields.tensors,
        "sliding_window": window,
        "attention_bias": "blk.0.attn_q.bias" in fields.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in fields.tensors,
    }
    rotary = fields.count("rope.dimension_count", default=head_dim)
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    if fields.name in GEMMA_27B_LAYERS:
        config |= gemma(fields, config)
    if fields.name in HYBRIDS:
        config |= hybrid_keys(fields, config)
    if fields.name in ("granite", "granitehybrid"):
        config |= {name: fields.real(key, 1.0) for key, name in GRANITE_KEYS.items() if fields.get(key) is not None}
    if fields.get("expert_count"):
        config |= experts(fields)
    if fields.name == "smollm3":
        layers = range(1, config["num_hidden_layers"] + 1)
        config["no_rope_layers"] = [int(layer % SMOLLM3_PATTERN != 0) for layer in layers]
    return config | fields.config_keys


def mlp_width(fields: GgufFields) -> int:
    """Return the inner width of an MLP; files of Qwen3.5 without dense layers state that of experts alone."""
    experts_alone = fields.get("feed_forward_length") is None and fields.get("expert_feed_forward_length")
    return fields.count("expert_feed_forward_length" if experts_alone else "feed_forward_length")


def rope_scaling(fields: GgufFields) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type") or "none"
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": fields.real("rope.scaling.factor", 1.0)}
    original = fields.get("rope.scaling.original_context_length")
    if original:
        scaling["original_max_position_embeddings"] = original
    if fields.name == "gpt-oss":
        scaling["truncate"] = False  # as it was trained; files do not say
    scaling |= {name: fields.real(key, 1.0) for key, name in YARN_KEYS.items() if fields.get(key) is not None}
    return scaling | yarn_attention(fields) if kind == "yarn" else scaling


def yarn_attention(fields: GgufFields) -> dict[str, float]:
    """Return the keys of config.json for what YaRN multiplies cosines and sines by.

    The converters write `attention_factor`, the whole factor, and `attn_factor`, which multiplies the usual one, under
    the same key. The usual factor is at least 1, so a whole factor is; a value below 1 is taken for the other one.
    """
    blend = fields.get("rope.scaling.yarn_ext_factor")
    if blend is not None and not (type(blend) in (int, float) and (blend < 0 or blend == 1)):  # below 0: not set
        raise UserError(
            f"`{fields.path}`: the metadata `{fields.name}.rope.scaling.yarn_ext_factor` is `{blend}`, but only YaRN "
            "with 1 is supported: fetch another conversion"
        )
    if fields.get("rope.scaling.yarn_attn_factor") is not None:
        factor = fields.real("rope.scaling.yarn_attn_factor", 1.0)
        return {"attention_factor" if factor >= 1 else "attn_factor": factor}
    if fields.get("rope.scaling.yarn_log_multiplier"):
        return {"mscale": 1.0, "mscale_all_dim": fields.real("rope.scaling.yarn_log_multiplier", 1.0)}
    return {}


def long_rope(fields: GgufFields, factors: Mapping[str, Stored]) -> dict[str, Any]:
    """Return the rope scaling of Phi-3, whose divisors of the frequencies are tensors."""
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    scaling |= {name: stored.data.float().flatten().tolist() for name, stored in factors.items()}
    if original := fields.get("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    if fields.get("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = fields.real("rope.scaling.attn_factor", 1.0)
    return scaling


def llama3_rope(fields: GgufFields, config: Mapping[str, Any], factors: Stored) -> dict[str, Any]:
    """Return the rope scaling of Llama 3 as a LongRoPE with the same divisors in short and long contexts."""
    stated = config["rope_scaling"] or {"rope_type": "linear", "factor": 1.0}
    if stated["rope_type"] != "linear":
        raise UserError(
            f"`{fields.path}` has the rope scaling `{stated['rope_type']}` and the tensor `{ROPE_FACTORS}`, which is "
            "not supported: fetch another conversion"
        )
    divisors = [value * stated["factor"] for value in factors.data.float().flatten().tolist()]
    count = fields.count("rope.dimension_count", default=config["head_dim"]) // 2
    if len(divisors) != count or not all(0 < value < math.inf for value in divisors):
        raise UserError(
            f"the tensor `{ROPE_FACTORS}` of `{fields.path}` does not hold {count} positive numbers: fetch it again"
        )
    return {
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def experts(fields: GgufFields) -> dict[str, Any]:
    name = fields.architecture.model_type
    if name not in NORMALIZED_SCORES:
        raise UserError(
            f"`{fields.path}` is a `{fields.name}` with experts: pick one of {', '.join(NORMALIZED_SCORES)}"
        )
    blocks = range(fields.layers() + fields.modules)
    first = next((block for block in blocks if fields.expert_tensor(block, "gate_exps")), 0)
    config: dict[str, Any] = {
        "num_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "norm_topk_prob": NORMALIZED_SCORES[name],
        "mlp_only_layers": [layer for layer in range(fields.layers()) if not fields.expert_tensor(layer, "gate_exps")],
    }
    for part, key in (("gate_exps", "moe_intermediate_size"), ("gate_shexp", "shared_expert_intermediate_size")):
        if tensor := fields.expert_tensor(first, part):
            config[key] = tensor.shape[-2] if len(tensor.shape) > 1 else 0
    return config


def gemma(fields: GgufFields, config: dict[str, Any]) -> dict[str, Any]:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    largest = layers == GEMMA_27B_LAYERS[fields.name]
    keys = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // heads if largest else config["head_dim"],
    }
    if fields.name == "gemma2":
        return keys | {name: fields.real(name, usual) for name, usual in GEMMA2_CAPS.items()}
    return keys | gemma3(fields, layers)


def gemma3(fields: GgufFields, layers: int) -> dict[str, Any]:
    stated = fields.get("attention.sliding_window_pattern")
    if isinstance(stated, list) and len(stated) == layers:
        sliding = [bool(flag) for flag in stated]
    else:
        pattern = fields.count("attention.sliding_window_pattern", default=GEMMA_PATTERN)
        sliding = [(layer + 1) % pattern != 0 for layer in range(layers)]
    return {
        "rope_local_base_freq": fields.real("rope.freq_base_swa", GEMMA_LOCAL_BASE),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in sliding],
    }
