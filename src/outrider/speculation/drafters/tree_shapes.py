"""How trees of guesses grow: best first, by the chance that all of the path to a token is kept.

A token's chance is that of its parent times its own, so it never outruns its parent: whatever the size, the best tokens
form a tree, and a bigger tree begins with the smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from ...errors import UserError

LIKELY = 0.6  # a drafter's first guess, where nothing is known of it
FALL = 0.35  # each further one beside it, as a part of the one before

Item = TypeVar("Item")


class Grown(NamedTuple, Generic[Item]):
    """A tree, the likeliest paths first and parents before their children."""

    items: list[Item]
    parents: list[int]  # the place of the item before each; -1: the root
    chances: list[float]  # of each, given its parent


def best_first(
    roots: Iterable[tuple[Item, float]], children: Callable[[Item], Iterable[tuple[Item, float]]], width: int
) -> Grown[Item]:
    """The `width` likeliest items. Each comes with its chance, at most 1, given its parent; among equals the first."""
    waiting: list[tuple[float, int, int, float, Item]] = []  # a heap; the serial numbers make it stable
    serial = 0
    grown: Grown[Item] = Grown([], [], [])
    whole, parent, found = 1.0, -1, roots
    while True:
        for item, chance in found:
            heappush(waiting, (-whole * chance, serial, parent, chance, item))
            serial += 1
        if not waiting or len(grown.items) >= width:
            return grown
        negative, _, parent, chance, item = heappop(waiting)
        grown.items.append(item)
        grown.parents.append(parent)
        grown.chances.append(chance)
        whole, parent, found = -negative, len(grown.items) - 1, children(item)


def product_tree(levels: Sequence[Sequence[tuple[int, float]]], width: int) -> Grown[int]:
    """The best `width` tokens where each depth has its own candidates (token, chance), whatever the path to them."""

    def below(depth: int) -> list[tuple[tuple[int, int], float]]:
        if depth == len(levels):
            return []
        return [((depth, token), chance) for token, chance in levels[depth]]

    grown = best_first(below(0), lambda item: below(item[0] + 1), width)
    return Grown([token for _, token in grown.items], grown.parents, grown.chances)


def fixed_shape(width: int, branches: int, levels: int | None = None) -> list[tuple[int, int]]:
    """A tree for drafts whose selection may not look at them: parent, and rank among its children, of each token."""
    ranks = [(rank, LIKELY * FALL**rank) for rank in range(branches)]
    grown = product_tree([ranks] * min(width, levels or width), width)
    return list(zip(grown.parents, grown.items, strict=True))


def read_paths(text: str) -> list[tuple[int, ...]]:
    """A tree as users write it, parents first: paths of ranks, such as `0/0.0/0.1/1`."""
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
