"""EAGLE-3: a head that reads each token with hidden states of three layers of the target."""

from __future__ import annotations

from dataclasses import dataclass

from ..drafters.autoregressive import Autoregressive, build_head
from ..drafters.network import HeadOptions
from ..interface import Target


@dataclass(frozen=True)
class Options(HeadOptions):
    aux_layers: tuple[int, ...] = ()  # read the states that enter these layers of the target, such as 2/15/27


def build(options: Options, target: Target) -> Autoregressive:
    return build_head("eagle3", options, target, options.aux_layers)
