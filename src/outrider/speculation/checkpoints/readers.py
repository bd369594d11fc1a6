"""Read the shape of a draft head of each kind: EAGLE, MTP, Medusa, DFlash and DSpark.

A reader recognizes its kind by tensors and keys of the folder, never by class names; it returns None for other kinds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...errors import UserError
from ...models import ModelConfig, read_config
from ...models.architectures import ARCHITECTURES, Architecture
from ...models.block_head import CONFIDENCE, MARKOV, MASK_EMBEDDING, BlockShape, evenly_spaced_layers
from ...models.config import MAX_LAYERS
from ...models.fields import ConfigFields, positive
from ...models.heads import EagleShape, MedusaShape, ModuleShape
from .folder import PICKLED, Folder

LAYER = re.compile(r"model\.layers\.(\d+)\.")
QUERY = "model.layers.0.self_attn.q_proj.weight"
FC = "model.fc.weight"
TARGET_LAYERS = "num_target_layers"
NORM = "model.hidden_norm.weight"  # only in heads that read the aux hidden states as context


def ends(folder: Folder, width: int, under: str = "") -> dict[str, Any]:
    """Return the HeadShape fields of embedding and head matrix: the head's own if their tensors exist.

    Flags of the configuration are ignored. under: prefix of both names; default: the names of a decoder.
    """
    embedding = folder.tensors.get(f"{under or 'model.'}embed_tokens.weight")
    return {
        "width": width,
        "own_embedding": 0 if embedding is None else embedding.shape[0],
        "own_head": f"{under}lm_head.weight" in folder.tensors,
        "logit_scale": logit_scale(folder),
    }


def logit_scale(folder: Folder) -> float:
    """Return the factor of the logits, 1 by default."""
    scale = folder.stated("logit_scale")
    return 1.0 if scale is None else positive(scale, "logit_scale")


def layer_count(folder: Folder) -> int:
    """Count the layers by the names of the tensors."""
    last = max(int(found[1]) for name in folder.tensors if (found := LAYER.match(name)))
    return ConfigFields({"num_hidden_layers": last + 1}, {}).count("num_hidden_layers", most=MAX_LAYERS)


def decoder(folder: Folder, kind: str, model_type: str = "llama") -> ModelConfig:
    """Read the layers as those of an architecture; they have biases, norms, gates and experts if the tensors exist."""
    tensors, first = folder.tensors, "model.layers.0."
    count = layer_count(folder)
    config = {"max_position_embeddings": 1, "vocab_size": 1} | folder.config
    config |= {"model_type": model_type, "num_hidden_layers": count, "tie_word_embeddings": False}
    heads = config.get("num_attention_heads")
    if config.get("head_dim") is None and isinstance(heads, int) and heads > 0:
        config["head_dim"] = tensors[QUERY].shape[0] // heads
    layers = read_config(config)
    # Checked before rope tables of that size are allocated.
    rows, queries = tensors[QUERY].shape[0], layers.heads * layers.head_dim
    gated = layers.gated_attention and rows == 2 * queries
    if rows != queries and not gated:
        raise UserError(
            f"the queries of `{folder.path}` have {rows} rows, but its configuration says "
            f"{layers.heads} heads of {layers.head_dim}: config and weights are not of the same head"
        )
    return replace(
        layers,
        architecture=kind,
        gated_attention=gated,
        recurrent=None,
        experts=layers.experts if first + "mlp.gate.weight" in tensors else None,
        windows=windows(config, count),
        head_norms=first + "self_attn.q_norm.weight" in tensors,
        qkv_bias=first + "self_attn.q_proj.bias" in tensors,
        output_bias=first + "self_attn.o_proj.bias" in tensors,
        mlp_bias=first + "mlp.gate_proj.bias" in tensors,
    )


def windows(config: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Return the attention window of each layer in tokens; 0: full attention."""
    kinds = config.get("layer_types") or ["full_attention"] * count
    if not isinstance(kinds, list) or len(kinds) != count:
        raise UserError(
            f"the head's configuration says `layer_types` is {kinds}, but it has {count} layers: "
            "config and weights are not of the same head"
        )
    fields = ConfigFields(config, {})
    return tuple(fields.count("sliding_window") if kind == "sliding_attention" else 0 for kind in kinds)


