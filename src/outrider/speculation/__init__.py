"""Speculative decoding: drafters propose tokens, the target verifies them. Names that a method of your own imports.

- interface: what a method is (`Options`, `Needs`, `propose`, `accept`, `release`); registry: finding methods by name
- auto: the method of `speculate="auto"`; config, options, vllm_config: parsing what the user asks for
- drafter_pool: the drafters that an engine has loaded; manager: their calls, from proposal to verification
- verifier: the verification modes; combined: several drafters for one request (`a+b`)
- methods: one file per method; drafters: the implementations that they share
- adaptive: how many tokens to draft; checkpoints: reading trained heads
"""

from .interface import DraftBatch as Draft  # deprecated alias
from .interface import DraftBatch as DraftBatch
from .interface import DraftContext as DraftContext
from .interface import DraftContext as Turn  # deprecated alias
from .interface import MethodOptions as MethodOptions
from .interface import Needs as Needs
from .interface import Proposer as Proposer
from .interface import Target as Target
from .interface import TreeOptions as TreeOptions
from .registry import available as available
from .registry import build as build
from .registry import drafts_from as drafts_from
from .registry import find as find
from .registry import members as members

__all__ = [
    "Draft",
    "DraftBatch",
    "DraftContext",
    "MethodOptions",
    "Needs",
    "Proposer",
    "Target",
    "TreeOptions",
    "Turn",
    "available",
    "build",
    "drafts_from",
    "find",
    "members",
]
