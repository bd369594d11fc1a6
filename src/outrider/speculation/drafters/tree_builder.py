"""Trees in the making: what networks whose drafts branch write their tokens on, a level at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..interface import DraftBatch, DraftContext
from .chain_builder import Maker, Part
from .draft_sampler import named

PartT = TypeVar("PartT", bound=Part)


@dataclass(eq=False)
class Node:
    """A drafted token, or, without a parent, the newest of the text, from which a tree grows."""

    parent: Node | None
    token: int = -1
    depth: int = -1  # nodes between it and the newest token
    share: float = 0.0  # logarithm of its chance, given its parent
    chance: float = 0.0  # the same of all of the path to it
    state: int = -1  # where its state lies among those of the call, the roots' first; -1: it did not run
    source: int = -1  # which of the call's logits it was drawn from
    children: list[Node] = field(default_factory=list)  # those that a settled shape provides for


class FreeTree(Generic[PartT]):
    """A tree that goes where the likeliest tokens are. Its nodes are always the best found so far, best first."""

    def __init__(self, run: PartT, branches: int, state: int, at_once: bool) -> None:
        """at_once: all levels have been paid for, so whatever has a place may be expanded."""
        self.run, self.branches = run, branches
        self.floor, self.onward = (
            logarithm(run.context.min_acceptance),
            logarithm(0.0 if at_once else run.context.min_continuation),
        )
        self.breadth = run.width if at_once else branches  # nodes of a level that are expanded
        self.root = Node(None, state=state)
        self.nodes: list[Node] = []

    def wanted(self, parent: Node) -> int:
        return self.branches

    def add(self, parent: Node, tokens: Sequence[int], shares: Sequence[float], source: int) -> None:
        for token, share in zip(tokens, shares, strict=True):
            chance = parent.chance + share
            if token >= 0 and chance > -math.inf and chance >= self.floor:
                self.nodes.append(Node(parent, token, parent.depth + 1, share, chance, source=source))

    def inner(self, depth: int) -> list[Node]:
        """The nodes of a whole level that are worth expanding, best first."""
        # What would grow from the last node has no place.
        inner = (node for node in self.finish()[: self.run.width - 1] if node.depth == depth)
        return [node for node in inner if node.chance >= self.onward][: self.breadth]

    def finish(self) -> list[Node]:
        # Stable, and a child is added after its parent and is never likelier: what is cut off has nothing below it.
        self.nodes.sort(key=lambda node: -node.chance)
        del self.nodes[self.run.width :]
        return self.nodes


class SettledTree(Generic[PartT]):
    """A tree whose shape does not depend on its tokens: rejection must not see which of them was worth its place."""

    def __init__(self, run: PartT, shape: Sequence[tuple[int, int]], state: int) -> None:
        self.run = run
        self.root = Node(None, state=state)
        self.nodes: list[Node] = []
        for before, _ in shape[: run.width]:
            parent = self.root if before < 0 else self.nodes[before]
            node = Node(parent, depth=parent.depth + 1)
            parent.children.append(node)
            self.nodes.append(node)

    def wanted(self, parent: Node) -> int:
        return len(parent.children)

    def add(self, parent: Node, tokens: Sequence[int], shares: Sequence[float], source: int) -> None:
        for node, token in zip(parent.children, tokens, strict=False):
            node.token, node.source = token, source

    def inner(self, depth: int) -> list[Node]:
        return [node for node in self.nodes if node.depth == depth and node.children and node.token >= 0]

    def finish(self) -> list[Node]:
        """Without the tokens that were not drawn: a drafter may know fewer, or have no room to read their parents."""
        return [node for node in self.nodes if node.token >= 0]


Tree = FreeTree[PartT] | SettledTree[PartT]
Asking = tuple[Tree[PartT], Sequence[Node]]  # nodes of a tree whose children are drawn from one row of logits


class Grove(Generic[PartT]):
    """The trees of one call, a Sheet whose drafts branch. Those of `shape` are settled; without one they are free."""

    def __init__(
        self,
        maker: Maker,
        contexts: Sequence[DraftContext],
        runs: Sequence[PartT],
        branches: int,
        shape: Sequence[tuple[int, int]] | None,
        at_once: bool = False,
    ) -> None:
        self.drawer, self.device, self.vocabulary = maker.drawer, maker.device, maker.vocabulary
        self.contexts = contexts
        self.trees: list[Tree[PartT]] = [
            FreeTree(run, branches, state, at_once) if shape is None else SettledTree(run, shape, state)
            for state, run in enumerate(runs)
        ]
        self.likeliest = self.drawer.likeliest([run.context for run in runs])
        self.drawn = 0  # rows of logits so far
        self._logits: list[Tensor] = []  # by level [R, V], where the verification asks for them

    def put(self, asking: Sequence[Asking[PartT]], depth: int, logits: Tensor, ids: Tensor | None = None) -> None:
        """Draw children of these nodes from their row of logits [R, V]. ids [U]: the logits [R, U] are of these."""
        choice = self.drawer.choice([tree.run.context for tree, _ in asking])
        most = max(tree.wanted(node) for tree, nodes in asking for node in nodes)
        found, shares = self.drawer.branch(logits, choice, depth, most)  # [R, most] each
        if ids is not None:
            found = named(found, ids)
        for (tree, nodes), tokens, chances in zip(asking, found.tolist(), shares.tolist(), strict=True):
            for node in nodes:
                tree.add(node, tokens, chances, self.drawn)
            self.drawn += 1
        if self.drawer.keeps:
            self._logits.append(logits)

    def draft(self) -> DraftBatch:
        grown: list[list[Node]] = [[] for _ in self.contexts]
        for tree in self.trees:
            grown[tree.run.row] = tree.finish()
        places = [{node: at for at, node in enumerate(nodes)} for nodes in grown]
        parents = [
            [place.get(node.parent, -1) if node.parent is not None else -1 for node in nodes]
            for place, nodes in zip(places, grown, strict=True)
        ]
        tokens = [[node.token for node in nodes] for nodes in grown]
        if not self.drawer.keeps:
            shares = [[math.exp(node.share) for node in nodes] for nodes in grown]
            return DraftBatch(tokens, parents=parents, confidence=shares)
        shape = len(self.contexts), max(map(len, grown), default=0), self.vocabulary
        spread = torch.zeros(*shape, device=self.device.torch_device)  # [B, W, V]
        drawn_from = torch.cat(self._logits) if self._logits else spread.new_zeros(0, self.vocabulary)  # [drawn, V]
        for row, nodes in enumerate(grown):
            spread[row, : len(nodes)] = drawn_from[[node.source for node in nodes]]
        return DraftBatch(tokens, parents=parents, logits=spread)


def logarithm(chance: float) -> float:
    return math.log(chance) if chance > 0 else -math.inf
