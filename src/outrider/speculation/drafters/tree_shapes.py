"""Grow draft trees best first, by the probability that all tokens of a path are accepted.

The probability of a path is that of its parent times that of the token, so it never exceeds its parent's. The best
tokens therefore form a tree, whatever their number, and a larger tree begins with the smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from ...errors import UserError

FIRST_RATE = 0.6  # acceptance rate that is assumed of a drafter's first candidate
RANK_DECAY = 0.35  # that of each further sibling, as a part of the one before

Item = TypeVar("Item")


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
