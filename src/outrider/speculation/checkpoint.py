"""Draft heads on disk: whoever wrote the folder, one configuration and one set of tensor names come out.

Names are those of a decoder (`model.layers.0...`, `model.norm.weight`, `lm_head.weight`), with `model.fc.weight`,
`model.input_norm.weight` and `model.fc_norm.I.weight` beside them. What a head is, its keys and tensors say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels import Weight
from ..models import Model, ModelConfig, read_config
from ..models.config import Fields, positive
from ..models.heads import HeadConfig
from ..types import UserError
from .head_folder import Folder, find_folder, open_folder

KINDS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
LAYER = re.compile(r"model\.layers\.(\d+)\.")
QUERY = "model.layers.0.self_attn.q_proj.weight"
FC = "model.fc.weight"
METHODS = {"eagle": "EAGLE-1", "eagle3": "EAGLE-3"}


@dataclass(frozen=True)
class Head:
    """A draft head: what it is, and its tensors. It serves as a checkpoint to whoever builds it."""

    path: Path
    shape: HeadConfig
    config: dict[str, object]  # config.json, the layers' part merged in
    tensors: Mapping[str, Tensor]
    draft_ids: Tensor | None  # [draft vocabulary] int64: the target's ids of the tokens that it can draft; None: all
    norms_are_offset: bool = False

    def names(self) -> Iterable[str]:
        return self.tensors

    def weight(self, name: str) -> Weight:
        tensor = self.tensors[name]
        return Weight(KINDS[tensor.dtype], tuple(tensor.shape), tensor)

    def release(self) -> None:
        return


def open_head(source: str, target: ModelConfig | None = None, method: str | None = None) -> Head:
    """The head in a folder, or of that name on the hub, refused where it cannot draft for `target` by `method`."""
    path = find_folder(source)
    folder = open_folder(path)
    shape = next((found for read in READERS if (found := read(folder)) is not None), None)
    if shape is None:
        raise UserError(_stranger(folder))
    if method is not None and shape.kind != method:
        raise UserError(
            f"`{path}` is a head of the method `{shape.kind}` ({METHODS[shape.kind]}): "
            f"pass `{shape.kind}` instead of `{method}`"
        )
    tensors = {name: tensor for name, tensor in folder.tensors.items() if name != "d2t"}
    for name, tensor in tensors.items():
        if tensor.dtype not in KINDS:
            raise UserError(
                f"`{path}` stores the tensor `{name}` as {tensor.dtype}: expected {', '.join(KINDS.values())}"
            )
    ids = _draft_ids(folder, target)
    rows = None if ids is None else len(ids)
    head = Head(path, replace(shape, draft_vocabulary=rows), folder.config, tensors, ids)
    if target is not None:
        _check(head, target)
    return head


def choose_taps(head: Head, target: Model, chosen: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The states of the target to read: what the user chose, else what the checkpoint says, else the model's own."""
    layers, count = target.config.layers, head.shape.tap_count
    if head.shape.target_norm:
        return (layers,)
    taps = chosen or head.shape.taps or target.default_taps()
    said = "`taps`" if chosen else f"`{head.path}`" if head.shape.taps else "the model's default"
    if len(taps) != count:
        raise UserError(
            f"`{head.path}` reads {count} states a token, but {said} names {len(taps)}: pass {count} layers as `taps`"
        )
    beyond = [tap for tap in taps if not 0 <= tap <= layers]
    if beyond:
        raise UserError(
            f"{said} names the state entering layer {beyond[0]}, but the target has {layers} layers: "
            "take the head that was made for this model"
        )
    return taps


