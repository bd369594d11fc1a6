"""A drafter that knows the answer and drafts some tokens wrong, to test speculation at any acceptance rate.

`TEXTS` holds the true continuation of each prompt. The token at every `wrong`-th position is wrong. `branches` > 1
builds a tree in which the true token, if it is drafted, is not the first child.
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
    fails: bool = False  # raise after a few tokens


class Oracle:
    def __init__(self, options: Options, target: Target) -> None:
        self.options, self.target = options, target
        self.needs = Needs(width=options.width, trees=options.branches > 1)
        self.live: set[Request] = set()
        self.judged = 0

    def propose(self, contexts: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        assert hidden is None and last.shape[0] == 0
        rows = [self._chain(context) if self.options.branches == 1 else self._tree(context) for context in contexts]
        if self.options.fails and any(len(context.request.output) > 5 for context in contexts):
            raise RuntimeError("the oracle is silent")
        self.live.update(context.request for context in contexts)
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

    def _draft_token(self, context: DraftContext, ahead: int) -> int:
        text = TEXTS[tuple(context.request.prompt)]
        index = context.length - len(context.request.prompt) + ahead
        true_token = text[index] if index < len(text) else 5
        return (true_token + 1) % VOCABULARY if (index + 1) % self.options.wrong == 0 else true_token

    def _chain(self, context: DraftContext) -> tuple[list[int], list[int]]:
        if not context.new_tokens:
            return [], []
        return [self._draft_token(context, ahead) for ahead in range(context.num_draft_tokens)], list(
            range(-1, context.num_draft_tokens - 1)
        )

    def _tree(self, context: DraftContext) -> tuple[list[int], list[int]]:
        """Return a trunk of draft tokens, each with wrong siblings before it."""
        tokens: list[int] = []
        parents: list[int] = []
        trunk, ahead = -1, 0
        while context.new_tokens and len(tokens) + self.options.branches <= context.num_draft_tokens:
            true_token = self._draft_token(context, ahead)
            tokens += [(true_token + 7 * n) % VOCABULARY for n in range(self.options.branches - 1, -1, -1)]
            parents += [trunk] * self.options.branches
            trunk, ahead = len(tokens) - 1, ahead + 1
        return tokens, parents


def build(options: Options, target: Target) -> Proposer:
    return Oracle(options, target)
