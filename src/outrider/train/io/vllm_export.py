"""Heads as vLLM loads them: EAGLE-3, DFlash and DSpark in the layout of speculators, Medusa in vLLM's own, modules of
multi-token prediction as Qwen3-Next names them.

Embedding and head matrix always come along, so that nobody has to find them elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...models import ModelConfig
from ...models.block_head import MASK_EMBEDDING, BlockShape
from ...models.config import ARCHITECTURES
from ...models.heads import EagleShape
from ...speculation.checkpoints import Head, arrange, read_head
from ...weights.hf_folder import classic_rope
from ..heads.base import Exported
from ..target import Subject

Written = tuple[dict[str, Any], dict[str, Tensor]]  # config.json and tensors, f32

VERSION = "0.9.0"  # of speculators, whose keys these are
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "layer_types",
    "sliding_window",
)
# What two layouts may say of one head in different ways.
APART = {
    "layout",
    "aux_layers",
    "own_embedding",
    "own_head",
    "mask_embedding",
    "scaled_embedding",
    "spread_aux_layers",
    "lm_heads",
}
APART |= {"target_layers"}  # some have no key for it


def translate(exported: Exported, subject: Subject, tokens: int) -> Written:
    """The head with the keys and names of others. tokens: how many it is to draft at a time."""
    ours = understood(exported.config, with_map(exported))
    form = {"eagle3": _eagle3, "dflash": _block, "dspark": _block, "medusa": _medusa, "mtp": _mtp}.get(ours.shape.kind)
    if form is None:
        raise UserError(f"heads of the method `{ours.shape.kind}` have no layout that vLLM loads: write ours alone")
    config, tensors = form(ours, exported, subject, tokens)
    theirs = understood(config, tensors)
    for field in fields(ours.shape):
        before, after = (_comparable(getattr(head.shape, field.name)) for head in (ours, theirs))
        anchored = field.name == "anchored" and not any(ours.shape.layers.windows)  # it is about windows alone
        if field.name not in APART and not anchored and before != after:
            raise UserError(
                f"the layout that vLLM loads cannot say that `{field.name}` of this head is {before}: write ours alone"
            )
    return config, tensors


def _comparable(value: Any) -> Any:
    """What config.json says of positions and vocabulary does not bind a head."""
    return replace(value, context=0, vocabulary=0) if isinstance(value, ModelConfig) else value


def understood(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Head:
    return read_head(arrange(Path("the export"), dict(config), dict(tensors)))


def with_map(exported: Exported) -> dict[str, Tensor]:
    """The tensors, and `d2t` where the head can draft some tokens alone."""
    ids = exported.draft_ids
    return exported.tensors if ids is None else exported.tensors | {"d2t": ids - torch.arange(len(ids))}


def _eagle3(head: Head, exported: Exported, subject: Subject, tokens: int) -> Written:
    shape: EagleShape = head.shape
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    config = _speculators("Eagle3Speculator", head, exported, subject, tokens)
    config |= {
        "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers or subject.taps),
        "embed_requires_grad": False,
        **{name: getattr(shape, name) for name in flags},
    }
    return config, _with_ends(head, subject)


def _block(head: Head, exported: Exported, subject: Subject, tokens: int) -> Written:
    shape: BlockShape = head.shape
    called = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}[shape.kind]
    config = _speculators(called, head, exported, subject, tokens)
    config |= {
        "aux_hidden_state_layer_ids": list(shape.aux_layers or subject.taps),
        "block_size": shape.block,
        "mask_token_id": shape.mask,
        "sample_from_anchor": shape.from_anchor,
        "sliding_window_non_causal": any(shape.layers.windows) and not any(shape.causal),
    }
    if shape.kind == "dspark":
        config |= {"markov_rank": shape.markov_rank, "markov_head_type": shape.markov}
        config |= {"enable_confidence_head": shape.confidence, "confidence_head_with_markov": shape.confidence_markov}
    tensors = _with_ends(head, subject)
    mask = tensors.pop(MASK_EMBEDDING.removeprefix("model."), None)
    if mask is not None:
        tensors[EMBEDDING] = tensors[EMBEDDING].clone()
        tensors[EMBEDDING][shape.mask] = mask.flatten()
    return config, tensors


def _speculators(called: str, head: Head, exported: Exported, subject: Subject, tokens: int) -> dict[str, Any]:
    kind, drafted = head.shape.kind, head.draft_ids
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [called],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": subject.model, "architectures": [_class_of(subject)]},
        },
        "transformer_layer_config": _layers(head, exported.config, subject),
        "draft_vocab_size": subject.config.vocabulary if drafted is None else len(drafted),
        "target_hidden_size": head.shape.target_width,
        "tie_word_embeddings": False,
    }


def _class_of(subject: Subject) -> str:
    """What transformers calls the target's class."""
    architecture = ARCHITECTURES.get(subject.config.architecture, ARCHITECTURES["llama"])
    return architecture.class_name