def _read_eagle3(folder: Folder) -> HeadConfig | None:
    """Token and state side by side in the first attention, each with a norm of its own."""
    width = folder.config.get("hidden_size")
    if QUERY not in folder.tensors or "mask_hidden" in folder.tensors or not isinstance(width, int):
        return None
    if folder.columns(QUERY) != 2 * width:
        return None
    last = not folder.flag("use_aux_hidden_state", True)  # the target's last state stands in for the tapped ones
    before, each = "model.input_norm.weight" in folder.tensors, "model.fc_norm.0.weight" in folder.tensors
    shape = replace(
        _shape(folder, "eagle3"),
        joins="inside",
        taps=_taps(folder),
        tap_count=1 if last else _tap_count(folder, width),
        target_width=folder.count("target_hidden_size", width),
        target_norm=last,
        fc=not last,
        norm_before_fc=folder.flag("norm_before_fc", before),
        fc_norm=folder.flag("fc_norm", each),
        norm_before_residual=folder.flag(
            "norm_before_residual", folder.config.get("speculators_model_type") == "eagle3"
        ),
        norm_last=True,
        norm_output=folder.flag("norm_output", False),
    )
    if shape.norm_before_fc and shape.fc_norm:
        raise UserError(f"`{folder.path}` asks for `norm_before_fc` and `fc_norm`: a head has one of them")
    return shape


def _tap_count(folder: Folder, width: int) -> int:
    if FC not in folder.tensors:
        raise UserError(f"`{folder.path}` lacks the tensor `fc.weight` of an EAGLE-3 head: fetch it again")
    target_width = folder.count("target_hidden_size", width)
    count, rest = divmod(folder.columns(FC), target_width)
    if rest or not count:
        raise UserError(
            f"`fc.weight` of `{folder.path}` reads {folder.columns(FC)} floats, no multiple of the target's width "
            f"{target_width}: state `target_hidden_size` in its config.json"
        )
    return count


def _read_eagle(folder: Folder) -> HeadConfig | None:
    """Token and state through a matrix, then layers as in a decoder."""
    width = folder.config.get("hidden_size")
    if not {QUERY, FC} <= folder.tensors.keys() or "mask_hidden" in folder.tensors:
        return None
    if folder.columns(QUERY) != width or folder.columns(FC) != 2 * width:
        return None
    return replace(
        _shape(folder, "eagle"),
        norm_first="model.layers.0.input_layernorm.weight" in folder.tensors,
        norm_last="model.norm.weight" in folder.tensors,
    )


# Which reader knows a folder, the folder alone decides; each looks at tensors and keys, none at names of classes.
READERS: tuple[Callable[[Folder], HeadConfig | None], ...] = (_read_eagle3, _read_eagle)


def _shape(folder: Folder, kind: str) -> HeadConfig:
    """What every kind has; the rest as in EAGLE-1."""
    layers = replace(_layers(folder), architecture=kind)
    embedding = folder.tensors.get("model.embed_tokens.weight")
    scale = folder.stated("logit_scale")
    return HeadConfig(
        kind=kind,
        layers=layers,
        joins="before",
        taps=None,
        tap_count=1,
        target_width=layers.width,
        target_norm=True,
        fc=True,
        fc_bias="model.fc.bias" in folder.tensors,
        norm_before_fc=False,
        fc_norm=False,
        norm_before_residual=False,
        norm_first=False,
        norm_last=False,
        norm_output=False,
        draft_vocabulary=None,
        own_embedding=0 if embedding is None else embedding.shape[0],
        own_head="lm_head.weight" in folder.tensors,
        logit_scale=1.0 if scale is None else positive(scale, "logit_scale"),
    )


def _layers(folder: Folder) -> ModelConfig:
    """The layers, read as Llama's; biases and head norms are where their tensors are."""
    tensors, first = folder.tensors, "model.layers.0."
    count = 1 + max(int(found[1]) for name in tensors if (found := LAYER.match(name)))
    config = {"max_position_embeddings": 1, "vocab_size": 1} | folder.config
    config |= {"model_type": "llama", "num_hidden_layers": count, "tie_word_embeddings": False}
    heads = config.get("num_attention_heads")
    if config.get("head_dim") is None and isinstance(heads, int) and heads > 0:
        config["head_dim"] = tensors[QUERY].shape[0] // heads
    layers = read_config(config)
    # Checked before anyone makes tables of that size.
    if layers.heads * layers.head_dim != tensors[QUERY].shape[0]:
        raise UserError(
            f"the queries of `{folder.path}` have {tensors[QUERY].shape[0]} rows, but its configuration says "
            f"{layers.heads} heads of {layers.head_dim}: config and weights are not of the same head"
        )
    return replace(
        layers,
        windows=_windows(config, count),
        head_norms=first + "self_attn.q_norm.weight" in tensors,
        qkv_bias=first + "self_attn.q_proj.bias" in tensors,
        output_bias=first + "self_attn.o_proj.bias" in tensors,
        mlp_bias=first + "mlp.gate_proj.bias" in tensors,
    )


