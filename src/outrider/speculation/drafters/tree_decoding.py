"""Draft trees with a network: as in EAGLE-2, or of a shape that does not depend on the sampled tokens.

A tree grows depth by depth. Each depth is one pass over the nodes to expand and their ancestors, since a token of a
tree attends to tree tokens of its own batch only. The ancestors compute their KV again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...cache.pages import slots_of
from ...input_batch import BatchBuilder
from ..interface import DraftBatch, DraftContext, Target
from .draft_sampler import DraftSampler
from .network import Network, RequestPlan
from .tree_builder import Node, Tree, TreeBuilder
from .tree_shapes import fixed_shape

DEFAULT_DEPTH = 6  # of a tree; each depth costs a pass, and few deeper tokens are accepted


class TreeDecoder:
    """Drafts the trees of one call."""

    def __init__(self, network: Network, target: Target, width: int, branches: int, depth: int) -> None:
        self.network, self.device, self.sampler = network, target.device, DraftSampler(target)
        self.page_size, self.vocabulary = target.page_size, target.model.config.vocabulary
        self.branches, self.depth = branches, depth
        self.shape = fixed_shape(width, branches, depth) if self.sampler.keeps_logits else None

    def draft(self, contexts: Sequence[DraftContext], plans: Sequence[RequestPlan], states: Tensor) -> DraftBatch:
        """Draft a tree for each plan. states [R, S]: of their newest tokens, from the pass that read the text."""
        builder = TreeBuilder(self, contexts, plans, self.branches, self.shape)
        if plans:
            self._grow(builder, states)
        return builder.draft()

    def _grow(self, builder: TreeBuilder[RequestPlan], states: Tensor) -> None:
        """Grow all trees depth by depth. states [R, S]: of the newest tokens, then of all nodes that ran."""
        expanded = [(tree, [tree.root]) for tree in builder.trees]
        ids = self.network.ids if builder.is_greedy else None
        to_logits = self.network.logits if ids is None else self.network.scores
        for depth in range(self.depth):
            parents = [(tree, [node]) for tree, nodes in expanded for node in nodes]
            logits = to_logits(states[[node.state for _, nodes in parents for node in nodes]])  # [expanded, V or U]
            builder.put(parents, depth, logits, ids)
            if depth + 1 == self.depth:
                return
            chosen = [(tree, self._fitting(tree, tree.to_expand(depth), depth)) for tree in builder.trees]
            expanded = [(tree, nodes) for tree, nodes in chosen if nodes]
            if not expanded:
                return
            states = torch.cat([states, self._run(expanded, states)])

    def _fitting(self, tree: Tree[RequestPlan], wanted: list[Node], depth: int) -> list[Node]:
        """Return the nodes that fit, with their ancestors, into the context and the request's pages."""
        context, nodes = tree.plan.context, list[Node]()
        if context.computed + 1 + depth >= self.network.context:
            return nodes
        capacity = len(context.request.pages) * self.page_size - context.computed - 1
        running: set[Node] = set()
        for node in wanted:
            longer = running | set(path_to(node))
            if len(longer) <= capacity:
                running = longer
                nodes.append(node)
        return nodes

    def _run(self, expanded: list[tuple[Tree[RequestPlan], list[Node]]], states: Tensor) -> Tensor:
        """Run these nodes and their ancestors in one pass; return the states of the nodes alone: [expanded, S]."""
        builder = BatchBuilder()
        parent_states: list[int] = []  # row of the state that each token reads
        rows: list[int] = []
        for tree, nodes in expanded:
            self._add(builder, tree, nodes, parent_states, rows, len(states))
        batch, _ = builder.upload(self.device)
        features = self.network.feedback_features(states[parent_states]) if self.network.features else None
        return self.network.run(batch, features)[rows]

    def _add(
        self,
        builder: BatchBuilder,
        tree: Tree[RequestPlan],
        nodes: list[Node],
        parent_states: list[int],
        rows: list[int],
        known_states: int,
    ) -> None:
        """Add a tree's row to the batch, and number the states that its nodes will have."""
        running = {ancestor for node in nodes for ancestor in path_to(node)}
        context, begin = tree.plan.context, len(builder.tokens)
        first = context.computed + 1 - tree.plan.shift  # as the network counts positions
        order = [node for node in tree.nodes if node in running]  # parents first
        index: dict[Node | None, int] = {node: begin + offset for offset, node in enumerate(order)}
        for node in order:
            assert node.parent is not None
            parent_states.append(node.parent.state)
        positions = range(context.computed + 1, context.computed + 1 + len(order))
        builder.add(
            [node.token for node in order],
            [first + node.depth for node in order],
            slots_of(context.request.pages, positions, self.page_size),
            tree.plan.pages,
            [index.get(node.parent, -1) for node in order],
        )
        for node in nodes:
            rows.append(index[node])
            node.state = known_states + len(rows) - 1


def path_to(node: Node) -> list[Node]:
    """Return the node and its ancestors, without the root."""
    path: list[Node] = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path
