"""Routing of requests to replicas, and settings of the deployment, without Ray."""

from __future__ import annotations

import json
import random
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import UserError
from outrider.scale.router import MAX_BLOCKS, MAX_HOLDERS, PrefixTable, RoutingHints, choose, prefix_blocks
from outrider.scale.settings import ScaleSettings, read_settings

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("a", "b", "c", "d", "e", "f")
BLOCKS = st.lists(st.integers(0, 12).map(lambda number: bytes([number])), max_size=8)
LOADS = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 20), max_size=6)
HISTORY = st.lists(st.tuples(BLOCKS, st.sampled_from(NAMES)), max_size=12)


def filled(history: list[tuple[list[bytes], str]], capacity: int = 1000) -> PrefixTable:
    table = PrefixTable(capacity)
    for blocks, replica in history:
        table.remember(blocks, replica)
    return table


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


@given(HISTORY, BLOCKS, LOADS, st.integers(0, 5), st.integers(0, 9))
def test_every_replica_is_listed_once(history, blocks, loads, imbalance, seed) -> None:
    order = choose(filled(history), RoutingHints(tuple(blocks)), loads, imbalance, random.Random(seed))
    assert sorted(order) == sorted(loads)


@given(HISTORY, BLOCKS, LOADS.filter(bool), st.integers(0, 5), st.integers(0, 9))
def test_prefix_holders_come_first_while_the_load_is_balanced(history, blocks, loads, imbalance, seed) -> None:
    table = filled(history)
    first = choose(table, RoutingHints(tuple(blocks)), loads, imbalance, random.Random(seed))[0]
    depths = table.depths(blocks)
    fair = {name for name in loads if loads[name] <= min(loads.values()) + imbalance}
    holders = fair & depths.keys()
    if holders:
        assert first in holders and depths[first] == max(depths[name] for name in holders)
    else:
        # Of two that are drawn the busiest can win only against one that is as busy.
        most = max(loads.values())
        assert len(loads) == 1 or loads[first] < most or list(loads.values()).count(most) > 1


@given(BLOCKS.filter(bool), LOADS.filter(lambda loads: len(loads) > 1), st.integers(0, 5), st.integers(0, 9))
def test_a_prefix_holder_that_is_too_busy_is_not_preferred(blocks, loads, imbalance, seed) -> None:
    busiest = max(loads, key=loads.__getitem__)
    table = filled([(blocks, busiest)])
    first = choose(table, RoutingHints(tuple(blocks)), loads, imbalance, random.Random(seed))[0]
    if loads[busiest] - min(loads.values()) > imbalance:
        assert first != busiest or list(loads.values()).count(loads[busiest]) > 1
    else:
        assert first == busiest


@given(HISTORY, BLOCKS, LOADS, st.sets(st.sampled_from(NAMES)), st.integers(0, 9))
def test_replicas_to_avoid_come_last(history, blocks, loads, avoid, seed) -> None:
    order = choose(filled(history), RoutingHints(tuple(blocks), frozenset(avoid)), loads, 2, random.Random(seed))
    fit = [name for name in order if name not in avoid]
    assert order[: len(fit)] == fit


def test_a_new_prefix_goes_to_the_less_loaded_of_two_replicas() -> None:
    for seed in range(20):
        assert choose(PrefixTable(), RoutingHints((b"new",)), {"a": 3, "b": 1}, 8, random.Random(seed)) == ["b", "a"]


def test_new_prefixes_are_spread_over_equal_replicas() -> None:
    firsts = [
        choose(PrefixTable(), RoutingHints(), {"a": 0, "b": 0, "c": 0}, 8, random.Random(seed))[0]
        for seed in range(300)
    ]
    assert all(60 < firsts.count(name) < 140 for name in "abc")


@given(HISTORY, st.integers(1, 6))
def test_the_table_stays_within_its_capacity(history, capacity) -> None:
    table = filled(history, capacity)
    assert len(table) <= capacity
    for blocks, _ in history:
        assert len(table.depths(blocks[:1])) <= MAX_HOLDERS


@given(HISTORY, st.sampled_from(NAMES))
def test_a_dead_replica_is_removed_from_the_table(history, dead) -> None:
    table = filled(history)
    before = [table.depths(blocks) for blocks, _ in history]
    table.forget(dead)
    for (blocks, _), depths in zip(history, before, strict=True):
        assert table.depths(blocks) == {name: depth for name, depth in depths.items() if name != dead}


def test_recent_blocks_stay_and_prompt_ends_are_dropped_first() -> None:
    table = PrefixTable(4)
    table.remember([b"1", b"2"], "a")
    table.remember([b"3", b"4"], "b")
    table.remember([b"1", b"2"], "a")
    table.remember([b"5"], "c")
    assert table.depths([b"1", b"2"]) == {"a": 2}
    assert table.depths([b"3"]) == {"b": 1}
    assert table.depths([b"4"]) == {}


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60), st.integers(1, 16))
def test_prompts_share_the_blocks_of_their_common_prefix(start, one, other, size) -> None:
    first, second = prefix_blocks(body(prompt=start + one), size), prefix_blocks(body(prompt=start + other), size)
    shared = len(start) // size
    assert first[:shared] == second[:shared]
    same = (start + one)[: (shared + 1) * size] == (start + other)[: (shared + 1) * size]
    assert same or first[shared : shared + 1] != second[shared : shared + 1] or not first[shared:]
    assert len(first) == len(start + one) // size