def whole_numbers(folder: Folder, name: str, value: Any) -> tuple[int, ...]:
    """Check that a value of the configuration is a list of layers."""
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):
        raise UserError(f"`{folder.path}` says `{name}` is {value}: expected a list of layers")
    return tuple(value)


def fused_states(folder: Folder, target_width: int, called: str) -> int:
    """Return the number of aux hidden states that `fc.weight` reads side by side."""
    if FC not in folder.tensors:
        raise UserError(f"`{folder.path}` lacks the tensor `fc.weight` of {called} head: fetch it again")
    count, rest = divmod(folder.columns(FC), target_width)
    if rest or not count:
        raise UserError(
            f"`fc.weight` of `{folder.path}` reads {folder.columns(FC)} floats, no multiple of the target's width "
            f"{target_width}: state `target_hidden_size` in its config.json"
        )
    return count


# ---- EAGLE-1, EAGLE-3 and P-EAGLE, as SafeAILab, SpecForge, AngelSlim, NVIDIA and speculators write them ----

EAGLE_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
PEAGLE_MASKS = ("ptd_token_id", "pard_token", "mask_token_id")  # keys of the mask token; the first that is set counts
MASK_STATE = "mask_hidden"


def read_eagle3(folder: Folder) -> EagleShape | None:
    """Read an EAGLE-3 head; None if the folder holds another kind."""
    return None if is_parallel(folder) else joined_inside(folder, "eagle3")


def read_peagle(folder: Folder) -> EagleShape | None:
    """Read a P-EAGLE head: EAGLE-3 with mask tokens and a learned state where the target has none yet."""
    return joined_inside(folder, "peagle") if is_parallel(folder) else None


def is_parallel(folder: Folder) -> bool:
    return MASK_STATE in folder.tensors or folder.config.get("speculators_model_type") == "peagle"


def joined_inside(folder: Folder, kind: str) -> EagleShape | None:
    """Read a head whose first attention takes token and state side by side, each with its own norm."""
    width = folder.config.get("hidden_size")
    if QUERY not in folder.tensors or folder.modules is not None or not isinstance(width, int):
        return None
    if folder.columns(QUERY) != 2 * width:
        return None
    last = not folder.flag("use_aux_hidden_state", True)  # read the target's last state instead of aux hidden states
    before, per_layer = "model.input_norm.weight" in folder.tensors, "model.fc_norm.0.weight" in folder.tensors
    target_width = folder.count("target_hidden_size", width)
    shape = EagleShape(
        kind=kind,
        layout=eagle_layout(folder),
        **ends(folder, width),
        layers=decoder(folder, kind),
        joins="inside",
        aux_layers=eagle_aux_layers(folder),
        num_aux_layers=1
        if last
        else fused_states(folder, target_width, "a P-EAGLE" if kind == "peagle" else "an EAGLE-3"),
        target_layers=None if folder.stated(TARGET_LAYERS) is None else folder.count(TARGET_LAYERS, 0),
        target_width=target_width,
        target_norm=last,
        fc=not last,
        fc_bias="model.fc.bias" in folder.tensors,
        norm_before_fc=folder.flag("norm_before_fc", before),
        fc_norm=folder.flag("fc_norm", per_layer),
        norm_before_residual=folder.flag(
            "norm_before_residual", folder.config.get("speculators_model_type") == "eagle3"
        ),
        norm_last=True,
        norm_output=folder.flag("norm_output", False),
        mask=peagle_mask(folder) if kind == "peagle" else None,
    )
    if shape.norm_before_fc and shape.fc_norm:
        raise UserError(
            f"`{folder.path}` asks for `norm_before_fc` and `fc_norm`: state one of them in its config.json"
        )
    if shape.mask is not None:
        check_mask_state(folder, shape)
    return shape


def peagle_mask(folder: Folder) -> int:
    """Return the mask token."""
    token = next((folder.stated(name) for name in PEAGLE_MASKS if folder.stated(name) is not None), None)
    if type(token) is not int or token < 0:
        raise UserError(
            f"`{folder.path}` drafts over mask tokens and says that theirs is {token}: state `mask_token_id` in its "
            "config.json"
        )
    return token


def check_mask_state(folder: Folder, shape: EagleShape) -> None:
    """Refuse a P-EAGLE head whose mask state is missing or has the wrong size."""
    if MASK_STATE not in folder.tensors:
        raise UserError(f"`{folder.path}` lacks the tensor `{MASK_STATE}` of a P-EAGLE head: fetch it again")
    floats, wanted = folder.tensors[MASK_STATE].numel(), shape.num_aux_layers * shape.target_width
    if floats != wanted:
        raise UserError(
            f"`{MASK_STATE}` of `{folder.path}` has {floats} floats, but the head reads {wanted} beside each token: "
            "config and weights are not of the same head"
        )


