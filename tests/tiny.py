"""Tiny random models of every architecture, made by transformers, and the batches to run them with."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from outrider.cache.pages import Pages, StateShape
from outrider.kernels import Batch, Weight
from outrider.models import Model
from outrider.weights import gguf_writer
from outrider.weights.hf_folder import OFFSET_NORMS
from outrider.weights.random import byte_tokens

KINDS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
SPECIAL = ["<pad>", "<s>", "</s>"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["é", "ü", "猫"]  # one token each, after the special ones
VOCABULARY = len(SPECIAL + CHARACTERS)
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
TWO_BASES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
}
GPT_OSS = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "truncate": False}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
HYBRID = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
}
MAMBA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 24,
    "shared_intermediate_size": 64,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 1.5,
    "tie_word_embeddings": True,
}
TEXT_CONFIGS = ("Gemma3", "Qwen3_5", "Qwen3_5Moe")  # classes of multimodal models, whose text part has another config
# name -> (class in transformers without its suffix, what differs from COMMON)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama3-rope": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "linear-rope": ("Llama", {"rope_parameters": LINEAR, "num_key_value_heads": 1, "head_dim": 8}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN, "max_position_embeddings": 128}),
    "phi3": ("Phi3", {"sliding_window": 9, "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    "phi3-long": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 16}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 32,
            "sliding_window": 6,
            "rope_parameters": {**GPT_OSS, "original_max_position_embeddings": 32},
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 160,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-next": ("Qwen3Next", {**HYBRID, "num_experts": 0}),
    "qwen3-next-moe": (
        "Qwen3Next",
        {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 3, "mlp_only_layers": [1]},
    ),
    "qwen3.5": ("Qwen3_5", {**HYBRID, "tie_word_embeddings": True}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "smollm3-window": (
        "SmolLM3",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 7},
    ),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 1.5,
            "tie_word_embeddings": True,
        },
    ),
    "granite4": ("GraniteMoeHybrid", {**MAMBA, "num_local_experts": 0}),
    "granite4-moe": (
        "GraniteMoeHybrid",
        {**MAMBA, "num_local_experts": 4, "mamba_n_groups": 2, "position_embedding_type": "rope"},
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "sliding_window": 5,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
            "rope_parameters": TWO_BASES,
        },
    ),
}


class Memory:
    """A checkpoint without a file."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], norms_are_offset: bool) -> None:
        self.config = config
        self.tensors = tensors
        self.norms_are_offset = norms_are_offset

    def names(self) -> Iterable[str]:
        return self.tensors

    def release(self) -> None:
        return

    def weight(self, name: str) -> Weight:
        tensor = self.tensors[name]
        return Weight(KINDS[tensor.dtype], tuple(tensor.shape), tensor)


@functools.cache
def original(name: str) -> Any:
    """The model in transformers, fp32, with weights large enough for its logits to tell tokens apart."""
    architecture, changes = CASES[name]
    make = _config_class(architecture)
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, f"{architecture}ForCausalLM")(make(**{**COMMON, **changes})).eval()
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if part.endswith("A_log"):  # states that remember several tokens
                parameter.uniform_(-3, -1)
            elif parameter.dim() == 3 and parameter.shape[1] == 1:  # the convolution of a recurrent layer
                parameter.normal_()
            elif parameter.dim() > 1:  # matrices, or those of all experts
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def _config_class(architecture: str) -> Any:
    return getattr(transformers, f"{architecture}{'Text' if architecture in TEXT_CONFIGS else ''}Config")


def model_type(name: str) -> str:
    """Return the `model_type` of a case without making the model."""
    return str(_config_class(CASES[name][0]).model_type)


def checkpoint(name: str, dtype: torch.dtype = torch.float32) -> Memory:
    model = original(name)
    tensors = {key: value.to(dtype) for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    config = json.loads(model.config.to_json_string())
    return Memory(config, tensors, norms_are_offset=config["model_type"].startswith(OFFSET_NORMS))


@functools.cache
def folder(name: str, shard: str = "1GB") -> Path:
    """The model saved as transformers saves it: config.json and safetensors, no tokenizer."""
    kept = _folders() / f"{name}-{shard}"
    original(name).save_pretrained(kept, max_shard_size=shard)
    return kept


def gguf(name: str) -> bytes:
    """Return a model as a GGUF file, with a vocabulary of bytes."""
    config, weights = json.loads(original(name).config.to_json_string()), checkpoint(name)
    words = {key: value for key, value in byte_tokens("", VOCABULARY).items() if key != "path"}
    tensors = gguf_writer.rename(config, {each: weights.weight(each) for each in weights.names()})
    return b"".join(gguf_writer.encode(gguf_writer.describe(config, "tiny", "f32") | words, tensors))


def copy(name: str, to: Path) -> Path:
    """The model in a folder of its own, with a tokenizer of single characters."""
    shutil.copytree(folder(name), to, dirs_exist_ok=True)
    tokenizer = Tokenizer(models.BPE({text: token for token, text in enumerate(SPECIAL + CHARACTERS)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(to / "tokenizer.json"))
    return to


@functools.cache
def _folders() -> Path:
    holder = tempfile.TemporaryDirectory(prefix="outrider-tiny-", ignore_cleanup_errors=True)
    _alive.append(holder)
    return Path(holder.name)


_alive: list[tempfile.TemporaryDirectory[str]] = []  # removed when the interpreter ends


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch(rows: Sequence[tuple[Sequence[int], int, Sequence[int]]], page_size: int) -> Batch:
    """Each row: its tokens, the position of the first of them, and its pages. Row b has the state slot b."""
    width = max(len(pages) for _, _, pages in rows)
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for new, start, pages in rows:
        new_positions = range(start, start + len(new))
        tokens += new
        positions += new_positions
        slots += [pages[position // page_size] * page_size + position % page_size for position in new_positions]
        starts.append(len(tokens))
    tables = [list(pages) + [0] * (width - len(pages)) for _, _, pages in rows]
    ids = functools.partial(torch.tensor, dtype=torch.int32)
    states = [[row, row, max(len(new) - 1, 0)] for row, (new, _, _) in enumerate(rows)]
    return Batch(ids(tokens), ids(positions), ids(slots), ids(starts), ids(tables), states=ids(states))


def pages_for(model: Model, count: int, page_size: int = 4, dtype: str = "float32") -> Pages:
    shape, states = model.config, None
    if (of := shape.recurrent) is not None:
        states = StateShape(of.layers, of.heads, of.head_dim, of.state_dim, of.inputs, 4, of.conv_size + 8)
    pages = Pages(shape.layers, shape.kv_heads, page_size, shape.head_dim, dtype, recurrent=states)
    pages.allocate(count)
    return pages


def run(
    model: Model,
    tokens: Sequence[int],
    chunk: int,
    aux_layers: Sequence[int] = (),
    page_size: int = 4,
    dtype: str = "float32",
) -> tuple[Tensor, list[Tensor]]:
    """Logits [T, V] and aux hidden states [T, E] of one request, `chunk` tokens a step, its pages in no order."""
    count = -(-len(tokens) // page_size)
    storage = pages_for(model, count + 3, page_size, dtype)
    table = torch.randperm(count + 3, generator=torch.Generator().manual_seed(1))[:count].tolist()
    logits, aux_states = [], []
    for start in range(0, len(tokens), chunk):
        step = batch([(tokens[start : start + chunk], start, table)], page_size)
        hidden, states = model.forward(step, storage.storages, aux_layers)
        logits.append(model.logits(hidden))
        aux_states.append(states)
    return torch.cat(logits), [torch.cat(states) for states in zip(*aux_states, strict=True)]
