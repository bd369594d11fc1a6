"""How the drafts of a network branch: EAGLE-2's trees, or a shape that was settled before anything is drawn.

A tree grows by levels. Each level is one pass over the nodes that are to be expanded and their ancestors, since a token
of a tree sees the others of its batch alone: what the ancestors store a second time is what they stored before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..cache.pages import slots_of
from ..kernels import Batch
from . import Draft, Target, Turn
from .draw import Drawer, named
from .network import Network, Run, page_tables
from .trees import fixed_shape


@dataclass(eq=False)
class Node:
    """A drafted token, or, without a parent, the newest of the text, from which a tree grows."""

    parent: Node | None
    token: int = -1
    depth: int = -1  # nodes between it and the newest token
    share: float = 0.0  # logarithm of its chance, given its parent
    chance: float = 0.0  # the same of all of the path to it
    state: int = -1  # where its state lies among those of the call; -1: it did not run
    source: int = -1  # which of the call's logits it was drawn from
    children: list[Node] = field(default_factory=list)  # those that a settled shape provides for


class FreeTree:
    """A tree that goes where the likeliest tokens are. Its nodes are always the best found so far, best first."""

    def __init__(self, run: Run, branches: int, state: int) -> None:
        self.run, self.branches = run, branches
        self.floor = math.log(run.turn.floor) if run.turn.floor > 0 else -math.inf
        self.onward = math.log(run.turn.onward) if run.turn.onward > 0 else -math.inf
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
        # Stable, and a child is added after its parent and is never likelier: what is cut off has nothing below it,
        # and what would grow from the last node has no place.
        self.nodes.sort(key=lambda node: -node.chance)
        del self.nodes[self.run.width :]
        inner = (node for node in self.nodes[: self.run.width - 1] if node.depth == depth)
        return [node for node in inner if node.chance >= self.onward][: self.branches]

    def finish(self) -> list[Node]:
        return self.nodes


class SettledTree:
    """A tree whose shape does not depend on its tokens: rejection must not see which of them was worth its place."""

    def __init__(self, run: Run, shape: Sequence[tuple[int, int]], state: int) -> None:
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


Tree = FreeTree | SettledTree


class TreeGrowth:
    """Drafts the trees of one call."""

    def __init__(self, network: Network, target: Target, width: int, branches: int, levels: int) -> None:
        self.network, self.device, self.drawer = network, target.device, Drawer(target)
        self.page_size, self.vocabulary = target.page_size, target.model.config.vocabulary
        self.branches, self.levels = branches, levels
        self.shape = fixed_shape(width, branches, levels) if self.drawer.keeps else None

    def grow(self, turns: Sequence[Turn], runs: Sequence[Run], states: Tensor, places: Tensor) -> Draft:
        """`states` are those of the pass that read the text, `places` [R] where in them each run's draft begins."""
        active = [at for at, run in enumerate(runs) if run.width]
        trees = [self._plant(runs[at], state) for state, at in enumerate(active)]
        logits: list[Tensor] = []
        if trees:
            self._raise(trees, states[places[active].long()], logits)
        return self._draft(turns, trees, logits)

    def _plant(self, run: Run, state: int) -> Tree:
        return FreeTree(run, self.branches, state) if self.shape is None else SettledTree(run, self.shape, state)

    def _raise(self, trees: list[Tree], states: Tensor, kept: list[Tensor]) -> None:
        """Level by level. states [R, S]: of the newest tokens, then of all nodes that ran."""
        expanded = [(tree, [tree.root]) for tree in trees]
        drawn = 0
        for depth in range(self.levels):
            asking = [(tree, node) for tree, nodes in expanded for node in nodes]
            turns = [tree.run.turn for tree, _ in asking]
            ids = self.network.ids if self.drawer.likeliest(turns) else None
            say = self.network.logits if ids is None else self.network.scores
            logits = say(states[[node.state for _, node in asking]])  # [expanded, V or U]
            most = max(tree.wanted(node) for tree, node in asking)
            found, logprobs = self.drawer.branch(logits, self.drawer.choice(turns), depth, most)
            if ids is not None:
                found = named(found, ids)
            tokens, shares = found.tolist(), logprobs.tolist()
            for at, (tree, node) in enumerate(asking):
                tree.add(node, tokens[at], shares[at], drawn + at)
            if self.drawer.keeps:
                kept.append(logits)
            drawn += len(asking)
            chosen = [(tree, tree.inner(depth)) for tree in trees]
            if depth + 1 < self.levels:
                expanded = [(tree, nodes) for tree, wish in chosen if (nodes := self._fitting(tree, wish, depth))]
                if not expanded:
                    return
                states = torch.cat([states, self._run(expanded, states)])

    def _fitting(self, tree: Tree, wish: list[Node], depth: int) -> list[Node]:
        """Those that the context and the request's pages have room for, their ancestors included."""
        turn, nodes = tree.run.turn, list[Node]()
        if turn.computed + 1 + depth >= self.network.context:
            return nodes
        room = len(turn.request.pages) * self.page_size - turn.computed - 1
        lines: set[Node] = set()
        for node in wish:
            longer = lines | set(line(node))
            if len(longer) <= room:
                lines = longer
                nodes.append(node)
        return nodes

    def _run(self, expanded: list[tuple[Tree, list[Node]]], states: Tensor) -> Tensor:
        """One pass over these nodes and their ancestors; the states of the nodes alone [expanded, S]."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        parents: list[int] = []
        before: list[int] = []  # where the state lies that each reads
        starts, rows = [0], list[int]()
        ready = states.shape[0]
        for tree, nodes in expanded:
            lines = {each for node in nodes for each in line(node)}
            turn = tree.run.turn
            first = turn.computed + 1 - tree.run.shift  # as the network sees it
            places: dict[Node | None, int] = {}
            for node in (each for each in tree.nodes if each in lines):  # parents first
                parent = node.parent
                assert parent is not None
                parents.append(places.get(parent, -1))
                places[node] = len(tokens)
                tokens.append(node.token)
                positions.append(first + node.depth)
                before.append(parent.state)
            where = range(turn.computed + 1, turn.computed + 1 + len(places))
            slots += slots_of(turn.request.pages, where, self.page_size)
            starts.append(len(tokens))
            for node in nodes:
                rows.append(places[node])
                node.state = ready + len(rows) - 1
        upload = self.device.upload
        ids = [upload(each, torch.int32) for each in (tokens, positions, slots, starts)]
        tables = page_tables([tree.run.pages for tree, _ in expanded], self.device)
        batch = Batch(ids[0], ids[1], ids[2], ids[3], tables, upload(parents, torch.int32))
        features = self.network.feedback(states[before]) if self.network.features else None
        return self.network.run(batch, features)[rows]

    def _draft(self, turns: Sequence[Turn], trees: list[Tree], logits: list[Tensor]) -> Draft:
        grown: list[list[Node]] = [[] for _ in turns]
        for tree in trees:
            grown[tree.run.row] = tree.finish()
        places = [{node: at for at, node in enumerate(nodes)} for nodes in grown]
        parents = [
            [place.get(node.parent, -1) if node.parent is not None else -1 for node in nodes]
            for place, nodes in zip(places, grown, strict=True)
        ]
        tokens = [[node.token for node in nodes] for nodes in grown]
        if not self.drawer.keeps:
            shares = [[math.exp(node.share) for node in nodes] for nodes in grown]
            return Draft(tokens, parents=parents, confidence=shares)
        shape = len(turns), max(map(len, grown), default=0), self.vocabulary
        spread = torch.zeros(*shape, device=self.device.place)  # [B, W, V]
        drawn_from = torch.cat(logits) if logits else spread.new_zeros(0, self.vocabulary)  # [expanded, V]
        for row, nodes in enumerate(grown):
            spread[row, : len(nodes)] = drawn_from[[node.source for node in nodes]]
        return Draft(tokens, parents=parents, logits=spread)


def line(node: Node) -> list[Node]:
    """The node and its ancestors, the newest token of the text excluded."""
    found: list[Node] = []
    while node.parent is not None:
        found.append(node)
        node = node.parent
    return found
