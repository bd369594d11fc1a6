"""Read EAGLE-1, EAGLE-3 and P-EAGLE heads as SafeAILab, SpecForge, AngelSlim, NVIDIA and speculators write them."""

from __future__ import annotations

from ...errors import UserError
from ...models.heads import EagleShape
from .common import FC, NORM, QUERY, decoder, ends, fused_states, whole_numbers
from .folder import PICKLED, Folder

IDS = "eagle_aux_hidden_state_layer_ids"
LAYERS = "num_target_layers"
MASKS = ("ptd_token_id", "pard_token", "mask_token_id")  # keys of the mask token; the first that is set counts
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
        layout=layout(folder),
        **ends(folder, width),
        layers=decoder(folder, kind),
        joins="inside",
        aux_layers=aux_layers(folder),
        num_aux_layers=1
        if last
        else fused_states(folder, target_width, "a P-EAGLE" if kind == "peagle" else "an EAGLE-3"),
        target_layers=None if folder.stated(LAYERS) is None else folder.count(LAYERS, 0),
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
        mask=mask(folder) if kind == "peagle" else None,
    )
    if shape.norm_before_fc and shape.fc_norm:
        raise UserError(
            f"`{folder.path}` asks for `norm_before_fc` and `fc_norm`: state one of them in its config.json"
        )
    if shape.mask is not None:
        check_mask(folder, shape)
    return shape


def mask(folder: Folder) -> int:
    """Return the mask token."""
    token = next((folder.stated(name) for name in MASKS if folder.stated(name) is not None), None)
    if type(token) is not int or token < 0:
        raise UserError(
            f"`{folder.path}` drafts over mask tokens and says that theirs is {token}: state `mask_token_id` in its "
            "config.json"
        )
    return token


def check_mask(folder: Folder, shape: EagleShape) -> None:
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
        layout=layout(folder),
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


def aux_layers(folder: Folder) -> tuple[int, ...] | None:
    """Return the layers whose input states are read: ids at the top name inputs, ids in `eagle_config` outputs."""
    entering = folder.config.get(IDS)
    leaving = (folder.config.get("eagle_config") or {}).get(IDS)
    if entering:
        return whole_numbers(folder, IDS, entering)
    return tuple(layer + 1 for layer in whole_numbers(folder, IDS, leaving)) if leaving else None


def layout(folder: Folder) -> str:
    """Name the project that writes this layout, for reports."""
    classes = str(folder.config.get("architectures"))
    if folder.config.get("speculators_model_type"):
        return "speculators"
    if folder.config.get("eagle_config"):
        return "SpecForge or NVIDIA"
    if "Eagle3LlamaForCausalLM" in classes:
        return "AngelSlim"
    return "SafeAILab" if (folder.path / PICKLED).is_file() else "SpecForge"
