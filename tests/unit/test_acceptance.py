"""The figures of `bench acceptance` beside a count of their own: what was drafted, held against the plain text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

import pytest

import tiny
import tiny_heads
from outrider import LLM, SamplingParams, UserError
from outrider.bench.acceptance import AcceptanceConfig, figures, full_width, mean, measure
from outrider.bench.charts import acceptance_chart
from outrider.types import Draft, SpecStats

SETS = {
    "first": [tiny.prompt(9, seed=1), tiny.prompt(14, seed=2)],
    "second": [tiny.prompt(5, seed=seed) for seed in (3, 4, 5)],
}
DRAFTERS = {
    "chain": ("eagle3", "width=4"),
    "tree": ("eagle3", "width=9,branches=3"),
    "block": ("dspark", "width=5"),
    "block tree": ("dspark", "width=9,branches=3"),
    "heads": ("medusa", "width=7,branches=2"),
    "itself": ("draft_model", "width=4"),
    "found": ("ngram", "width=3"),
}
Paths = list[tuple[int, ...]]  # of each node of a draft, the tokens that lead to it


@dataclass
class Spied:
    """Engines over a tiny model that write down what is drafted."""

    folder: Path
    ends: frozenset[int] = frozenset()
    options: dict[str, Any] = field(default_factory=lambda: {"backend": "cpu"})
    drafts: dict[tuple[int, int], Paths] = field(default_factory=dict)  # by a request's number and its length

    def open(self, drafter: str, tokens: int) -> LLM:
        llm = self._open(speculate=drafter, max_step_tokens=tokens, max_requests=2)
        (proposer,) = llm.engine.spec_manager.methods.values()
        propose = proposer.propose

        def watched(contexts, last, hidden):  # type: ignore[no-untyped-def]
            draft = propose(contexts, last, hidden)
            for row, context in enumerate(contexts):
                tokens = [int(token) for token in draft.tokens[row]]
                count = len(tokens) if draft.lengths is None else draft.lengths[row]
                parents = None if draft.parents is None else draft.parents[row]
                found: Paths = []
                for position, token in enumerate(tokens[: min(count, context.num_draft_tokens)]):
                    before = position - 1 if parents is None else int(parents[position])
                    found.append((*found[before], token) if before >= 0 else (token,))
                if context.new_tokens:
                    self.drafts[int(context.request.parent_id), context.length] = found
            return draft

        proposer.propose = watched  # type: ignore[method-assign]
        return llm

    def plain(self, params: SamplingParams) -> dict[str, list[list[int]]]:
        llm = self._open()
        return {
            name: [output.completions[0].token_ids for output in llm.generate(prompts, params)]
            for name, prompts in SETS.items()
        }

    def _open(self, **options: Any) -> LLM:
        llm = LLM(str(self.folder), **{**self.options, **options})
        llm.engine.input_processor.end_tokens = self.ends
        return llm


def counted(spied: Spied, params: SamplingParams) -> dict[str, dict[str, Any]]:
    """All of it once more, from the drafts and from the texts of plain decoding alone."""
    found: dict[str, dict[str, Any]] = {}
    number = 0
    for name, texts in spied.plain(params).items():
        taus: list[int] = []
        deepest = drafted = plain = 0
        for prompt, text in zip(SETS[name], texts, strict=True):
            plain += 1  # the step of the prompt
            position = 1
            while position < len(text):
                most = params.max_tokens - position - 1  # the last token that fits is the target's own
                draft = [path for path in spied.drafts[number, len(prompt) + position] if len(path) <= most]
                # The token that ends the text counts as the target's own, drafted or not.
                tau = max((len(path) for path in draft if tuple(text[position:-1][: len(path)]) == path), default=0)
                taus += [tau] if draft else []
                plain += not draft
                drafted += len(draft)
                deepest = max([deepest, *map(len, draft)])
                position += tau + 1
            number += 1
        reached = [sum(tau >= at for tau in taus) for at in range(deepest + 1)]
        given = [after / before if before else None for before, after in pairwise(reached)]
        found[name] = {
            "prompts": len(texts),
            "tokens": sum(map(len, texts)),
            "steps": len(taus),
            "plain_steps": plain,
            "drafted": drafted,
            "accepted": sum(taus),
            "mean_acceptance_length": 1 + sum(taus) / len(taus),
            "draft_acceptance_rate": sum(taus) / drafted,
            "acceptance_rates": [count / len(taus) for count in reached[1:]],
            "conditional_rates": given,
            "acceptance_histogram": [taus.count(tau) for tau in range(deepest + 1)],
            "tokens_per_step": 1 + sum(taus) / (len(taus) + plain),
        }
    return found


def run(spied: Spied, drafter: str, params: SamplingParams, **plan: Any) -> dict[str, Any]:
    asked = AcceptanceConfig([drafter], [params.temperature], params.max_tokens, batch=2, **plan)
    (found,) = measure(spied.open, lambda llm: SETS, asked, lambda line: None)
    return found


@pytest.fixture(scope="module", params=DRAFTERS)
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    method, settings = DRAFTERS[request.param]
    made = tiny_heads.make(method, tmp_path_factory.mktemp(request.param))
    return f"{method}:{settings}" + "".join(f",{key}={value}" for key, value in made.items())


def itself(folder: Path) -> str:
    return f"draft_model:model={folder},width=4"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_figures_equal_a_count_by_hand(
    tiny_folder: Callable[..., Path], drafter: str, temperature: float, backend: str = "cpu", length: int = 33
) -> None:
    spied = Spied(tiny_folder(), options={"backend": backend})
    params = SamplingParams(max_tokens=length, temperature=temperature, seed=0)
    found = run(spied, drafter, params)
    for name, expected in counted(spied, params).items():
        assert found["sets"][name] == expected, name
    lengths = [found["sets"][name]["mean_acceptance_length"] for name in SETS]
    assert found["mean"]["mean_acceptance_length"] == pytest.approx(fmean(lengths))
    assert found["mean"]["mean_acceptance_length"] == pytest.approx(1 + sum(found["mean"]["acceptance_rates"]))
    assert found["adaptive"] is False and found["temperature"] == temperature


@pytest.mark.parametrize("drafter", ["tree"], indirect=True)
def test_figures_on_the_reference_backend_equal_a_count_by_hand(tiny_folder: Callable[..., Path], drafter: str) -> None:
    test_figures_equal_a_count_by_hand(tiny_folder, drafter, 0.0, "reference", length=14)


# A head writes ahead in the pages that its text has: after a prompt these may end. Not in the tests that count on it.
OPTIONS = {"backend": "cpu", "page_size": 64}


# A drafter that is always right gives five tokens a step: 1 + 5 + 5 + 3 ends within a block.
@pytest.mark.parametrize(("length", "taus"), [(14, [4, 4, 2]), (11, [4, 4]), (12, [4, 4]), (2, [])])
def test_tokens_after_max_tokens_do_not_count(tiny_folder: Callable[..., Path], length: int, taus: list[int]) -> None:
    spied = Spied(tiny_folder(), options=OPTIONS)
    params = SamplingParams(max_tokens=length, temperature=0, seed=0)
    for one in run(spied, itself(spied.folder), params)["sets"].values():
        prompts = one["prompts"]
        assert one["tokens"] == length * prompts
        assert one["steps"] == len(taus) * prompts
        assert one["accepted"] == one["drafted"] == sum(taus) * prompts
        assert one["plain_steps"] == (length - sum(taus) - len(taus)) * prompts
        assert one["mean_acceptance_length"] == pytest.approx(1 + fmean(taus or [0]))


@pytest.mark.parametrize("inside", [6, 7, 8, 9, 10])
def test_tokens_after_the_end_of_text_do_not_count(tiny_folder: Callable[..., Path], inside: int) -> None:
    """Each text ends with its own token number `inside`, or where another's says so before."""
    spied = Spied(tiny_folder())
    params = SamplingParams(max_tokens=40, temperature=0, seed=0)
    whole = [text for texts in spied.plain(params).values() for text in texts]
    spied.ends = frozenset(text[inside] for text in whole)
    found = run(spied, itself(spied.folder), params)["sets"]
    shorter = spied.plain(params)
    assert max(len(text) for texts in shorter.values() for text in texts) < 40
    for name, expected in counted(spied, params).items():
        assert found[name] == expected, name
        assert found[name]["tokens"] == sum(map(len, shorter[name]))
        assert found[name]["tokens"] == found[name]["steps"] + found[name]["plain_steps"] + found[name]["accepted"]


