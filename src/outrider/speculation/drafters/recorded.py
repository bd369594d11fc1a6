"""Draft for one request by replay: the first pass and the decode loop, each recorded once a shape.

The kernels record both (Kernels.record), so that nothing of Python runs between the tokens of a draft. They read fixed
tensors, which are filled before a replay. The functions that are recorded also serve every other call of a drafter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...cache.pages import Pages
from ...device import Buffer, Device
from ...kernels import Kernels
from ..interface import DraftBatch, DraftContext
from .chain_builder import ChainBuilder, DraftPlan
from .draft_sampler import DraftSampler

MAX_RECORDINGS = 64  # shapes that are kept; one more drops all of them
MIN_PAGES = 16  # entries of a page table: texts with fewer pages share recordings


class RecordedChain(ChainBuilder):
    """The chain of one request. All its tokens are recorded; a replay ends after the last one that pays."""

    def __init__(self, sampler: DraftSampler, device: Device, width: int, ids: Tensor | None) -> None:
        """ids [U] int32: tokens that the drafter knows; None: all."""
        super().__init__(sampler, width, None)
        self.ids = ids
        self.tokens, self.logprobs = device.buffer(width, torch.int32), device.buffer(width, torch.float32)
        self.recorder: Any = None  # while it is recorded
        self._sampling = sampler.greedy_sampling(1)

    @property
    def counts(self) -> list[int]:
        return [1] * self.width

    def put(self, depth: int, logits: Tensor, confidence: Tensor | None = None) -> Tensor:
        assert self._sampling is not None
        children = self.sampler.ops.sample_children(logits, self._sampling, 1)
        tokens = children.tokens.view(1)
        if self.ids is not None:
            tokens = self.ids.index_select(0, tokens)
        self.tokens.tensor[depth : depth + 1].copy_(tokens)
        logprob = self.logprobs.tensor[depth : depth + 1]
        logprob.copy_(children.logprobs.view(1))
        self.recorder.end_depth(logprob)
        return tokens

    def read(self, plan: DraftPlan, contexts: Sequence[DraftContext], reached: int) -> DraftBatch:
        """Return the draft of a replay that drafted `reached` tokens, cut before the first that does not pay."""
        confidence = [math.exp(min(logprob, 0.0)) for logprob in self.logprobs.read(reached)]
        length, path, least = reached, 1.0, plan.context.min_acceptance
        for depth, probability in enumerate(confidence):
            path *= probability
            if path < least:
                length = depth
                break
        tokens: list[list[int]] = [[] for _ in contexts]
        confidences: list[list[float]] = [[] for _ in contexts]
        lengths = [0] * len(contexts)
        tokens[plan.row], confidences[plan.row] = self.tokens.read(reached), confidence[:length]
        lengths[plan.row] = length
        return DraftBatch(tokens, lengths, confidence=confidences, reached=reached)


@dataclass
class Recorded:
    """A function of fixed tensors, and its recording."""

    run: Callable[[Any], None]
    inputs: Buffer
    hidden: Tensor | None = None  # [T, F]: aux hidden states that it reads
    chain: RecordedChain | None = None  # that it fills
    replay: Any = None
    failed: bool = False  # it cannot be recorded

    def load(self, hidden: Tensor, first: int) -> None:
        """Fill `hidden` with rows from `first` on."""
        assert self.hidden is not None
        if self.replay is None:
            self.hidden.copy_(hidden[first : first + len(self.hidden)])
        else:
            self.replay.load(self.hidden, hidden, first)


class Recordings:
    """Recordings by shape. A shape is recorded when it is used for the second time."""

    def __init__(self, ops: Kernels, pages: Pages) -> None:
        self.ops, self.pages = ops, pages
        self._layers = pages.layers
        self._recorded: dict[Hashable, Recorded | None] = {}

    def find(self, key: Hashable, build: Callable[[], Recorded]) -> Recorded | None:
        """Return the function of this shape; None: at its first use, or if it cannot be recorded."""
        if self._layers is not self.pages.layers:  # the KV was allocated anew
            self._recorded.clear()
            self._layers = self.pages.layers
        if key not in self._recorded:
            if len(self._recorded) >= MAX_RECORDINGS:
                self._recorded.clear()
            self._recorded[key] = None
            return None
        found = self._recorded[key]
        if found is None:
            found = self._recorded[key] = build()
        return None if found.failed else found

    def run(self, recorded: Recorded, depths: int = 0, least: float = 0.0) -> int:
        """Run a function whose inputs are filled; return the depths that it drafted, or -1 if it cannot be recorded."""
        if recorded.replay is None:
            recorded.replay = self.ops.record(recorded.run)
            if recorded.replay is None:
                recorded.failed = True
                return -1
        reached: int = recorded.replay(depths, least)
        return reached


def table_width(pages: int) -> int:
    """Return the entries of the page table of a recording, for texts with this number of pages."""
    return max(1 << (pages - 1).bit_length(), MIN_PAGES)


def padded_table(pages: Sequence[int], width: int) -> list[int]:
    """Return a page table of `width` entries; -1: no page, so that nothing is stored beyond the last."""
    return [*pages, *([-1] * (width - len(pages)))]


def least_path(context: DraftContext, paid: bool) -> float:
    """Return the acceptance probability of a path below which it does not pay to go on."""
    if not context.min_acceptance:
        return 0.0
    return context.min_acceptance if paid else max(context.min_acceptance, context.min_continuation)
