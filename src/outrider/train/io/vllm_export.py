"""The export for vLLM: EAGLE-3, P-EAGLE, DFlash and DSpark in the layout of speculators, Medusa in vLLM's own, MTP
modules as in Qwen3-Next, EAGLE-1 as SafeAILab publishes it.

Heads of the speculators layout include embedding and lm_head, so that the folder is self-contained.
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
from ...models.architectures import ARCHITECTURES
from ...models.block_head import MASK_EMBEDDING, BlockShape
from ...models.heads import EagleShape
from ...speculation.checkpoints import Head, arrange, read_head
from ...weights.hf_folder import classic_rope
from ..heads.base import HeadExport
from ..target import TargetInfo

ConfigTensors = tuple[dict[str, Any], dict[str, Tensor]]  # config.json and tensors, f32

VERSION = "0.9.0"  # of speculators, which defines the keys
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
# Fields of a shape that may differ between two layouts of one head.
LAYOUT_FIELDS = {
    "layout",
    "aux_layers",
    "own_embedding",
    "own_head",
    "mask_embedding",
    "scaled_embedding",
    "spread_aux_layers",
    "lm_heads",
    "target_layers",  # some layouts have no key for it
}


def translate(export: HeadExport, target_info: TargetInfo, tokens: int) -> ConfigTensors:
    """Return the head under vLLM's keys and names. tokens: to draft per step.

    The result is read back; a property that the layout cannot express is refused.
    """
    ours = read_back(export.config, with_d2t(export))
    form = FORMS.get(ours.shape.kind)
    if form is None:
        raise UserError(
            f"heads of the method `{ours.shape.kind}` have no layout that vLLM loads: use the one in Outrider's layout"
        )
    config, tensors = form(ours, export, target_info, tokens)
    theirs = read_back(config, tensors)
    for field in fields(ours.shape):
        before, after = (_comparable(getattr(head.shape, field.name)) for head in (ours, theirs))
        anchored = field.name == "anchored" and not any(ours.shape.layers.windows)  # matters only with sliding windows
        if field.name not in LAYOUT_FIELDS and not anchored and before != after:
            raise UserError(
                f"the layout that vLLM loads cannot express that `{field.name}` is {before}: "
                "use the one in Outrider's layout"
            )
    return config, tensors


def _comparable(value: Any) -> Any:
    """Drop context and vocabulary of a config, which do not bind a head."""
    return replace(value, context=0, vocabulary=0) if isinstance(value, ModelConfig) else value


def read_back(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Head:
    """Read an export as the engine would."""
    return read_head(arrange(Path("the export"), dict(config), dict(tensors)))


def with_d2t(export: HeadExport) -> dict[str, Tensor]:
    """Return the tensors, with `d2t` if the head cannot draft all tokens."""
    ids = export.draft_ids
    return export.tensors if ids is None else export.tensors | {"d2t": ids - torch.arange(len(ids))}


def _eagle3(head: Head, export: HeadExport, target_info: TargetInfo, tokens: int) -> ConfigTensors:
    shape: EagleShape = head.shape
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    architecture = "Eagle3Speculator" if shape.mask is None else "PEagleDraftModel"
    config = _speculators(architecture, head, export, target_info, tokens)
    config |= {} if shape.mask is None else {"mask_token_id": shape.mask}
    config |= {
        "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers or target_info.aux_layers),
        "embed_requires_grad": False,
        **{name: getattr(shape, name) for name in flags},
    }
    return config, _with_embeddings(head, target_info)


def _block(head: Head, export: HeadExport, target_info: TargetInfo, tokens: int) -> ConfigTensors:
    shape: BlockShape = head.shape
    architecture = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}[shape.kind]
    config = _speculators(architecture, head, export, target_info, tokens)
    config |= {
        "aux_hidden_state_layer_ids": list(shape.aux_layers or target_info.aux_layers),
        "block_size": shape.block,
        "mask_token_id": shape.mask,
        "sample_from_anchor": shape.from_anchor,
        "sliding_window_non_causal": any(shape.layers.windows) and not any(shape.causal),
    }
    if shape.kind == "dspark":
        config |= {"markov_rank": shape.markov_rank, "markov_head_type": shape.markov}
        config |= {"enable_confidence_head": shape.confidence, "confidence_head_with_markov": shape.confidence_markov}
    tensors = _with_embeddings(head, target_info)
    mask = tensors.pop(MASK_EMBEDDING.removeprefix("model."), None)
    if mask is not None:
        tensors[EMBEDDING] = tensors[EMBEDDING].clone()
        tensors[EMBEDDING][shape.mask] = mask.flatten()
    return config, tensors


def _speculators(
    architecture: str, head: Head, export: HeadExport, target_info: TargetInfo, tokens: int
) -> dict[str, Any]:
    kind, draft_ids = head.shape.kind, head.draft_ids
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_info.model, "architectures": [_class_of(target_info)]},
        },
        "transformer_layer_config": _layers(head, export.config, target_info),
        "draft_vocab_size": target_info.config.vocabulary if draft_ids is None else len(draft_ids),
        "target_hidden_size": head.shape.target_width,
        "tie_word_embeddings": False,
    }


def _class_of(target_info: TargetInfo) -> str:
    """Return the class name of the target in transformers."""
    return ARCHITECTURES.get(target_info.config.architecture, ARCHITECTURES["llama"]).class_name


def _layers(head: Head, config: Mapping[str, Any], target_info: TargetInfo) -> dict[str, Any]:
    shape = head.shape.layers
    found = {key: config[key] for key in LAYER_KEYS if config.get(key) is not None}
    found |= _rope_keys({**config, **classic_rope(dict(config))})
    return found | {
        "model_type": "qwen3" if shape.head_norms else "llama",
        "num_hidden_layers": shape.layers,
        "head_dim": shape.head_dim,
        "attention_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "use_sliding_window": any(shape.windows),
        "max_position_embeddings": config.get("max_position_embeddings") or target_info.config.context,
        "vocab_size": target_info.config.vocabulary,
        "tie_word_embeddings": False,
    }


def _rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope under the keys of current and of older transformers versions."""
    theta, scaling = config.get("rope_theta", 10_000.0), config.get("rope_scaling") or {}
    part = {"partial_rotary_factor": config["partial_rotary_factor"]} if config.get("partial_rotary_factor") else {}
    older = {"rope_theta": theta, **part} | ({"rope_scaling": scaling} if scaling else {})
    return older | {"rope_parameters": {"rope_type": "default", **scaling, "rope_theta": theta, **part}}


