"""A request whose text is given, for the tests of drafters that need no model."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from outrider.cache.pages import Pages
from outrider.device import Cpu
from outrider.kernels import reference
from outrider.request import Request
from outrider.speculation import DraftBatch, DraftContext, Proposer, find
from outrider.types import SamplingParams

PAGE_SIZE = 4
NO_TOKENS = torch.empty(0, dtype=torch.int32)


def make(name: str, coupled: bool = True, **options: Any) -> Any:
    module = find(name)
    pages = Pages(0, 1, PAGE_SIZE, 1, "float32", states=PAGE_SIZE)
    target = SimpleNamespace(
        device=Cpu(),
        coupled=coupled,
        ops=reference,
        page_size=PAGE_SIZE,
        kv_dtype="float32",
        storage=lambda *_, states: pages,
    )
    return module.build(module.Options(**options), target)


def request(prompt: Sequence[int], prediction: Sequence[int] = (), cache_salt: str = "") -> Request:
    return Request("one", list(prompt), SamplingParams(cache_salt=cache_salt), 0, prediction=list(prediction))


def propose(proposer: Proposer, steps: Sequence[tuple[Request, Sequence[int]]], width: int = 100) -> DraftBatch:
    """One step: each request gets its tokens, then the drafter is asked."""
    contexts = [DraftContext(one, 0, one.length, list(fresh), width, 0) for one, fresh in steps]
    draft = proposer.propose(contexts, NO_TOKENS, None)
    for one, fresh in steps:
        one.output += fresh
    return draft


def say(proposer: Proposer, one: Request, *fresh: int, width: int = 100) -> list[int]:
    """The draft for a request that has just got these tokens."""
    return rows(propose(proposer, [(one, fresh)], width))[0]


def rows(draft: DraftBatch) -> list[list[int]]:
    """The drafts, after a look at their shape."""
    assert draft.parents is None and draft.logits is None and draft.confidence is not None
    found = []
    for tokens, confidence in zip(draft.rows(draft.tokens), draft.confidence, strict=True):
        assert len(confidence) == len(tokens)
        assert all(0 < likely < 1 for likely in confidence)
        found.append(tokens)
    return found