@pytest.mark.parametrize("drafter", ["chain", "block"], indirect=True)
def test_multi_step_runs_have_the_same_figures(tiny_folder: Callable[..., Path], drafter: str) -> None:
    params = SamplingParams(max_tokens=33, temperature=0, seed=0)
    stepwise, multi_step = (
        run(Spied(tiny_folder(), options={"backend": "cpu", "decode_steps": rounds}), drafter, params)
        for rounds in (1, 4)
    )
    assert multi_step["sets"] == stepwise["sets"]


def test_a_drafter_with_a_cache_has_not_seen_the_answers(tiny_folder: Callable[..., Path]) -> None:
    """Neither those of another temperature, nor those of the plain side, nor from warming up."""
    spied = Spied(tiny_folder())
    plan = AcceptanceConfig(["suffix:width=6", "suffix:width=6"], [0.0, 0.0], max_tokens=20, batch=2, speed=True)
    found = list(measure(spied.open, lambda llm: SETS, plan, lambda line: None))
    assert len({one["mean"]["mean_acceptance_length"] for one in found}) == 1
    assert found[0]["mean"]["mean_acceptance_length"] < 2.5


@pytest.mark.parametrize("drafter", ["itself", "tree"], indirect=True)
def test_speed_changes_no_figure(tiny_folder: Callable[..., Path], drafter: str) -> None:
    spied = Spied(tiny_folder())
    params = SamplingParams(max_tokens=20, temperature=0, seed=0)
    quiet, timed = (run(spied, drafter, params, speed=speed) for speed in (False, True))
    for name, one in timed["sets"].items():
        ratio = one.pop("speedup")
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        assert one == quiet["sets"][name]
    assert timed["mean"].pop("speedup") > 0
    assert timed["mean"] == quiet["mean"]


