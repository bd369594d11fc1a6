"""How the drafts of a network branch: EAGLE-2's trees, or a shape that was settled before anything is drawn.

A tree grows by levels. Each level is one pass over the nodes that are to be expanded and their ancestors, since a token
of a tree sees the others of its batch alone: what the ancestors store a second time is what they stored before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...cache.pages import slots_of
from ...kernels import Batch
from ..interface import DraftBatch, DraftContext, Target
from .draft_sampler import DraftSampler
from .network import Network, Run, page_tables
from .tree_builder import Grove, Node, Tree
from .tree_shapes import fixed_shape


class TreeGrowth:
    """Drafts the trees of one call."""

    def __init__(self, network: Network, target: Target, width: int, branches: int, levels: int) -> None:
        self.network, self.device, self.drawer = network, target.device, DraftSampler(target)
        self.page_size, self.vocabulary = target.page_size, target.model.config.vocabulary
        self.branches, self.levels = branches, levels
        self.shape = fixed_shape(width, branches, levels) if self.drawer.keeps else None

    def grow(self, contexts: Sequence[DraftContext], runs: Sequence[Run], states: Tensor, places: Tensor) -> DraftBatch:
        """`states` are those of the pass that read the text, `places` [R] where in them each run's draft begins."""
        active = [at for at, run in enumerate(runs) if run.width]
        grove = Grove(self, contexts, [runs[at] for at in active], self.branches, self.shape)
        if active:
            self._raise(grove, states[places[active].long()])
        return grove.draft()

    def _raise(self, grove: Grove[Run], states: Tensor) -> None:
        """Level by level. states [R, S]: of the newest tokens, then of all nodes that ran."""
        expanded = [(tree, [tree.root]) for tree in grove.trees]
        ids = self.network.ids if grove.likeliest else None
        say = self.network.logits if ids is None else self.network.scores
        for depth in range(self.levels):
            asking = [(tree, [node]) for tree, nodes in expanded for node in nodes]
            logits = say(states[[node.state for _, nodes in asking for node in nodes]])  # [expanded, V or U]
            grove.put(asking, depth, logits, ids)
            if depth + 1 == self.levels:
                return
            chosen = [(tree, self._fitting(tree, tree.inner(depth), depth)) for tree in grove.trees]
            expanded = [(tree, nodes) for tree, nodes in chosen if nodes]
            if not expanded:
                return
            states = torch.cat([states, self._run(expanded, states)])

    def _fitting(self, tree: Tree[Run], wish: list[Node], depth: int) -> list[Node]:
        """Those that the context and the request's pages have room for, their ancestors included."""
        context, nodes = tree.run.context, list[Node]()
        if context.computed + 1 + depth >= self.network.context:
            return nodes
        room = len(context.request.pages) * self.page_size - context.computed - 1
        lines: set[Node] = set()
        for node in wish:
            longer = lines | set(line(node))
            if len(longer) <= room:
                lines = longer
                nodes.append(node)
        return nodes

    def _run(self, expanded: list[tuple[Tree[Run], list[Node]]], states: Tensor) -> Tensor:
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
            context = tree.run.context
            first = context.computed + 1 - tree.run.shift  # as the network sees it
            places: dict[Node | None, int] = {}
            for node in (each for each in tree.nodes if each in lines):  # parents first
                parent = node.parent
                assert parent is not None
                parents.append(places.get(parent, -1))
                places[node] = len(tokens)
                tokens.append(node.token)
                positions.append(first + node.depth)
                before.append(parent.state)
            where = range(context.computed + 1, context.computed + 1 + len(places))
            slots += slots_of(context.request.pages, where, self.page_size)
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


def line(node: Node) -> list[Node]:
    """The node and its ancestors, the newest token of the text excluded."""
    found: list[Node] = []
    while node.parent is not None:
        found.append(node)
        node = node.parent
    return found
