"""P-EAGLE: an EAGLE-3 head that drafts all tokens in one pass over mask tokens, each with a learned state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..drafters.autoregressive import Autoregressive
from ..drafters.network import open_network
from ..interface import MethodOptions, Target


@dataclass(frozen=True)
class Options(MethodOptions):
    model: str = ""  # the head: a folder, or a name on the hub; default: what ships for the model
    quantize: Literal["int8", "int4", "fp8"] | None = None  # format of float weights of the head; default: the target's
    aux_layers: tuple[int, ...] = ()  # read the states that enter these layers of the target, such as 2/15/27


def build(options: Options, target: Target) -> Autoregressive:
    network, aux_layers = open_network("peagle", options.model, options.quantize, target, options.aux_layers)
    return Autoregressive(network, target, options.width, aux_layers)