def test_wide_drafts_of_many_requests_are_not_cut(tiny_folder: Callable[..., Path]) -> None:
    """A step has room for all of them: none is cut because others are drafted for."""
    spied = Spied(tiny_folder())
    prompts = {"many": [tiny.prompt(5, seed=seed) for seed in range(40)]}
    plan = AcceptanceConfig([f"draft_model:model={spied.folder},width=20"], max_tokens=43, batch=40)

    def opened(drafter: str, tokens: int) -> LLM:
        llm = LLM(str(spied.folder), speculate=drafter, max_step_tokens=tokens, max_requests=40, **OPTIONS)
        llm.engine.input_processor.end_tokens = frozenset()
        return llm

    (found,) = measure(opened, lambda llm: prompts, plan, lambda line: None)
    assert found["sets"]["many"]["steps"] == 2 * 40 and found["width"] == 20
    assert found["mean"]["mean_acceptance_length"] == 21
    with pytest.raises(UserError, match="lower `--batch`"):
        list(measure(lambda drafter, tokens: opened(drafter, 300), lambda llm: prompts, plan, lambda line: None))


# ---- small parts ----


def test_drafts_have_full_width_unless_the_user_sets_adaptive() -> None:
    assert full_width("ngram") == "ngram:adaptive=false"
    assert full_width("eagle3:width=7") == "eagle3:width=7,adaptive=false"
    assert full_width("ngram:adaptive=true") == "ngram:adaptive=true"
    with pytest.raises(UserError, match="`none`"):
        full_width("none")