def read_eagle(folder: Folder) -> EagleShape | None:
    """Read an EAGLE-1 head: one matrix joins token and state, then decoder layers."""
    width = folder.config.get("hidden_size")
    if not {QUERY, FC} <= folder.tensors.keys() or MASK_STATE in folder.tensors or not isinstance(width, int):
        return None
    if folder.columns(QUERY) != width or folder.columns(FC) != 2 * width or NORM in folder.tensors:
        return None
    return EagleShape(
        kind="eagle",
        layout=eagle_layout(folder),
        **ends(folder, width),
        layers=decoder(folder, "eagle"),
        joins="before",
        aux_layers=None,
        num_aux_layers=1,
        target_width=width,
        target_norm=True,
        fc=True,
        fc_bias="model.fc.bias" in folder.tensors,
        norm_first="model.layers.0.input_layernorm.weight" in folder.tensors,
        norm_last="model.norm.weight" in folder.tensors,
    )


def eagle_aux_layers(folder: Folder) -> tuple[int, ...] | None:
    """Return the layers whose input states are read: ids at the top name inputs, ids in `eagle_config` outputs."""
    entering = folder.config.get(EAGLE_LAYER_IDS)
    leaving = (folder.config.get("eagle_config") or {}).get(EAGLE_LAYER_IDS)
    if entering:
        return whole_numbers(folder, EAGLE_LAYER_IDS, entering)
    return tuple(layer + 1 for layer in whole_numbers(folder, EAGLE_LAYER_IDS, leaving)) if leaving else None


def eagle_layout(folder: Folder) -> str:
    """Name the project that writes this layout, for reports."""
    classes = str(folder.config.get("architectures"))
    if folder.config.get("speculators_model_type"):
        return "speculators"
    if folder.config.get("eagle_config"):
        return "SpecForge or NVIDIA"
    if "Eagle3LlamaForCausalLM" in classes:
        return "AngelSlim"
    return "SafeAILab" if (folder.path / PICKLED).is_file() else "SpecForge"


# ---- multi-token prediction: modules of DeepSeek, Qwen3-Next, MiMo and speculators ----

JOINT = "model.modules.0.fc.weight"
OFFSET_NORMS = re.compile(r"qwen3_(next|5)")  # model types whose norms are stored minus 1


@dataclass(frozen=True)
class ModuleVariant:
    """Properties of a publisher's modules that names and shapes do not show."""

    state_first: bool  # [state, token]; else [token, state]
    blank_first: bool  # the first entry of a text reads zeros instead of its token


MODULE_VARIANTS = {
    "DeepSeek": ModuleVariant(state_first=False, blank_first=True),
    "Qwen": ModuleVariant(state_first=False, blank_first=False),
    "MiMo": ModuleVariant(state_first=True, blank_first=True),
    "speculators": ModuleVariant(state_first=False, blank_first=False),
}

# Parts of a block that are not supported: pattern of the tensor names, description.
UNSUPPORTED_PARTS = (
    (re.compile(r"\.kv_a_proj|\.kv_b_proj|\.q_a_proj"), "attention over compressed keys (MLA)"),
    (re.compile(r"\.linear_attn\."), "linear attention"),
)
EXPERTS = re.compile(r"\.mlp\.(experts|gate|shared_experts?)\.")


def read_mtp(folder: Folder) -> ModuleShape | None:
    """Read MTP modules: a matrix joins token and state, each through a norm, then a decoder layer."""
    width = folder.config.get("hidden_size")
    if folder.modules is None or not isinstance(width, int):
        return None
    refuse_unsupported_modules(folder)
    # speculators uses the names of MiMo, but computes as Qwen.
    alone = folder.config.get("speculators_model_type") == "mtp"
    naming = "speculators" if alone else folder.modules.naming
    layers = module_layers(folder)
    return ModuleShape(
        kind="mtp",
        layout=naming,
        **ends(folder, width, under="model.modules.0."),
        layers=replace(layers, layers=1),
        joins="before",
        aux_layers=None,
        num_aux_layers=1,
        target_width=width,
        target_norm=True,
        fc=True,
        fc_bias="model.modules.0.fc.bias" in folder.tensors,
        norm_first=True,
        norm_last=True,
        norm_output=True,
        norm_inputs=True,
        state_first=MODULE_VARIANTS[naming].state_first,
        blank_first=MODULE_VARIANTS[naming].blank_first,
        modules=layers.layers,
        offset_norms=not folder.is_gguf and OFFSET_NORMS.match(str(folder.config.get("model_type"))) is not None,
        target_layers=folder.modules.first if naming == "DeepSeek" else None,
    )


