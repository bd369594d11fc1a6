"""Read modules of multi-token prediction with the names of DeepSeek, Qwen3-Next, MiMo and speculators."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ...errors import UserError
from ...models.heads import ModuleShape
from .common import QUERY, decoder, ends
from .folder import Folder

JOINT = "model.modules.0.fc.weight"
OFFSET_NORMS = re.compile(r"qwen3_(next|5)")  # model types whose norms are stored minus 1


@dataclass(frozen=True)
class Variant:
    """Properties of a publisher's modules that names and shapes do not show."""

    state_first: bool  # [state, token]; else [token, state]
    blank_first: bool  # the first entry of a text reads zeros instead of its token


VARIANTS = {
    "DeepSeek": Variant(state_first=False, blank_first=True),
    "Qwen": Variant(state_first=False, blank_first=False),
    "MiMo": Variant(state_first=True, blank_first=True),
    "speculators": Variant(state_first=False, blank_first=False),
}

# Parts of a block that are not supported: pattern of the tensor names, description.
UNSUPPORTED = (
    (re.compile(r"\.kv_a_proj|\.kv_b_proj|\.q_a_proj"), "attention over compressed keys (MLA)"),
    (re.compile(r"\.mlp\.(experts|gate|shared_experts?)\."), "a mixture of experts"),
    (re.compile(r"\.linear_attn\."), "linear attention"),
)


def read_mtp(folder: Folder) -> ModuleShape | None:
    """Read MTP modules: a matrix joins token and state, each through a norm, then a decoder layer."""
    width = folder.config.get("hidden_size")
    if folder.modules is None or not isinstance(width, int):
        return None
    refuse_unsupported(folder)
    # speculators uses the names of MiMo, but computes as Qwen.
    alone = folder.config.get("speculators_model_type") == "mtp"
    naming = "speculators" if alone else folder.modules.naming
    layers = decoder(Folder(folder.path, plain(folder), folder.tensors), "mtp")
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
        state_first=VARIANTS[naming].state_first,
        blank_first=VARIANTS[naming].blank_first,
        modules=layers.layers,
        offset_norms=OFFSET_NORMS.match(str(folder.config.get("model_type"))) is not None,
        target_layers=folder.modules.first if naming == "DeepSeek" else None,
    )


def plain(folder: Folder) -> dict[str, object]:
    """Return the configuration without the `layer_types` of the model: a module has full attention."""
    return {key: value for key, value in folder.config.items() if key != "layer_types"}


def refuse_unsupported(folder: Folder) -> None:
    """Refuse modules with parts that are not supported."""
    for name in folder.tensors:
        for pattern, called in UNSUPPORTED:
            if pattern.search(name):
                raise UserError(
                    f"the modules of `{folder.path}` have {called}, which is not supported (`{name}`): "
                    "speculate without them, by `ngram` or `suffix`"
                )
    if folder.config.get("attn_output_gate"):
        raise UserError(
            f"the modules of `{folder.path}` gate their attention (`attn_output_gate`), which is not supported: "
            "speculate without them, by `ngram` or `suffix`"
        )
    if QUERY not in folder.tensors or JOINT not in folder.tensors:
        raise UserError(f"the modules of `{folder.path}` lack a block or the matrix before it: fetch them again")