def test_without_drafts_the_mean_acceptance_length_is_1() -> None:
    spec_stats = SpecStats()
    spec_stats.count_plain(7)
    found = figures(spec_stats)
    assert found["mean_acceptance_length"] == 1 and found["steps"] == 0 and found["plain_steps"] == 7
    assert found["acceptance_rates"] == found["conditional_rates"] == [] and found["acceptance_histogram"] == [0]
    spec_stats.count(Draft([5, 6, 7]), [])
    found = figures(spec_stats)
    assert found["acceptance_rates"] == [0, 0, 0] and found["conditional_rates"] == [0, None, None]
    assert found["acceptance_histogram"] == [1, 0, 0, 0]


def test_every_set_counts_the_same_in_the_mean() -> None:
    long, short = SpecStats(), SpecStats()
    for _ in range(9):
        long.count(Draft([1, 2]), [1, 2])
    short.count(Draft([1]), [])
    found = mean([figures(long), figures(short)])
    assert found["mean_acceptance_length"] == 2 and found["acceptance_rates"] == [0.5, 0.5]
    assert found["conditional_rates"] == [0.5, 1.0]


# ---- the picture ----

SVG = "{http://www.w3.org/2000/svg}"


def drawn(tiny_folder: Callable[..., Path], drafters: Sequence[str], temperatures: Sequence[float]) -> tuple[Any, Any]:
    spied = Spied(tiny_folder())
    plan = AcceptanceConfig(drafters, temperatures, max_tokens=20, batch=2)
    found = list(measure(spied.open, lambda llm: SETS, plan, lambda line: None))
    json.dumps(found)
    return found, ElementTree.fromstring(acceptance_chart(found))


def test_the_chart_shows_every_figure(tiny_folder: Callable[..., Path]) -> None:
    drafters = ["ngram:width=3", "suffix:width=4"]
    found, picture = drawn(tiny_folder, drafters, [0.0, 0.9])
    titles = [title.text or "" for title in picture.iter(f"{SVG}title")]
    for one in found:
        who = f"{one['drafter']}, temperature {one['temperature']:g}"
        for name, shown in [*one["sets"].items(), ("mean", one["mean"])]:
            assert f"{who}, {name}: {shown['mean_acceptance_length']:.2f}" in titles
        for depth, rate in enumerate(one["mean"]["acceptance_rates"]):
            assert f"{who}, depth {depth + 1}: {rate:.1%}" in titles
    heights = {}
    for bar in picture.iter(f"{SVG}rect"):
        if "bar" in bar.get("class", ""):
            value = float((bar.find(f"{SVG}title").text or "").rpartition(" ")[2])
            heights[value] = float(bar.get("height")) / value
    assert max(heights.values()) == pytest.approx(min(heights.values()), rel=0.02), "bars as high as their figures"
    assert "href" not in ElementTree.tostring(picture, encoding="unicode")


def test_labels_of_the_chart_are_escaped(tiny_folder: Callable[..., Path]) -> None:
    found, _ = drawn(tiny_folder, ["ngram"], [0.0])
    odd = [replace_drafter(found[0], name) for name in ('a<b>&"c"', "eagle3:model=/deep/down/head,width=2")]
    odd += [replace_drafter(found[0], f"method{number}") for number in range(20)]
    picture = ElementTree.fromstring(acceptance_chart(odd))
    words = [element.text for element in picture.iter(f"{SVG}text")]
    assert 'a<b>&"c"' in words and "eagle3:model=head,width=2" in words
    width = float(picture.get("width"))
    assert all(0 <= float(element.get("x")) < width for element in picture.iter(f"{SVG}text"))


def replace_drafter(found: dict[str, Any], drafter: str) -> dict[str, Any]:
    return {**found, "drafter": drafter}