def module_layers(folder: Folder) -> ModelConfig:
    """Read the layers of modules: full attention; experts, gates and partial rotary as in the model they belong to."""
    own = own_architecture(folder)
    config = {key: value for key, value in folder.config.items() if key != "layer_types"}
    if own is None:
        return decoder(replace(folder, config=config), "mtp")
    # All modules have what the tensors of the first have, whatever the layers of the model have.
    config |= {"layer_types": ["full_attention"] * layer_count(folder), "mlp_only_layers": [], "decoder_sparse_step": 1}
    return decoder(replace(folder, config={**(own.defaults or {}), **config}), "mtp", str(config["model_type"]))


def own_architecture(folder: Folder) -> Architecture | None:
    """Return the architecture of the model if its modules have more than a Llama layer has: Qwen's with experts."""
    found = ARCHITECTURES.get(str(folder.config.get("model_type")))
    return found if found is not None and found.experts == "sparse" else None


def refuse_unsupported_modules(folder: Folder) -> None:
    """Refuse modules with parts that are not supported."""
    own = own_architecture(folder)
    unsupported = UNSUPPORTED_PARTS if own is not None else (*UNSUPPORTED_PARTS, (EXPERTS, "a mixture of experts"))
    for name in folder.tensors:
        for pattern, called in unsupported:
            if pattern.search(name):
                raise UserError(
                    f"the modules of `{folder.path}` have {called}, which is not supported (`{name}`): "
                    "speculate without them, by `ngram` or `suffix`"
                )
    if folder.config.get("attn_output_gate") and (own is None or not own.gated_attention):
        raise UserError(
            f"the modules of `{folder.path}` gate their attention (`attn_output_gate`), which is not supported: "
            "speculate without them, by `ngram` or `suffix`"
        )
    if QUERY not in folder.tensors or JOINT not in folder.tensors:
        raise UserError(f"the modules of `{folder.path}` lack a block or the matrix before it: fetch them again")


# ---- Medusa, as FasterDecoding and vLLM write it ----

