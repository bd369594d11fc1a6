"""How the drafts of a block head grow once its blocks have run: from left to right, as chains or as trees.

What a block says of its positions is known at once. Only a bias by the token before makes candidates depend on the path
to them, and costs one small product a level: so every node that has a place in its tree is asked for children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ...cache.pages import Pages
from ...models.block_head import BlockHead
from ..interface import DraftBatch, DraftContext, Target
from .chain_builder import Sheet
from .draft_sampler import DraftSampler
from .tree_builder import Asking, Grove
from .tree_shapes import fixed_shape


@dataclass(frozen=True)
class Block:
    """A request's block: `size` tokens run, `levels` are guessed, `width` are drafted: as many, or a tree of them."""

    row: int  # among the contexts
    place: int  # among the readings
    context: DraftContext
    size: int
    levels: int
    width: int


@dataclass(frozen=True)
class Said:
    """What a pass says of all blocks, whatever the tokens before their guesses."""

    begins: list[int]  # where the guesses of each block begin
    states: Tensor  # [guesses, H]
    scores: Tensor  # [guesses, U]
    newest: Tensor  # [R]: the token before each block's first guess
    memory: Tensor  # [R, M]


def rows_of(tensor: Tensor, here: list[int]) -> Tensor:
    """Not copied where they stand in a row: that copy of torch wakes its threads, which takes longer than all else."""
    first, count = here[0], len(here)
    return tensor[first : first + count] if here == list(range(first, first + count)) else tensor[here]


class BlockGrowth:
    """Drafts the tokens of one call."""

    def __init__(self, head: BlockHead[Pages], target: Target, width: int, branches: int, levels: int) -> None:
        self.head, self.device, self.drawer = head, target.device, DraftSampler(target)
        self.vocabulary = target.model.config.vocabulary
        self.unsaid = 0 if head.shape.from_anchor else 1  # tokens at the beginning of a block that guess nothing
        self.branches, self.levels = branches, levels
        self.width = width if branches > 1 else levels
        self.shape = fixed_shape(width, branches, levels) if self.drawer.keeps else None

    def plan(self, row: int, place: int, context: DraftContext, room: int) -> Block:
        """A block no larger than the guesses that are wanted, cut where there is no room for more."""
        width = min(context.num_draft_tokens, self.width) if context.new_tokens else 0
        levels = min(width, self.levels, room - self.unsaid)
        if levels < 1:
            return Block(row, place, context, 0, 0, 0)
        return Block(row, place, context, levels + self.unsaid, levels, width if self.branches > 1 else levels)

    def draft(
        self, contexts: Sequence[DraftContext], blocks: list[Block], states: Tensor, firsts: list[int], last: Tensor
    ) -> DraftBatch:
        """states [T, H]: of all blocks, which begin at `firsts`; last [B]: the newest token of each context."""
        said = self._say(blocks, states, firsts, last[[block.row for block in blocks]])
        if self.branches == 1:
            sheet = Sheet(self, contexts, blocks)
            self._chain(blocks, said, sheet)
            return sheet.draft()
        grove = Grove(self, contexts, blocks, self.branches, self.shape, at_once=True)
        self._branch(said, grove)
        return grove.draft()

    def _say(self, blocks: list[Block], states: Tensor, firsts: list[int], newest: Tensor) -> Said:
        guessing = [
            first + self.unsaid + at for first, block in zip(firsts, blocks, strict=True) for at in range(block.levels)
        ]
        begins = [0, *accumulate(block.levels for block in blocks)]
        drafts = states[guessing]
        return Said(begins, drafts, self.head.scores(drafts), newest, self.head.begin(states[firsts], newest))

    def _judge(
        self, said: Said, here: list[int], before: Tensor, memory: Tensor, ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Logits [R, U], without ids [R, V], of the guesses `here` after these tokens [R], and what is kept [R, M]."""
        bias, memory = self.head.bias(rows_of(said.states, here), before, memory)
        scores = rows_of(said.scores, here)
        logits = scores if bias is None else scores + bias
        return logits if ids is not None else self.head.logits(logits), memory

    def _chain(self, blocks: list[Block], said: Said, sheet: Sheet) -> None:
        """One token at a time, each with the one before it."""
        before, memory = said.newest, said.memory
        going = list(range(len(blocks)))
        ids = self.head.lm_head.ids if sheet.likeliest else None
        for depth in range(sheet.width):
            here = [said.begins[at] + depth for at in going]
            # The head is sure before it knows the token. Where one may look, its share of the logits tells more.
            sure = None if sheet.likeliest else self.head.confidence(rows_of(said.states, here), before)
            logits, memory = self._judge(said, here, before, memory, ids)
            drafting = [blocks[at] for at in going]
            before = sheet.put(drafting, depth, logits, sure, ids)
            pays = sheet.pays(drafting, depth, at_once=True)
            stay = [place for place, block in enumerate(drafting) if block.levels > depth + 1 and pays[place]]
            if len(stay) < len(going):
                going, before, memory = [going[place] for place in stay], before[stay], memory[stay]
            if not going:
                return

    def _branch(self, said: Said, grove: Grove[Block]) -> None:
        """A level at a time, all of its nodes at once."""
        asking: list[Asking[Block]] = [(tree, [tree.root]) for tree in grove.trees]
        before, memory = said.newest, said.memory
        ids = self.head.lm_head.ids if grove.likeliest else None
        for depth in range(self.levels):
            here = [said.begins[tree.root.state] + depth for tree, _ in asking]
            # Its confidence is one number for all children of a node; what each has of the logits tells more.
            logits, memory = self._judge(said, here, before, memory, ids)
            first = grove.drawn
            grove.put(asking, depth, logits, ids)
            asking = self._deeper(grove, depth)
            if not asking:
                return
            parents = [nodes[0] for _, nodes in asking]
            before = self.device.upload([node.token for node in parents], torch.int32)
            memory = memory[[node.source - first for node in parents]]

    def _deeper(self, grove: Grove[Block], depth: int) -> list[Asking[Block]]:
        """Nodes of this level that are asked for children; together where the token before does not count."""
        chosen = [(tree, tree.inner(depth)) for tree in grove.trees if tree.run.levels > depth + 1]
        if self.head.markov is None:
            return [(tree, nodes) for tree, nodes in chosen if nodes]
        return [(tree, [node]) for tree, nodes in chosen for node in nodes]