def test_the_hash_of_a_block_depends_on_all_before_it() -> None:
    one, other = prefix_blocks(body(prompt="aaaabbbb"), 4), prefix_blocks(body(prompt="ccccbbbb"), 4)
    assert one[1] != other[1]


def test_token_ids_and_lists_of_prompts_have_blocks() -> None:
    ids = list(range(100))
    assert len(prefix_blocks(body(prompt=ids), 40)) == 10
    assert prefix_blocks(body(prompt=[ids, [7]]), 40) == prefix_blocks(body(prompt=ids), 40)
    assert prefix_blocks(body(prompt=["hello there", "x"]), 4) == prefix_blocks(body(prompt="hello there"), 4)
    assert prefix_blocks(body(prompt=[12, 3] * 20), 40) != prefix_blocks(body(prompt=[1, 23] * 20), 40)


def test_a_growing_conversation_keeps_its_blocks() -> None:
    talk = [{"role": "system", "content": "Be brief. " * 20}, {"role": "user", "content": "Why?"}]
    longer = [*talk, {"role": "assistant", "content": [{"type": "text", "text": "Because."}]}]
    before, after = prefix_blocks(body(messages=talk), 32), prefix_blocks(body(messages=longer), 32)
    assert len(before) >= 6 and after[: len(before)] == before
    with_tools = prefix_blocks(body(messages=talk, tools=[{"type": "function"}]), 32)
    assert not set(with_tools) & set(before)


def test_prompt_cache_key_separates_conversations() -> None:
    short = prefix_blocks(body(prompt="hi", prompt_cache_key="one"), 64)
    assert len(short) == 1
    assert prefix_blocks(body(prompt="hi" * 64, prompt_cache_key="one"), 64)[0] == short[0]
    assert not set(prefix_blocks(body(prompt="hi" * 64), 64)) & set(
        prefix_blocks(body(prompt="hi" * 64, prompt_cache_key="two"), 64)
    )


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"1",
        b'{"prompt": {}}',
        b'{"messages": [1, {}]}',
        b'{"prompt": [[]]}',
        b'{"prompt": []}',
    ],
)
def test_an_invalid_body_has_few_blocks_and_raises_nothing(broken: bytes) -> None:
    assert prefix_blocks(broken, 64) == []


def test_the_number_of_blocks_is_limited() -> None:
    assert len(prefix_blocks(body(prompt="x" * 4 * (MAX_BLOCKS + 100)), 4)) == MAX_BLOCKS


def test_arguments_override_the_environment() -> None:
    settings = read_settings(
        {"max_replicas": "3", "speculate": "ngram", "api_keys": "one, two", "playground": "false", "cpus": 2},
        {"OUTRIDER_SCALE_MAX_REPLICAS": "5", "OUTRIDER_SCALE_MODEL": "m", "OUTRIDER_CACHE": "/x"},
    )
    assert (settings.max_replicas, settings.model, settings.scales) == (3, "m", True)
    assert settings.engine_options == {"threads": 2, "speculate": "ngram"}
    assert settings.server.api_keys == ("one", "two") and not settings.server.playground


def test_settings_of_a_config_file_keep_their_types() -> None:
    own = {"speculative_config": {"method": "ngram"}, "threads": None, "kv_cache_dtype": "int8"}
    settings = read_settings({"min_replicas": 2, "max_replicas": 2, **own}, {})
    assert not settings.scales
    options = {"threads": None, "speculative_config": {"method": "ngram"}, "kv_dtype": "int8"}
    assert settings.engine_options == options


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_replica": 2}, "`max_replica` is not a setting of this deployment: did you mean `max_replicas`?"),
        ({"port": 80}, "`port` does not apply to this deployment: Ray Serve listens, not the replica"),
        ({"block": "few"}, "`block` is `few`: expected `int`, got `str`"),
        ({"block": 0}, "`block` is 0: it must be at least 1"),
        ({"min_replicas": 2}, "`min_replicas` is 2, above `max_replicas` (1): raise `max_replicas` too"),
        ({"imbalance": -1}, "`imbalance` is -1: it must be 0 or more"),
        ({"target_ongoing_requests": 0}, "`target_ongoing_requests` is 0.0: it must be above 0"),
        ({"speculative_config": "{oops"}, "`speculative_config` is `{oops`: JSON is malformed"),
        ({"max_waiting": 0}, "`max_waiting` is 0: it must be at least 1"),
    ],
)
def test_an_invalid_setting_is_named(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        read_settings(arguments, {})
    assert str(refusal.value).startswith(sentence)


def test_the_documentation_lists_every_setting_with_its_default() -> None:
    page = (ROOT / "docs" / "scale.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.+?) \|", page, flags=re.MULTILINE)
    listed = {}
    for names, defaults in rows:
        listed.update(zip(re.findall(r"\w+", names), defaults.replace("`", "").split(", "), strict=False))
    for each in fields(ScaleSettings):
        if each.default is not MISSING:
            assert listed[each.name] == str(each.default), each.name


def test_the_example_config_builds_a_deployment() -> None:
    (application,) = yaml.safe_load((ROOT / "examples" / "serve.yaml").read_text())["applications"]
    assert application["import_path"] == "outrider.scale:app"
    assert read_settings(application["args"], {}).scales


def test_the_manifests_in_the_documentation_are_valid() -> None:
    page = (ROOT / "docs" / "scale.md").read_text()
    manifests = [
        each for text in re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL) for each in yaml.safe_load_all(text)
    ]
    assert [each["kind"] for each in manifests] == ["Deployment", "Service", "InferencePool"]