MEDUSA_BLOCK = re.compile(r"model\.blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
MEDUSA_LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")
MEDUSA_SHARED_HEAD = "lm_head.weight"


def read_medusa(folder: Folder) -> MedusaShape | None:
    """Read Medusa heads: each is a few blocks, then a head matrix of its own or a shared one."""
    blocks = [found for name in folder.tensors if (found := MEDUSA_BLOCK.fullmatch(name))]
    ends = sorted(int(found[1]) for name in folder.tensors if (found := MEDUSA_LM_HEAD.fullmatch(name)))
    if not blocks and not ends:
        return None
    heads = count_medusa_heads(folder, {int(found[1]) for found in blocks} or set(ends))
    width = next((folder.columns(name) for name in folder.tensors if name.endswith(".weight")), 0)
    read = read_medusa_heads(folder, heads, ends)
    return MedusaShape(
        kind="medusa",
        layout="vLLM" if folder.config.get("model_type") == "medusa" else "FasterDecoding",
        width=width,
        target_width=width,
        aux_layers=None,
        num_aux_layers=1,
        target_norm=True,
        own_embedding=0,
        own_head=bool(read),
        logit_scale=logit_scale(folder),
        heads=heads,
        blocks=1 + max((int(found[2]) for found in blocks), default=-1),
        block_bias=any(found[3] == "bias" for found in blocks),
        lm_heads=read,
    )


def count_medusa_heads(folder: Folder, numbers: set[int]) -> int:
    """Count the heads by their tensors, since configurations may state a wrong number; refuse gaps in their numbers."""
    missing = next(number for number in range(len(numbers) + 1) if number not in numbers)
    if missing < len(numbers):
        raise UserError(
            f"`{folder.path}` has {len(numbers)} Medusa heads, and none of the number {missing}: fetch it again"
        )
    return len(numbers)


def read_medusa_heads(folder: Folder, heads: int, ends: list[int]) -> tuple[str, ...]:
    """Return the names of the head matrices. If only the first head has one, all share it, as in vLLM."""
    if ends == list(range(heads)) or ends == [0]:
        return tuple(f"lm_heads.{head}.weight" for head in ends)
    if ends:
        missing = min(set(range(heads)) - set(ends), default=heads)
        raise UserError(
            f"`{folder.path}` has {heads} Medusa heads and lacks the tensor `lm_heads.{missing}.weight`: fetch it again"
        )
    return (MEDUSA_SHARED_HEAD,) if MEDUSA_SHARED_HEAD in folder.tensors else ()


# ---- DFlash and DSpark, as z-lab, speculators, transformers (assistants), SpecForge and DeepSpec write them ----
# The layouts differ in where keys are (at the top, or in `dflash_config`) and in what a layer id means.

ENTERING_LAYERS = "aux_hidden_state_layer_ids"  # layers whose input states are read
LEAVING_LAYERS = (
    "target_layer_ids",
    "layer_ids",
    "dspark_target_layer_ids",
    "dflash_target_layer_ids",
)  # layers whose output states are read
MARKOV_RANK = ("markov_rank", "dspark_markov_rank")
SLIDING = "sliding_attention"
# Similar heads that are not supported, by a part of a tensor name that only they have.
OTHER_HEADS = {
    "candidate_selector": "DFlash2",
    "attention_conv": "DFlash2",
    "mlp_conv": "DFlash2",
    "prefix_gru": "Domino",
    "attention_sink_bias": "DFlash with attention sinks",
}


def read_dflash(folder: Folder) -> BlockShape | None:
    """Read a DFlash head; None if the folder holds another kind."""
    return None if not is_block(folder) or is_dspark(folder) else read_block(folder, "dflash")


def read_dspark(folder: Folder) -> BlockShape | None:
    """Read a DSpark head; None if the folder holds another kind."""
    return read_block(folder, "dspark") if is_block(folder) and is_dspark(folder) else None


def is_block(folder: Folder) -> bool:
    """Recognize a block head: `fc` and a norm over the aux hidden states, then layers of the head's width."""
    width, tensors = folder.config.get("hidden_size"), folder.tensors
    return {QUERY, FC, NORM} <= tensors.keys() and folder.columns(QUERY) == width


def is_dspark(folder: Folder) -> bool:
    """Recognize DSpark: tensors of a Markov or confidence head, or keys for them (also with rank 0)."""
    parts = any(name.startswith((MARKOV, CONFIDENCE)) for name in folder.tensors)
    return parts or block_value(folder, *MARKOV_RANK, "dspark_block_size") is not None


def read_block(folder: Folder, kind: str) -> BlockShape:
    """Read the shape of a block head from keys and tensors."""
    refuse_other_heads(folder)
    config = with_windows(folder)
    width, speculators = int(config["hidden_size"]), is_speculators(folder)
    target_width = folder.count("target_hidden_size", width)
    count = fused_states(folder, target_width, "a DFlash")
    named = block_aux_layers(folder, count)
    layers = decoder(replace(folder, config=config), kind)
    markov = folder.tensors.get(MARKOV + "markov_w1.weight")
    rank = block_count(folder, *MARKOV_RANK) if block_value(folder, *MARKOV_RANK) else 0
    sure = folder.tensors.get(CONFIDENCE + "weight")
    shape = BlockShape(
        kind=kind,
        layout=block_layout(folder),
        **ends(folder, width),
        layers=layers,
        aux_layers=named,
        num_aux_layers=count,
        target_layers=None if block_value(folder, TARGET_LAYERS) is None else block_count(folder, TARGET_LAYERS),
        target_width=target_width,
        target_norm=False,
        causal=causal_layers(folder, layers.layers),
        anchored=speculators,
        block=block_count(folder, "block_size", "dspark_block_size"),
        mask=block_mask(folder),
        from_anchor=bool(
            value if (value := block_value(folder, "sample_from_anchor")) is not None else kind == "dspark"
        ),
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


def block_value(folder: Folder, *names: str) -> Any:
    """Return the first of these keys that is set, at the top or in `dflash_config`, else None."""
    inner = folder.config.get("dflash_config") or {}
    if not isinstance(inner, dict):
        raise UserError(f"`{folder.path}` says `dflash_config` is {inner!r}: expected keys and values")
    values = (config.get(name) for name in names for config in (folder.config, inner))
    return next((value for value in values if value is not None), None)


def block_count(folder: Folder, *names: str) -> int:
    """Return a required positive count from the first of these keys that is set."""
    value = block_value(folder, *names)
    if value is None:
        raise UserError(
            f"the config.json of `{folder.path}` states no `{names[0]}`: take it from the original checkpoint"
        )
    return ConfigFields({names[0]: value}, {}).count(names[0])


def block_mask(folder: Folder) -> int:
    """Return the mask token, which may be token 0."""
    value = block_value(folder, "mask_token_id", "dspark_noise_token_id")
    if type(value) is not int or value < 0:
        raise UserError(
            f"the config.json of `{folder.path}` says `mask_token_id` is {value}, and a block head needs a mask "
            "token: take it from the original checkpoint"
        )
    return value


def block_aux_layers(folder: Folder, count: int) -> tuple[int, ...] | None:
    """Return the layers whose input states the head reads; None if the checkpoint does not determine them."""
    if (entering := block_value(folder, ENTERING_LAYERS)) is not None:
        return whole_numbers(folder, ENTERING_LAYERS, entering)
    for name in LEAVING_LAYERS:
        if (leaving := block_value(folder, name)) is not None:
            return tuple(layer + 1 for layer in whole_numbers(folder, name, leaving))
    derived = block_value(folder, TARGET_LAYERS) is not None and not is_speculators(folder)
    return evenly_spaced_layers(count, block_count(folder, TARGET_LAYERS)) if derived else None


def with_windows(folder: Folder) -> dict[str, Any]:
    """Return the configuration with effective `layer_types` and `sliding_window`, and one rope for all layers."""
    config = dict(folder.config)
    if (size := block_value(folder, "swa_window_size")) is not None:
        config["sliding_window"] = size
    kinds = config.get("layer_types") or []
    if block_value(folder, "use_swa") and isinstance(kinds, list) and SLIDING not in kinds:
        config["layer_types"] = [SLIDING] * layer_count(folder)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and SLIDING in rope:
        config["rope_parameters"] = rope[SLIDING]
    return config


def causal_layers(folder: Folder, count: int) -> tuple[bool, ...]:
    """Return for each layer whether its attention is causal.

    A flag applies to all layers. Without one, sliding layers of the checkpoint are causal, except in assistants.
    """
    flag = block_value(folder, "is_causal", "causal")
    if flag is not None and not is_speculators(folder):
        return (bool(flag),) * count
    if block_layout(folder) == "assistant" or block_value(folder, "sliding_window_non_causal"):
        return (False,) * count
    kinds = folder.config.get("layer_types") or [""] * count
    return tuple(kind == SLIDING for kind in kinds)


def markov_kind(folder: Folder) -> Literal["vanilla", "gated", "rnn"]:
    """Return the kind of the Markov head, from `markov_head_type` or else from its tensors."""
    kind = block_value(folder, "markov_head_type")
    if kind in ("vanilla", "gated", "rnn"):
        return kind  # type: ignore[no-any-return]
    if kind is not None:
        raise UserError(f"`{folder.path}` says `markov_head_type` is {kind!r}: expected vanilla, gated or rnn")
    parts: dict[str, Literal["gated", "rnn"]] = {"gate_proj": "gated", "joint_proj": "rnn"}
    return next((kind for part, kind in parts.items() if f"{MARKOV}{part}.weight" in folder.tensors), "vanilla")


def refuse_other_heads(folder: Folder) -> None:
    """Refuse similar heads that are not supported."""
    for name in sorted(folder.tensors):
        other = next((called for part, called in OTHER_HEADS.items() if part in name), None)
        if other is not None:
            raise UserError(
                f"`{folder.path}` is a head of {other} (it has the tensor `{name.removeprefix('model.')}`), which is "
                "not supported: take a DFlash or DSpark head"
            )


def is_speculators(folder: Folder) -> bool:
    return folder.config.get("speculators_model_type") is not None


def block_layout(folder: Folder) -> str:
    """Name the project that writes this layout, for reports."""
    if is_speculators(folder):
        return "speculators"
    if folder.config.get("dflash_config"):
        return "SpecForge" if block_value(folder, "projector_type") == "dspark" else "z-lab"
    return "DeepSpec" if is_dspark(folder) else "assistant"
