"""A drafter that knows the answer, and gets some of it wrong: the mechanism is tested with it at any acceptance.

`TEXTS` holds the true continuation of each prompt. Every `wrong`-th position is guessed wrong; `branches` > 1 grows a
tree in which the true token, if it is guessed, is not the first child.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.request import Request
from outrider.speculation import DraftBatch, DraftContext, MethodOptions, Needs, Proposer, Target

TEXTS: dict[tuple[int, ...], list[int]] = {}
VOCABULARY = 101


@dataclass(frozen=True)
class Options(MethodOptions):
    width: int = 4
    wrong: int = 3
    branches: int = 1
    fails: bool = False  # it raises when it has drafted a while


class Oracle:
    def __init__(self, options: Options, target: Target) -> None:
        self.options, self.target = options, target
        self.needs = Needs(width=options.width, trees=options.branches > 1)
        self.live: set[Request] = set()
        self.judged = 0

    def propose(self, turns: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        assert hidden is None and last.shape[0] == 0
        rows = [self._chain(turn) if self.options.branches == 1 else self._tree(turn) for turn in turns]
        if self.options.fails and any(len(turn.request.output) > 5 for turn in turns):
            raise RuntimeError("the oracle is silent")
        self.live.update(turn.request for turn in turns)
        width = max((len(tokens) for tokens, _ in rows), default=0)
        tokens = torch.full((len(rows), width), -1, dtype=torch.int32)  # [B, W]
        parents = torch.full((len(rows), width), -1, dtype=torch.int32)
        for row, (draft, before) in enumerate(rows):
            tokens[row, : len(draft)] = torch.tensor(draft, dtype=torch.int32)
            parents[row, : len(draft)] = torch.tensor(before, dtype=torch.int32)
        lengths = [len(draft) for draft, _ in rows]
        return DraftBatch(tokens, lengths, parents if self.options.branches > 1 else None)

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        for request, count in zip(requests, kept, strict=True):
            assert count <= (len(request.draft.tokens) if request.draft is not None else 0)
            self.judged += 1

    def release(self, requests: Sequence[Request]) -> None:
        self.live.difference_update(requests)

    def _guess(self, turn: DraftContext, ahead: int) -> int:
        text = TEXTS[tuple(turn.request.prompt)]
        at = turn.length - len(turn.request.prompt) + ahead
        right = text[at] if at < len(text) else 5
        return (right + 1) % VOCABULARY if (at + 1) % self.options.wrong == 0 else right

    def _chain(self, turn: DraftContext) -> tuple[list[int], list[int]]:
        if not turn.new_tokens:
            return [], []
        return [self._guess(turn, ahead) for ahead in range(turn.num_draft_tokens)], list(
            range(-1, turn.num_draft_tokens - 1)
        )

    def _tree(self, turn: DraftContext) -> tuple[list[int], list[int]]:
        """A trunk of guesses, each with wrong siblings before it."""
        tokens: list[int] = []
        parents: list[int] = []
        trunk, ahead = -1, 0
        while turn.new_tokens and len(tokens) + self.options.branches <= turn.num_draft_tokens:
            right = self._guess(turn, ahead)
            tokens += [(right + 7 * n) % VOCABULARY for n in range(self.options.branches - 1, -1, -1)]
            parents += [trunk] * self.options.branches
            trunk, ahead = len(tokens) - 1, ahead + 1
        return tokens, parents


def build(options: Options, target: Target) -> Proposer:
    return Oracle(options, target)
