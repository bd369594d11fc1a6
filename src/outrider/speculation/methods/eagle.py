"""EAGLE-1: a layer that reads each token with the target's last state, and guesses the state after it."""

from __future__ import annotations

from .. import Target
from ..autoregressive import Autoregressive
from ..head_drafter import HeadOptions, build_head

Options = HeadOptions


def build(options: Options, target: Target) -> Autoregressive:
    return build_head("eagle", options, target)
