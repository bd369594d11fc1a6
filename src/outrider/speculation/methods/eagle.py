"""EAGLE-1: a layer that reads each token with the target's last hidden state, and predicts the next state."""

from __future__ import annotations

from ..drafters.autoregressive import Autoregressive, build_head
from ..drafters.network import HeadOptions
from ..interface import Target

Options = HeadOptions


def build(options: Options, target: Target) -> Autoregressive:
    return build_head("eagle", options, target)
