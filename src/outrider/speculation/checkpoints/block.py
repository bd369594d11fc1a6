"""Read DFlash and DSpark heads as z-lab, speculators, transformers (assistants), SpecForge and DeepSpec write them.

The layouts differ in where keys are (at the top, or in `dflash_config`) and in what a layer id means.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from ...errors import UserError
from ...models.block_head import CONFIDENCE, MARKOV, MASK_EMBEDDING, BlockShape, evenly_spaced_layers
from ...models.config import ConfigFields
from .common import FC, NORM, QUERY, decoder, ends, fused_states, layer_count, whole_numbers
from .folder import Folder

ENTERING = "aux_hidden_state_layer_ids"  # layers whose input states are read
LEAVING = (
    "target_layer_ids",
    "layer_ids",
    "dspark_target_layer_ids",
    "dflash_target_layer_ids",
)  # layers whose output states are read
RANK = ("markov_rank", "dspark_markov_rank")
LAYERS = "num_target_layers"
SLIDING = "sliding_attention"
# Similar heads that are not supported, by a part of a tensor name that only they have.
OTHERS = {
    "candidate_selector": "DFlash2",
    "attention_conv": "DFlash2",
    "mlp_conv": "DFlash2",
    "prefix_gru": "Domino",
    "attention_sink_bias": "DFlash with attention sinks",
}


def read_dflash(folder: Folder) -> BlockShape | None:
    """Read a DFlash head; None if the folder holds another kind."""
    return None if not is_block(folder) or is_dspark(folder) else read(folder, "dflash")


def read_dspark(folder: Folder) -> BlockShape | None:
    """Read a DSpark head; None if the folder holds another kind."""
    return read(folder, "dspark") if is_block(folder) and is_dspark(folder) else None


def is_block(folder: Folder) -> bool:
    """Recognize a block head: `fc` and a norm over the aux hidden states, then layers of the head's width."""
    width, tensors = folder.config.get("hidden_size"), folder.tensors
    return {QUERY, FC, NORM} <= tensors.keys() and folder.columns(QUERY) == width


def is_dspark(folder: Folder) -> bool:
    """Recognize DSpark: tensors of a Markov or confidence head, or keys for them (also with rank 0)."""
    parts = any(name.startswith((MARKOV, CONFIDENCE)) for name in folder.tensors)
    return parts or stated(folder, *RANK, "dspark_block_size") is not None


def read(folder: Folder, kind: str) -> BlockShape:
    """Read the shape of a block head from keys and tensors."""
    refuse_others(folder)
    config = with_windows(folder)
    width, speculators = int(config["hidden_size"]), is_speculators(folder)
    target_width = folder.count("target_hidden_size", width)
    count = fused_states(folder, target_width, "a DFlash")
    named = aux_layers(folder, count)
    layers = decoder(replace(folder, config=config), kind)
    markov = folder.tensors.get(MARKOV + "markov_w1.weight")
    rank = number(folder, *RANK) if stated(folder, *RANK) else 0
    sure = folder.tensors.get(CONFIDENCE + "weight")
    shape = BlockShape(
        kind=kind,
        layout=layout(folder),
        **ends(folder, width),
        layers=layers,
        aux_layers=named,
        num_aux_layers=count,
        target_layers=None if stated(folder, LAYERS) is None else number(folder, LAYERS),
        target_width=target_width,
        target_norm=False,
        causal=causal(folder, config, layers.layers),
        anchored=speculators,
        block=number(folder, "block_size", "dspark_block_size"),
        mask=mask(folder),
        from_anchor=bool(value if (value := stated(folder, "sample_from_anchor")) is not None else kind == "dspark"),
        spread_aux_layers=named is None and not speculators,
        mask_embedding=MASK_EMBEDDING in folder.tensors,
        # Other layouts call the target's embedding module, which may scale; speculators copies only the table.
        scaled_embedding=not speculators,
        markov=markov_kind(folder),
        markov_rank=rank if markov is None else markov.shape[-1],
        markov_tokens=0 if markov is None else markov.shape[0],
        confidence=sure is not None,
        confidence_markov=sure is not None and sure.shape[-1] > width,
    )
    if shape.drafts < 1:
        raise UserError(
            f"`{folder.path}` says `block_size` is {shape.block}, which leaves no tokens to draft: "
            "take it from the original checkpoint"
        )
    return shape


