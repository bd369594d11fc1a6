"""Modules of multi-token prediction, named as DeepSeek, Qwen3-Next, MiMo and speculators name them."""

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
class Family:
    """What names and shapes do not say."""

    state_first: bool  # [state, token]; else [token, state]
    blank_first: bool


FAMILIES = {
    "DeepSeek": Family(state_first=False, blank_first=True),
    "Qwen": Family(state_first=False, blank_first=False),
    "MiMo": Family(state_first=True, blank_first=True),
    "speculators": Family(state_first=False, blank_first=False),
}

# What a block may have that no layer here can run: how its tensors are called, and what it is.
STRANGE = (
    (re.compile(r"\.kv_a_proj|\.kv_b_proj|\.q_a_proj"), "attention over compressed keys (MLA)"),
    (re.compile(r"\.mlp\.(experts|gate|shared_experts?)\."), "a mixture of experts"),
    (re.compile(r"\.linear_attn\."), "linear attention"),
)


def read_mtp(folder: Folder) -> ModuleShape | None:
    """A block after a matrix that joins token and state, each through a norm."""
    width = folder.config.get("hidden_size")
    if folder.modules is None or not isinstance(width, int):
        return None
    refuse_strange(folder)
    # Its names are MiMo's, what it computes is not.
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
        state_first=FAMILIES[naming].state_first,
        blank_first=FAMILIES[naming].blank_first,
        modules=layers.layers,
        offset_norms=OFFSET_NORMS.match(str(folder.config.get("model_type"))) is not None,
        target_layers=folder.modules.first if naming == "DeepSeek" else None,
    )


def plain(folder: Folder) -> dict[str, object]:
    """The configuration without what it says of the model's own layers: a module's attention sees everything."""
    return {key: value for key, value in folder.config.items() if key != "layer_types"}


def refuse_strange(folder: Folder) -> None:
    for name in folder.tensors:
        for pattern, called in STRANGE:
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
