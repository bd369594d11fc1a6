"""Modules of multi-token prediction, beside a model or alone: whoever wrote them, one set of names comes out.

The block of module J is `model.layers.J`; what joins token and state, and what ends it, is `model.modules.J`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .packed import Held


@dataclass(frozen=True)
class Naming:
    whose: str
    joint: re.Pattern[str]  # the matrix over token and state: only modules have it
    module: re.Pattern[str]  # how a name begins; the group is the module's number, counted from anywhere
    parts: Mapping[str, str]  # what we call what is not the block's


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
    """Who names them so, and the number that the first of them has there."""

    naming: str
    first: int


def find_modules(tensors: dict[str, Held]) -> tuple[dict[str, Held], Modules | None]:
    """The tensors of modules alone, under our names; all as they are where there is no module."""
    for naming in NAMINGS:
        joints = [found for name in tensors if (found := naming.joint.match(name))]
        if joints:
            renamed, first = _rename(tensors, naming, {int(found[1]) for found in joints if found.groups()})
            return renamed, Modules(naming.whose, first)
    return tensors, None


def _rename(tensors: dict[str, Held], naming: Naming, numbers: set[int]) -> tuple[dict[str, Held], int]:
    renamed: dict[str, Held] = {}
    shared: dict[str, Held] = {}  # by all modules
    found = [(match, name) for name in tensors if (match := naming.module.match(name))]
    numbers = numbers or {int(match[1]) for match, _ in found if match[1] is not None}
    order = {number: place for place, number in enumerate(sorted(numbers))}
    for match, name in found:
        rest, number = name[match.end() :], match[1]
        if number is not None and int(number) not in order:
            continue  # a layer of the model itself
        part, _, kind = rest.rpartition(".")
        place = None if number is None else order[int(number)]
        if part not in naming.parts:
            renamed[f"model.layers.{place}.{rest}"] = tensors[name]
        elif place is None:
            shared[f"{naming.parts[part]}.{kind}"] = tensors[name]
        else:
            renamed[f"model.modules.{place}.{naming.parts[part]}.{kind}"] = tensors[name]
    for place in order.values():
        renamed |= {f"model.modules.{place}.{part}": tensor for part, tensor in shared.items()}
    return renamed, min(order, default=0)


def module(tensors: Mapping[str, Held], place: int) -> dict[str, Held]:
    """One of them, named as a head by itself."""
    block, own = f"model.layers.{place}.", f"model.modules.{place}."
    found: dict[str, Held] = {}
    for name, tensor in tensors.items():
        if name.startswith(block):
            found["model.layers.0." + name.removeprefix(block)] = tensor
        elif name.startswith(own):
            part = name.removeprefix(own)
            found[part if part.startswith("lm_head.") else f"model.{part}"] = tensor
    return found
