"""A drafter that samples from a table with the engine's random numbers, for tests of the output distribution.

`sabotage` breaks one rule of rejection sampling, so that the tests can prove that they would notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels import SamplingMetadata
from outrider.kernels.philox import RESIDUAL
from outrider.request import Request
from outrider.speculation import DraftBatch, DraftContext, Needs, Proposer, Target, TreeOptions
from outrider.speculation.drafters.draft_sampler import DraftSampler
from outrider.speculation.drafters.tree_builder import fixed_shape

TOKENS = (17, 64, 66, 92)  # the only tokens that the tests allow
# The target emits the third token in a third of all cases, this table rarely: shared noise then shows most.
PROBS = ((0.15, 0.7, 0.01, 0.14), (0.12, 0.62, 0.01, 0.25), (0.15, 0.7, 0.01, 0.14), (0.56, 0.18, 0.01, 0.25))


@dataclass(frozen=True)
class Options(TreeOptions):
    width: int = 2
    costs_time: bool = False  # widths are planned
    sabotage: str = ""  # shared: noise of the residual; peeking: drop drafts by token; once: independent siblings


class Dice:
    def __init__(self, options: Options, target: Target) -> None:
        self.options, self.target = options, target
        self.shape = fixed_shape(options.width, options.branches, options.max_depth)
        self.depths = [0] * len(self.shape)
        for index, (parent, _) in enumerate(self.shape):
            self.depths[index] = 0 if parent < 0 else self.depths[parent] + 1
        self.needs = Needs(
            width=options.width, trees=options.branches > 1, has_probs=True, costs_time=options.costs_time
        )
        self.sampler = DraftSampler(target)
        self.torch_device = target.device.torch_device
        table = torch.full((target.model.config.vocabulary,) * 2, -torch.inf)  # [V, V] by the token before
        for row, token in enumerate(TOKENS):
            table[token, list(TOKENS)] = torch.tensor(PROBS[row]).log()
        self.table = table.to(self.torch_device)

    def propose(self, contexts: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        newest = [context.tokens(context.length - 1, context.length)[0] for context in contexts]
        rows = [row for row, context in enumerate(contexts) if context.num_draft_tokens and newest[row] in TOKENS]
        lengths = [contexts[row].num_draft_tokens if row in rows else 0 for row in range(len(contexts))]
        width = max(lengths, default=0)
        tokens = torch.full((len(contexts), width), -1, dtype=torch.int32, device=self.torch_device)  # [B, W]
        logits = torch.full(
            (len(contexts), width, self.table.shape[0]), -torch.inf, device=self.torch_device
        )  # [B, W, V]
        parents = [parent for parent, _ in self.shape]
        for parent in range(-1, width - 1 if rows else -1):
            children = [index for index in range(width) if parents[index] == parent]
            before = torch.tensor(newest, device=self.torch_device)[rows] if parent < 0 else tokens[rows, parent]
            logits_before = self.table[before.long()]
            if children:
                drafting, depth = [contexts[row] for row in rows], self.depths[children[0]]
                sampled = self._sample(logits_before, drafting, depth, len(children))
                for rank, index in enumerate(children):
                    logits[rows, index], tokens[rows, index] = logits_before, sampled[:, rank]
        if self.options.sabotage == "peeking":
            lengths = [n if n and int(row[0]) != TOKENS[0] else 0 for row, n in zip(tokens, lengths, strict=True)]
        branching = [parents[:width]] * len(contexts) if self.options.branches > 1 else None
        return DraftBatch(tokens, lengths, branching, logits if self.sampler.keeps_logits else None)

    def _sample(self, logits: Tensor, contexts: list[DraftContext], depth: int, count: int) -> Tensor:
        """Return the sampled siblings [B, count]."""
        if self.options.sabotage == "once" and count > 1:  # verified as if without replacement
            independent = [
                self.sampler.ops.sample(logits, self._sampling(contexts, depth, 256 * n)) for n in range(count)
            ]
            return torch.stack(independent, 1)
        if self.options.sabotage != "shared":
            return self.sampler.sample_children(logits, self.sampler.sampling(contexts), depth, count)[0]
        return self.target.ops.sample_children(logits, self._sampling(contexts, depth, RESIDUAL), count).tokens

    def _sampling(self, contexts: list[DraftContext], depth: int, stream: int) -> SamplingMetadata:
        upload, count = self.target.device.upload, len(contexts)
        return SamplingMetadata(
            temperature=upload([1.0] * count, torch.float32),
            top_k=upload([0] * count, torch.int32),
            top_p=upload([1.0] * count, torch.float32),
            min_p=upload([0.0] * count, torch.float32),
            seeds=upload([context.request.seed for context in contexts], torch.int64),
            positions=upload([context.length + depth for context in contexts], torch.int32),
            epochs=upload([context.length for context in contexts], torch.int32),
            stream=stream,
        )

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        return

    def release(self, requests: Sequence[Request]) -> None:
        return


def build(options: Options, target: Target) -> Proposer:
    return Dice(options, target)
