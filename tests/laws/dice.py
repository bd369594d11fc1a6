"""A drafter that draws from a table, with the engine's own dice: for the laws of distribution.

`sabotage` makes it break the rules of rejection sampling in one of the two ways that have happened elsewhere.
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
from outrider.speculation.drafters.tree_shapes import fixed_shape

TOKENS = (17, 64, 66, 92)  # the only tokens that the law allows
# Where the target says the third token in a third of all cases, these hardly do: shared noise shows most then.
CHANCES = ((0.15, 0.7, 0.01, 0.14), (0.12, 0.62, 0.01, 0.25), (0.15, 0.7, 0.01, 0.14), (0.56, 0.18, 0.01, 0.25))


@dataclass(frozen=True)
class Options(TreeOptions):
    width: int = 2
    sabotage: str = ""  # shared: the residual's own noise; peeking: a draft is dropped for what it is; once: see below


class Dice:
    def __init__(self, options: Options, target: Target) -> None:
        self.options, self.target = options, target
        self.shape = fixed_shape(options.width, options.branches, options.max_depth)
        self.depths = [0] * len(self.shape)
        for place, (parent, _) in enumerate(self.shape):
            self.depths[place] = 0 if parent < 0 else self.depths[parent] + 1
        self.needs = Needs(width=options.width, trees=options.branches > 1, has_probs=True)
        self.sampler = DraftSampler(target)
        self.torch_device = target.device.torch_device
        table = torch.full((target.model.config.vocabulary,) * 2, -torch.inf)  # [V, V] by the token before
        for number, token in enumerate(TOKENS):
            table[token, list(TOKENS)] = torch.tensor(CHANCES[number]).log()
        self.table = table.to(self.torch_device)

    def propose(self, turns: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        newest = [turn.tokens(turn.length - 1, turn.length)[0] for turn in turns]
        rows = [row for row, turn in enumerate(turns) if turn.num_draft_tokens and newest[row] in TOKENS]
        lengths = [turns[row].num_draft_tokens if row in rows else 0 for row in range(len(turns))]
        width = max(lengths, default=0)
        tokens = torch.full((len(turns), width), -1, dtype=torch.int32, device=self.torch_device)  # [B, W]
        logits = torch.full((len(turns), width, self.table.shape[0]), -torch.inf, device=self.torch_device)  # [B, W, V]
        parents = [parent for parent, _ in self.shape]
        for parent in range(-1, width - 1 if rows else -1):
            children = [place for place in range(width) if parents[place] == parent]
            before = torch.tensor(newest, device=self.torch_device)[rows] if parent < 0 else tokens[rows, parent]
            found = self.table[before.long()]
            if children:
                drawn = self._draw(found, [turns[row] for row in rows], self.depths[children[0]], len(children))
                for rank, place in enumerate(children):
                    logits[rows, place], tokens[rows, place] = found, drawn[:, rank]
        if self.options.sabotage == "peeking":
            lengths = [n if n and int(row[0]) != TOKENS[0] else 0 for row, n in zip(tokens, lengths, strict=True)]
        branching = [parents[:width]] * len(turns) if self.options.branches > 1 else None
        return DraftBatch(tokens, lengths, branching, logits if self.sampler.keeps_logits else None)

    def _draw(self, logits: Tensor, turns: list[DraftContext], depth: int, count: int) -> Tensor:
        """[B, count]"""
        if self.options.sabotage == "once" and count > 1:  # siblings as if each knew the others, though none does
            independent = [self.sampler.ops.sample(logits, self._choice(turns, depth, 256 * n)) for n in range(count)]
            return torch.stack(independent, 1)
        if self.options.sabotage != "shared":
            return self.sampler.sample_children(logits, self.sampler.sampling(turns), depth, count)[0]
        return self.target.ops.sample_children(logits, self._choice(turns, depth, RESIDUAL), count).tokens

    def _choice(self, turns: list[DraftContext], depth: int, stream: int) -> SamplingMetadata:
        upload, count = self.target.device.upload, len(turns)
        return SamplingMetadata(
            temperature=upload([1.0] * count, torch.float32),
            top_k=upload([0] * count, torch.int32),
            top_p=upload([1.0] * count, torch.float32),
            min_p=upload([0.0] * count, torch.float32),
            seeds=upload([turn.request.seed for turn in turns], torch.int64),
            positions=upload([turn.length + depth for turn in turns], torch.int32),
            epochs=upload([turn.length for turn in turns], torch.int32),
            stream=stream,
        )

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        return

    def release(self, requests: Sequence[Request]) -> None:
        return


def build(options: Options, target: Target) -> Proposer:
    return Dice(options, target)
