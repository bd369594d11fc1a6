"""Every method, as the laws run over it, and the choice of combinations for the slow reference backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

import tiny_heads
from laws.mix import with_options
from outrider.speculation import available


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests marked `pairwise`, run on the reference backend few that hold every value of every parameter.

    The other backends run all combinations, so that every pair of values is tested, the backend among them.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairwise"):
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped: set[pytest.Item] = set()
    for group in groups.values():
        slow = [item for item in group if item.callspec.params["tiny_llm"] == "reference"]  # type: ignore[attr-defined]
        if len(slow) < len(group):
            dropped.update(set(slow).difference(covering(slow)))
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]


def covering(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Choose one after the other the item with most values that no chosen one has, among equals with the rarest."""
    params = {item: item.callspec.params.items() for item in items}  # type: ignore[attr-defined]
    values = {item: {(name, repr(value)) for name, value in own} for item, own in params.items()}
    every, used, chosen = set().union(*values.values()), Counter[tuple[str, str]](), []
    while missing := every - used.keys():
        uses = {item: sum(used[each] for each in values[item]) for item in items}
        chosen.append(max(items, key=lambda item: (len(values[item] & missing), -uses[item])))
        used.update(values[chosen[-1]])
    return chosen


@pytest.fixture(scope="module", params=available())
def method(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A method with what it needs: a tiny head or draft model where it reads one."""
    name: str = request.param
    return with_options(name, adaptive="false", **tiny_heads.make(name, tmp_path_factory.mktemp(name)))