def stated(folder: Folder, *names: str) -> Any:
    """Return the first of these keys that is set, at the top or in `dflash_config`, else None."""
    inner = folder.config.get("dflash_config") or {}
    if not isinstance(inner, dict):
        raise UserError(f"`{folder.path}` says `dflash_config` is {inner!r}: expected keys and values")
    values = (config.get(name) for name in names for config in (folder.config, inner))
    return next((value for value in values if value is not None), None)


def number(folder: Folder, *names: str) -> int:
    """Return a required positive count from the first of these keys that is set."""
    value = stated(folder, *names)
    if value is None:
        raise UserError(
            f"the config.json of `{folder.path}` states no `{names[0]}`: take it from the original checkpoint"
        )
    return ConfigFields({names[0]: value}, {}).count(names[0])


def mask(folder: Folder) -> int:
    """Return the mask token, which may be token 0."""
    value = stated(folder, "mask_token_id", "dspark_noise_token_id")
    if type(value) is not int or value < 0:
        raise UserError(
            f"the config.json of `{folder.path}` says `mask_token_id` is {value}, and a block head needs a mask "
            "token: take it from the original checkpoint"
        )
    return value


def aux_layers(folder: Folder, count: int) -> tuple[int, ...] | None:
    """Return the layers whose input states the head reads; None if the checkpoint does not determine them."""
    if (entering := stated(folder, ENTERING)) is not None:
        return whole_numbers(folder, ENTERING, entering)
    for name in LEAVING:
        if (leaving := stated(folder, name)) is not None:
            return tuple(layer + 1 for layer in whole_numbers(folder, name, leaving))
    derived = stated(folder, LAYERS) is not None and not is_speculators(folder)
    return evenly_spaced_layers(count, number(folder, LAYERS)) if derived else None


def with_windows(folder: Folder) -> dict[str, Any]:
    """Return the configuration with effective `layer_types` and `sliding_window`, and one rope for all layers."""
    config = dict(folder.config)
    if (size := stated(folder, "swa_window_size")) is not None:
        config["sliding_window"] = size
    kinds = config.get("layer_types") or []
    if stated(folder, "use_swa") and isinstance(kinds, list) and SLIDING not in kinds:
        config["layer_types"] = [SLIDING] * layer_count(folder)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and SLIDING in rope:
        config["rope_parameters"] = rope[SLIDING]
    return config


def causal(folder: Folder, config: dict[str, Any], count: int) -> tuple[bool, ...]:
    """Return for each layer whether its attention is causal.

    A flag applies to all layers. Without one, sliding layers of the checkpoint are causal, except in assistants.
    """
    flag = stated(folder, "is_causal", "causal")
    if flag is not None and not is_speculators(folder):
        return (bool(flag),) * count
    if layout(folder) == "assistant" or stated(folder, "sliding_window_non_causal"):
        return (False,) * count
    kinds = folder.config.get("layer_types") or [""] * count
    return tuple(kind == SLIDING for kind in kinds)


def markov_kind(folder: Folder) -> Literal["vanilla", "gated", "rnn"]:
    """Return the kind of the Markov head, from `markov_head_type` or else from its tensors."""
    kind = stated(folder, "markov_head_type")
    if kind in ("vanilla", "gated", "rnn"):
        return kind  # type: ignore[no-any-return]
    if kind is not None:
        raise UserError(f"`{folder.path}` says `markov_head_type` is {kind!r}: expected vanilla, gated or rnn")
    parts: dict[str, Literal["gated", "rnn"]] = {"gate_proj": "gated", "joint_proj": "rnn"}
    return next((kind for part, kind in parts.items() if f"{MARKOV}{part}.weight" in folder.tensors), "vanilla")


def refuse_others(folder: Folder) -> None:
    """Refuse similar heads that are not supported."""
    for name in sorted(folder.tensors):
        other = next((called for part, called in OTHERS.items() if part in name), None)
        if other is not None:
            raise UserError(
                f"`{folder.path}` is a head of {other} (it has the tensor `{name.removeprefix('model.')}`), which is "
                "not supported: take a DFlash or DSpark head"
            )


def is_speculators(folder: Folder) -> bool:
    return folder.config.get("speculators_model_type") is not None


def layout(folder: Folder) -> str:
    """Name the project that writes this layout, for reports."""
    if is_speculators(folder):
        return "speculators"
    if folder.config.get("dflash_config"):
        return "SpecForge" if stated(folder, "projector_type") == "dspark" else "z-lab"
    return "DeepSpec" if is_dspark(folder) else "assistant"
