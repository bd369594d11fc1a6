"""Draft trees: the best of their size, for every size."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import UserError
from outrider.speculation.drafters.tree_builder import (
    FIRST_RATE,
    RANK_DECAY,
    GrownTree,
    best_first,
    fixed_shape,
    product_tree,
    read_paths,
)

probs = st.floats(0.01, 1.0)
candidates = st.lists(st.lists(probs, min_size=1, max_size=3), min_size=1, max_size=3).map(
    lambda levels: [list(enumerate(sorted(level, reverse=True))) for level in levels]
)


def wholes(tree: GrownTree[int]) -> list[float]:
    """The chance of all of the path to each."""
    found: list[float] = []
    for parent, prob in zip(tree.parents, tree.probabilities, strict=True):
        found.append(prob * (1.0 if parent < 0 else found[parent]))
    return found


def paths(tree: GrownTree[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for parent, item in zip(tree.parents, tree.items, strict=True):
        found.append((*(() if parent < 0 else found[parent]), item))
    return found


def every(levels: list[list[tuple[int, float]]]) -> list[float]:
    """The chances of all paths of all lengths, best first."""
    found = []
    for depth in range(1, len(levels) + 1):
        for path in product(*levels[:depth]):
            whole = 1.0
            for _, prob in path:
                whole *= prob
            found.append(whole)
    return sorted(found, reverse=True)


@given(candidates, st.integers(0, 45))
def test_no_tree_of_the_size_is_better(levels: list[list[tuple[int, float]]], width: int) -> None:
    tree = product_tree(levels, width)
    assert wholes(tree) == every(levels)[:width]
    assert all(parent < index for index, parent in enumerate(tree.parents))
    assert len(set(paths(tree))) == len(tree.items)
    for path, prob in zip(paths(tree), tree.probabilities, strict=True):
        assert prob == levels[len(path) - 1][path[-1]][1]


@given(candidates, st.integers(0, 45), st.integers(0, 45))
def test_a_bigger_tree_begins_with_the_smaller(levels: list[list[tuple[int, float]]], small: int, more: int) -> None:
    less, whole = product_tree(levels, small), product_tree(levels, small + more)
    assert [part[:small] for part in whole] == [list(part) for part in less]


def test_among_equals_the_first_comes_first() -> None:
    levels = [[(7, 0.5), (8, 0.5)], [(7, 1.0), (8, 1.0)]]
    assert paths(product_tree(levels, 6)) == [(7,), (8,), (7, 7), (7, 8), (8, 7), (8, 8)]


def test_children_may_depend_on_the_path() -> None:
    words = {"": "ab", "a": "xy", "b": "", "ax": "z"}
    tree = best_first(
        [("a", 0.6), ("b", 0.4)],
        lambda path: [(path + letter, 0.9 / len(words.get(path, ""))) for letter in words.get(path, "")],
        9,
    )
    assert tree.items == ["a", "b", "ax", "ay", "axz"]
    assert tree.parents == [-1, -1, 0, 0, 2]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 6))
def test_a_fixed_shape_is_a_product_of_ranks(width: int, branches: int, levels: int) -> None:
    shape = fixed_shape(width, branches, levels)
    ranks = [[(rank, FIRST_RATE * RANK_DECAY**rank) for rank in range(branches)]] * levels
    tree = product_tree(ranks, width)
    assert shape == list(zip(tree.parents, tree.items, strict=True))
    for index, (parent, rank) in enumerate(shape):  # siblings are listed in the order of their ranks, without gaps
        assert [r for p, r in shape[:index] if p == parent] == list(range(rank))
    assert shape[: width // 2] == fixed_shape(width // 2, branches, levels)


def test_one_branch_is_a_chain() -> None:
    assert fixed_shape(4, 1) == [(-1, 0), (0, 0), (1, 0), (2, 0)]
    assert fixed_shape(4, 1, 2) == [(-1, 0), (0, 0)]
    assert len(fixed_shape(40, 2, 3)) == 14


def test_paths_as_users_write_them() -> None:
    assert read_paths("0/1/0.0/0.1/0.0.2") == [(0,), (1,), (0, 0), (0, 1), (0, 0, 2)]
    assert read_paths("1.0/0/1") == [(0,), (1,), (1, 0)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0/x", "expected paths of ranks"),
        ("0//1", "expected paths of ranks"),
        ("0/0.1/0", "has the path `0` twice"),
        ("0/-1", "has the path `-1` twice or below 0"),
        ("0/1.2", "has the path `1.2` and lacks `1`"),
    ],
)
def test_paths_that_are_no_tree_are_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_paths(text)
