"""Build trees of draft tokens: best first, depth by depth of the most probable nodes, or of a fixed shape.

The probability of a path is that of its parent times that of the token, so it never exceeds its parent's. The best
tokens therefore form a tree, whatever their number, and a larger tree begins with the smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ...device import Device
from ...errors import UserError
from ..interface import DraftBatch, DraftContext
from .chain_builder import DraftPlan
from .draft_sampler import DraftSampler, to_target_ids

FIRST_RATE = 0.6  # acceptance rate that is assumed of a drafter's first candidate
RANK_DECAY = 0.35  # that of each further sibling, as a part of the one before

Item = TypeVar("Item")
PlanT = TypeVar("PlanT", bound=DraftPlan)


class GrownTree(NamedTuple, Generic[Item]):
    """A tree, the most probable paths first and parents before their children."""

    items: list[Item]
    parents: list[int]  # index of each item's parent; -1: the root
    probabilities: list[float]  # of each, given its parent


def best_first(
    roots: Iterable[tuple[Item, float]], children: Callable[[Item], Iterable[tuple[Item, float]]], width: int
) -> GrownTree[Item]:
    """Return the `width` items of the most probable paths, the first among equals.

    `roots` and `children` give each item with its probability given its parent, at most 1.
    """
    heap: list[tuple[float, int, int, float, Item]] = []  # the serial numbers make it stable
    serial = 0
    tree: GrownTree[Item] = GrownTree([], [], [])
    path_probability, parent, candidates = 1.0, -1, roots
    while True:
        for item, probability in candidates:
            heappush(heap, (-path_probability * probability, serial, parent, probability, item))
            serial += 1
        if not heap or len(tree.items) >= width:
            return tree
        negative, _, parent, probability, item = heappop(heap)
        tree.items.append(item)
        tree.parents.append(parent)
        tree.probabilities.append(probability)
        path_probability, parent, candidates = -negative, len(tree.items) - 1, children(item)


def product_tree(candidates: Sequence[Sequence[tuple[int, float]]], width: int) -> GrownTree[int]:
    """Return the best `width` tokens if each depth has its candidates (token, probability), whatever the path."""

    def at_depth(depth: int) -> list[tuple[tuple[int, int], float]]:
        if depth == len(candidates):
            return []
        return [((depth, token), probability) for token, probability in candidates[depth]]

    tree = best_first(at_depth(0), lambda item: at_depth(item[0] + 1), width)
    return GrownTree([token for _, token in tree.items], tree.parents, tree.probabilities)


def fixed_shape(width: int, branches: int, max_depth: int | None = None) -> list[tuple[int, int]]:
    """Return a tree shape that does not depend on the sampled tokens: (parent, rank among siblings) of each node."""
    ranks = [(rank, FIRST_RATE * RANK_DECAY**rank) for rank in range(branches)]
    tree = product_tree([ranks] * min(width, max_depth or width), width)
    return list(zip(tree.parents, tree.items, strict=True))


def read_paths(text: str) -> list[tuple[int, ...]]:
    """Parse a tree as users write it, as paths of ranks such as `0/0.0/0.1/1`; return parents first."""
    try:
        paths = [tuple(int(rank) for rank in path.split(".")) for path in text.split("/")]
    except ValueError:
        raise UserError(f"`tree` is `{text}`: expected paths of ranks such as `0/0.0/0.1/1`") from None
    known: set[tuple[int, ...]] = {()}
    for path in sorted(paths, key=len):
        spelled = ".".join(map(str, path))
        if path in known or min(path) < 0:
            raise UserError(f"`tree` has the path `{spelled}` twice or below 0: ranks count from 0, and paths differ")
        if path[:-1] not in known:
            missing = ".".join(map(str, path[:-1]))
            raise UserError(f"`tree` has the path `{spelled}` and lacks `{missing}`, which it follows: add it")
        known.add(path)
    return sorted(paths, key=len)


class TreeDrafter(Protocol):
    """The parts of a drafter that a TreeBuilder uses."""

    sampler: DraftSampler
    device: Device
    vocabulary: int


@dataclass(eq=False)
class Node:
    """A drafted token, or, without a parent, the root: the newest token of the text."""

    parent: Node | None
    token: int = -1
    depth: int = -1  # nodes between it and the root
    logprob: float = 0.0  # of being accepted, given its parent
    path_logprob: float = 0.0  # the same of the whole path to it
    state: int = -1  # row of its state among those of the call, the roots' first; -1: it did not run
    source: int = -1  # which of the call's logits it was sampled from
    children: list[Node] = field(default_factory=list)  # in a tree of fixed shape


class FreeTree(Generic[PlanT]):
    """A tree of the most probable tokens. Its nodes are always the best so far, best first."""

    def __init__(self, plan: PlanT, branches: int, state: int, paid: bool) -> None:
        """paid: deeper nodes cost nothing more, so each that stays in the tree may be expanded."""
        self.plan, self.branches = plan, branches
        self.min_acceptance = log(plan.context.min_acceptance)
        self.min_continuation = log(0.0 if paid else plan.context.min_continuation)
        self.breadth = plan.width if paid else branches  # nodes of a depth that are expanded
        self.root = Node(None, state=state)
        self.nodes: list[Node] = []

    def num_children(self, parent: Node) -> int:
        return self.branches

    def add(self, parent: Node, tokens: Sequence[int], logprobs: Sequence[float], source: int) -> None:
        for token, logprob in zip(tokens, logprobs, strict=True):
            path = parent.path_logprob + logprob
            if token >= 0 and path > -math.inf and path >= self.min_acceptance:
                self.nodes.append(Node(parent, token, parent.depth + 1, logprob, path, source=source))

    def to_expand(self, depth: int) -> list[Node]:
        """Return the nodes of a depth that are worth expanding, best first."""
        # Children of the last node would not stay in the tree.
        inner = (node for node in self.finish()[: self.plan.width - 1] if node.depth == depth)
        return [node for node in inner if node.path_logprob >= self.min_continuation][: self.breadth]

    def finish(self) -> list[Node]:
        # The sort is stable, and a child comes after its parent and is never more probable: no orphan is left.
        self.nodes.sort(key=lambda node: -node.path_logprob)
        del self.nodes[self.plan.width :]
        return self.nodes


class FixedTree(Generic[PlanT]):
    """A tree whose shape does not depend on its tokens: rejection sampling forbids selecting among them."""

    def __init__(self, plan: PlanT, shape: Sequence[tuple[int, int]], state: int) -> None:
        self.plan = plan
        self.root = Node(None, state=state)
        self.nodes: list[Node] = []
        for before, _ in shape[: plan.width]:
            parent = self.root if before < 0 else self.nodes[before]
            node = Node(parent, depth=parent.depth + 1)
            parent.children.append(node)
            self.nodes.append(node)

    def num_children(self, parent: Node) -> int:
        return len(parent.children)

    def add(self, parent: Node, tokens: Sequence[int], logprobs: Sequence[float], source: int) -> None:
        for node, token in zip(parent.children, tokens, strict=False):
            node.token, node.source = token, source

    def to_expand(self, depth: int) -> list[Node]:
        return [node for node in self.nodes if node.depth == depth and node.children and node.token >= 0]

    def finish(self) -> list[Node]:
        """Return the nodes that got a token: a drafter may know fewer, or have no slot for their parents."""
        return [node for node in self.nodes if node.token >= 0]


Tree = FreeTree[PlanT] | FixedTree[PlanT]
Parents = tuple[Tree[PlanT], Sequence[Node]]  # nodes of a tree whose children are sampled from one row of logits


class TreeBuilder(Generic[PlanT]):
    """The trees of one call: FixedTree if `shape` is given, else FreeTree."""

    def __init__(
        self,
        drafter: TreeDrafter,
        contexts: Sequence[DraftContext],
        plans: Sequence[PlanT],
        branches: int,
        shape: Sequence[tuple[int, int]] | None,
        paid: bool = False,
    ) -> None:
        self.sampler, self.device, self.vocabulary = drafter.sampler, drafter.device, drafter.vocabulary
        self.contexts = contexts
        self.trees: list[Tree[PlanT]] = [
            FreeTree(plan, branches, state, paid) if shape is None else FixedTree(plan, shape, state)
            for state, plan in enumerate(plans)
        ]
        self.is_greedy = self.sampler.is_greedy([plan.context for plan in plans])
        self.num_logits = 0  # rows so far
        self._logits: list[Tensor] = []  # by depth [R, V], if verification reads them

    def put(self, parents: Sequence[Parents[PlanT]], depth: int, logits: Tensor, ids: Tensor | None = None) -> None:
        """Sample children of these nodes from their row of logits [R, V]. ids [U]: the logits [R, U] are of these."""
        sampling = self.sampler.sampling([tree.plan.context for tree, _ in parents])
        most = max(tree.num_children(node) for tree, nodes in parents for node in nodes)
        sampled, logprobs = self.sampler.sample_children(logits, sampling, depth, most)  # [R, most] each
        if ids is not None:
            sampled = to_target_ids(sampled, ids)
        self.add(parents, sampled.tolist(), logprobs.tolist())
        if self.sampler.keeps_logits:
            self._logits.append(logits)

    def add(
        self,
        parents: Sequence[Parents[PlanT]],
        sampled: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
    ) -> None:
        """Add children of these nodes, as `DraftSampler.sample_children` gives them for each row of logits."""
        for (tree, nodes), tokens, child_logprobs in zip(parents, sampled, logprobs, strict=True):
            for node in nodes:
                tree.add(node, tokens, child_logprobs, self.num_logits)
            self.num_logits += 1

    def draft(self) -> DraftBatch:
        """Return the trees, their nodes in the order of their probability, parents first."""
        grown: list[list[Node]] = [[] for _ in self.contexts]
        for tree in self.trees:
            grown[tree.plan.row] = tree.finish()
        indices = [{node: index for index, node in enumerate(nodes)} for nodes in grown]
        parents = [
            [index.get(node.parent, -1) if node.parent is not None else -1 for node in nodes]
            for index, nodes in zip(indices, grown, strict=True)
        ]
        tokens = [[node.token for node in nodes] for nodes in grown]
        if not self.sampler.keeps_logits:
            confidence = [[math.exp(node.logprob) for node in nodes] for nodes in grown]
            return DraftBatch(tokens, parents=parents, confidence=confidence)
        shape = len(self.contexts), max(map(len, grown), default=0), self.vocabulary
        spread = torch.zeros(*shape, device=self.device.torch_device)  # [B, W, V]
        sampled_from = torch.cat(self._logits) if self._logits else spread.new_zeros(0, self.vocabulary)
        for row, nodes in enumerate(grown):
            spread[row, : len(nodes)] = sampled_from[[node.source for node in nodes]]
        return DraftBatch(tokens, parents=parents, logits=spread)


def log(probability: float) -> float:
    """Return the logarithm; -inf for 0."""
    return math.log(probability) if probability > 0 else -math.inf