def _windows(config: Mapping[str, Any], count: int) -> tuple[int, ...]:
    kinds = config.get("layer_types") or ["full_attention"] * count
    if not isinstance(kinds, list) or len(kinds) != count:
        raise UserError(f"the head's configuration says `layer_types` is {kinds}, but it has {count} layers")
    fields = Fields(config, {})
    return tuple(fields.count("sliding_window") if kind == "sliding_attention" else 0 for kind in kinds)


def _taps(folder: Folder) -> tuple[int, ...] | None:
    """Ids at the top are of states entering a layer, ids in `eagle_config` of states leaving one."""
    name = "eagle_aux_hidden_state_layer_ids"
    entering = folder.config.get(name)
    leaving = (folder.config.get("eagle_config") or {}).get(name)
    ids = entering or leaving
    if not ids:
        return None
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise UserError(f"`{folder.path}` says `{name}` is {ids}: expected a list of layers")
    return tuple(ids) if entering else tuple(each + 1 for each in ids)


def _draft_ids(folder: Folder, target: ModelConfig | None) -> Tensor | None:
    """d2t holds offsets: token j of the draft vocabulary is the target's token j + d2t[j]."""
    if "d2t" not in folder.tensors:
        return None
    offsets = folder.tensors["d2t"].to(torch.int64).flatten()
    ids = torch.arange(len(offsets)) + offsets  # [U]
    vocabulary = target.vocabulary if target is not None else folder.count("vocab_size", len(offsets))
    if not len(ids) or bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocabulary:
        raise UserError(
            f"`d2t` of `{folder.path}` does not map its {len(ids)} tokens to rising ids below {vocabulary}: "
            "it is damaged, or the head is for a model with another vocabulary"
        )
    return None if len(ids) == vocabulary else ids


def _check(head: Head, target: ModelConfig) -> None:
    """Refuse a head whose sizes do not fit the target."""
    shape, path = head.shape, head.path
    if shape.target_width != target.width:
        raise UserError(
            f"`{path}` reads states of width {shape.target_width}, but the target's have {target.width}: "
            "take the head that was made for this model"
        )
    if shape.target_norm and shape.layers.width != target.width:
        raise UserError(
            f"`{path}` is {shape.layers.width} wide, but the states that it takes as they are {target.width}"
        )
    for part, own in (("embed_tokens", shape.own_embedding), ("lm_head", shape.own_head)):
        if not own and shape.layers.width != target.width:
            raise UserError(
                f"`{path}` is {shape.layers.width} wide and lacks the tensor `{part}.weight`; the target's is "
                f"{target.width} wide: take a checkpoint that holds its own"
            )
    if shape.own_embedding and shape.own_embedding < target.vocabulary:
        raise UserError(
            f"the embedding of `{path}` has {shape.own_embedding} tokens, but the target has {target.vocabulary}: "
            "take the head that was made for this model"
        )
    rows = head.tensors["lm_head.weight"].shape[0] if shape.own_head else None
    if rows is not None and rows != (shape.draft_vocabulary or target.vocabulary):
        expected = shape.draft_vocabulary or target.vocabulary
        raise UserError(
            f"`lm_head.weight` of `{path}` has {rows} rows, but {expected} tokens to draft: "
            "`d2t` is missing, or the head is for another model"
        )


def _stranger(folder: Folder) -> str:
    if not isinstance(folder.config.get("hidden_size"), int):
        return f"the config.json of `{folder.path}` states no `hidden_size`: take it from the original checkpoint"
    if "mask_hidden" in folder.tensors:
        return f"`{folder.path}` drafts in parallel (`mask_hidden`): take an EAGLE-1 or EAGLE-3 head without it"
    if QUERY in folder.tensors and FC not in folder.tensors:
        return f"`{folder.path}` is a model of its own, no draft head: pass it to the method `draft_model`"
    return (
        f"`{folder.path}` is no EAGLE head: expected `fc.weight`, and `layers.0` or `midlayer` with projections that "
        "read the width (EAGLE-1) or twice the width (EAGLE-3) of its configuration"
    )