def _layers(head: Head, config: Mapping[str, Any], subject: Subject) -> dict[str, Any]:
    shape = head.shape.layers
    found = {key: config[key] for key in LAYER_KEYS if config.get(key) is not None}
    found |= _rotation({**config, **classic_rope(dict(config))})
    return found | {
        "model_type": "qwen3" if shape.head_norms else "llama",
        "num_hidden_layers": shape.layers,
        "head_dim": shape.head_dim,
        "attention_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "use_sliding_window": any(shape.windows),
        "max_position_embeddings": config.get("max_position_embeddings") or subject.config.context,
        "vocab_size": subject.config.vocabulary,
        "tie_word_embeddings": False,
    }


def _rotation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Under the keys of today's transformers and of older ones."""
    theta, scaling = config.get("rope_theta", 10_000.0), config.get("rope_scaling") or {}
    older = {"rope_theta": theta} | ({"rope_scaling": scaling} if scaling else {})
    return older | {"rope_parameters": {"rope_type": "default", **scaling, "rope_theta": theta}}


def _with_ends(head: Head, subject: Subject) -> dict[str, Tensor]:
    """The tensors without a prefix, then embedding, head matrix and maps between the vocabularies."""
    ids = head.draft_ids
    tensors = {EMBEDDING: subject.embedding.cpu(), HEAD: _rows(subject, ids)} | _plain(head)
    if ids is not None:
        known = torch.zeros(subject.config.vocabulary, dtype=torch.bool)
        known[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    return tensors


def _rows(subject: Subject, ids: Tensor | None) -> Tensor:
    """The target's head matrix for the tokens that can be drafted [U, E]."""
    return subject.head.cpu() if ids is None else subject.head.cpu()[ids]


def _plain(head: Head) -> dict[str, Tensor]:
    found = {name.removeprefix("model."): tensor for name, tensor in head.tensors.items()}
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def _medusa(head: Head, exported: Exported, subject: Subject, tokens: int) -> Written:
    shape, ids = head.shape, head.draft_ids
    tensors = _plain(head)
    if not shape.lm_heads:
        tensors[HEAD] = _rows(subject, ids)
    if ids is not None:
        tensors["token_map"] = ids
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": shape.width,
        "num_heads": shape.heads,
        "num_hidden_layers": shape.blocks,
        "num_lookahead_tokens": shape.heads,
        "vocab_size": subject.config.vocabulary,
        "truncated_vocab_size": subject.config.vocabulary if ids is None else len(ids),
        "medusa_fc_bias": shape.block_bias,
        "original_lm_head": HEAD in tensors,
        "logit_scale": shape.logit_scale,
    }, tensors


def _mtp(head: Head, exported: Exported, subject: Subject, tokens: int) -> Written:
    if head.shape.layout != "Qwen":
        raise UserError(f"modules named as {head.shape.layout} names them are not renamed: write our layout alone")
    return dict(exported.config), exported.tensors
