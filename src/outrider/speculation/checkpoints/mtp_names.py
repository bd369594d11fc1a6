"""Rename the tensors of multi-token prediction modules, stored with a model or alone, to one set of names.

The decoder layer of module J is `model.layers.J`; its other parts are `model.modules.J`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .packed import Held


@dataclass(frozen=True)
class Naming:
    """The tensor names of one publisher."""

    whose: str
    joint: re.Pattern[str]  # the matrix that joins token and state: only modules have it
    module: re.Pattern[str]  # prefix of a name; the group is the module's number, which may start anywhere
    parts: Mapping[str, str]  # our names of the parts outside the decoder layer


NAMINGS = (
    Naming(
        "DeepSeek",
        re.compile(r"^model\.layers\.(\d+)\.eh_proj\.weight$"),
        re.compile(r"^model\.layers\.(\d+)\."),
        {
            "eh_proj": "fc",
            "enorm": "token_norm",
            "hnorm": "state_norm",
            "shared_head.norm": "norm",
            "shared_head.head": "lm_head",
            "embed_tokens": "embed_tokens",
        },
    ),
    Naming(
        "Qwen",
        re.compile(r"^model\.mtp\.fc\.weight$"),
        re.compile(r"^model\.mtp\.(?:layers\.(\d+)\.)?"),
        {
            "fc": "fc",
            "pre_fc_norm_embedding": "token_norm",
            "pre_fc_norm_hidden": "state_norm",
            "norm": "norm",
            "embed_tokens": "embed_tokens",
        },
    ),
    Naming(
        "MiMo",
        re.compile(r"^model\.mtp_layers\.(\d+)\.input_proj\.weight$"),
        re.compile(r"^model\.mtp_layers\.(\d+)\."),
        {
            "input_proj": "fc",
            "token_layernorm": "token_norm",
            "hidden_layernorm": "state_norm",
            "final_layernorm": "norm",
        },
    ),
)


@dataclass(frozen=True)
class Modules:
    """The publisher of the names, and the number of the first module in the checkpoint."""

    naming: str
    first: int


def find_modules(tensors: dict[str, Held]) -> tuple[dict[str, Held], Modules | None]:
    """Return the tensors of the modules under our names; all tensors unchanged if there is no module."""
    for naming in NAMINGS:
        joints = [found for name in tensors if (found := naming.joint.match(name))]
        if joints:
            renamed, first = _rename(tensors, naming, {int(found[1]) for found in joints if found.groups()})
            return renamed, Modules(naming.whose, first)
    return tensors, None


def _rename(tensors: dict[str, Held], naming: Naming, numbers: set[int]) -> tuple[dict[str, Held], int]:
    """Rename the tensors of modules, and number the modules from 0."""
    renamed: dict[str, Held] = {}
    shared: dict[str, Held] = {}  # by all modules
    found = [(match, name) for name in tensors if (match := naming.module.match(name))]
    numbers = numbers or {int(match[1]) for match, _ in found if match[1] is not None}
    order = {number: index for index, number in enumerate(sorted(numbers))}
    for match, name in found:
        rest, number = name[match.end() :], match[1]
        if number is not None and int(number) not in order:
            continue  # a layer of the model itself
        part, _, kind = rest.rpartition(".")
        index = None if number is None else order[int(number)]
        if part not in naming.parts:
            renamed[f"model.layers.{index}.{rest}"] = tensors[name]
        elif index is None:
            shared[f"{naming.parts[part]}.{kind}"] = tensors[name]
        else:
            renamed[f"model.modules.{index}.{naming.parts[part]}.{kind}"] = tensors[name]
    for index in order.values():
        renamed |= {f"model.modules.{index}.{part}": tensor for part, tensor in shared.items()}
    return renamed, min(order, default=0)


def module(tensors: Mapping[str, Held], index: int) -> dict[str, Held]:
    """Return the tensors of one module under the names of a single head."""
    block, own = f"model.layers.{index}.", f"model.modules.{index}."
    found: dict[str, Held] = {}
    for name, tensor in tensors.items():
        if name.startswith(block):
            found["model.layers.0." + name.removeprefix(block)] = tensor
        elif name.startswith(own):
            part = name.removeprefix(own)
            found[part if part.startswith("lm_head.") else f"model.{part}"] = tensor
    return found