def _with_embeddings(head: Head, target_info: TargetInfo) -> dict[str, Tensor]:
    """Return the tensors without a prefix, with embedding, lm_head and the maps between the vocabularies."""
    ids = head.draft_ids
    tensors = {EMBEDDING: target_info.embedding.cpu(), HEAD: _rows(target_info, ids)} | _without_prefix(head)
    if ids is not None:
        known = torch.zeros(target_info.config.vocabulary, dtype=torch.bool)
        known[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    return tensors


def _rows(target_info: TargetInfo, ids: Tensor | None) -> Tensor:
    """Return the rows of the target's lm_head for the draft vocabulary [U, E]."""
    return target_info.lm_head.cpu() if ids is None else target_info.lm_head.cpu()[ids]


def _without_prefix(head: Head) -> dict[str, Tensor]:
    found = {name.removeprefix("model."): tensor for name, tensor in head.tensors.items()}
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def _medusa(head: Head, export: HeadExport, target_info: TargetInfo, tokens: int) -> ConfigTensors:
    shape, ids = head.shape, head.draft_ids
    tensors = _without_prefix(head)
    if not shape.lm_heads:
        tensors[HEAD] = _rows(target_info, ids)
    if ids is not None:
        tensors["token_map"] = ids
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": shape.width,
        "num_heads": shape.heads,
        "num_hidden_layers": shape.blocks,
        "num_lookahead_tokens": shape.heads,
        "vocab_size": target_info.config.vocabulary,
        "truncated_vocab_size": target_info.config.vocabulary if ids is None else len(ids),
        "medusa_fc_bias": shape.block_bias,
        "original_lm_head": HEAD in tensors,
        "logit_scale": shape.logit_scale,
    }, tensors


def _mtp(head: Head, export: HeadExport, target_info: TargetInfo, tokens: int) -> ConfigTensors:
    if head.shape.layout != "Qwen":
        raise UserError(
            f"modules in the layout of {head.shape.layout} are not exported: use the one in Outrider's layout"
        )
    return dict(export.config), export.tensors


def _eagle(head: Head, export: HeadExport, target_info: TargetInfo, tokens: int) -> ConfigTensors:
    """Return the head as published: vLLM puts `Eagle` before the class of its layer."""
    return dict(export.config) | {"architectures": ["LlamaForCausalLM"]}, export.tensors


FORMS = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "peagle": _eagle3,
    "dflash": _block,
    "dspark": _block,
    "medusa": _medusa,
    "mtp": _mtp,
}
