"""The output distribution is the target's: samples of the engine against exact probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from backends import backends
from laws.dice import TOKENS
from outrider import LLM, SamplingParams
from outrider.diagnostics import distribution
from outrider.request import Request
from outrider.speculation.adaptive import AdaptiveController

PROMPT = [46, 18]
# Answers of a test. By `distribution.noncentrality`, 770 detect with probability 0.9 a shape or a length of drafts that
# depends on sampled tokens, and siblings that are verified wrongly. Noise that a draft shares with the residual needs
# 3500 (rejection) and 4150 (block); it exists in sampled chains only, for in trees its effect is too small.
SAMPLES = 1000
SHARED_NOISE_SAMPLES = 4200
REFERENCE_SAMPLES = 300  # the reference backend is slow; its operations have tests of exact probabilities


def excess(llm: LLM, samples: int = SAMPLES, seed: int | None = 0) -> tuple[float, float]:
    """Return the largest statistic over its threshold (above 1: wrong distribution) and the tokens per step."""
    params = SamplingParams(temperature=1, allowed_token_ids=TOKENS, seed=seed)
    if llm.resolved.backend == "reference":
        samples = REFERENCE_SAMPLES
    drawn = distribution.draw(llm, PROMPT, params, samples)
    found = distribution.comparisons(drawn.counts, distribution.expected(llm, PROMPT, params))
    return max(one.excess for one in found.values()), drawn.spec_stats.tokens_per_step


# The reference backend is slow: it runs the cases with random numbers of their own only.
FAST = backends("cpu")
SLOW = [backend for backend in backends("cpu", "reference") if backend not in FAST]
DRAFTS, VERIFICATIONS = ("probabilistic", "greedy"), ("rejection", "block", "exact")
CASES = [(backend, draft, verify) for backend in FAST for draft in DRAFTS for verify in VERIFICATIONS]
CASES += [(backend, "probabilistic", verify) for backend in SLOW for verify in VERIFICATIONS[:2]]


@pytest.mark.parametrize(("backend", "draft", "verify"), CASES)
def test_drafted_chains_keep_the_distribution(tiny_folder, backend: str, draft: str, verify: str) -> None:
    method = f"laws.dice:verify={verify},draft={draft},adaptive=no"
    residual_noise = draft == "probabilistic" and verify != "exact"
    llm = LLM(str(tiny_folder()), backend=backend, speculate=method)
    found, length = excess(llm, SHARED_NOISE_SAMPLES if residual_noise else SAMPLES)
    assert found < 1
    assert length > 1.05


@pytest.mark.parametrize("verify", ["rejection", "block"])
@pytest.mark.parametrize("sabotage", ["shared", "peeking"])
def test_a_sabotaged_drafter_breaks_the_distribution(tiny_folder, verify: str, sabotage: str) -> None:
    llm = LLM(
        str(tiny_folder()), speculate=f"laws.dice:verify={verify},draft=probabilistic,adaptive=no,sabotage={sabotage}"
    )
    assert excess(llm, SHARED_NOISE_SAMPLES if sabotage == "shared" else SAMPLES)[0] > 1


def plan_from_history(
    self: AdaptiveController, requests: Sequence[Request], limits: Sequence[int], others: int = 0
) -> list[int]:
    """Choose widths by what each request has accepted so far and by its text."""
    return [
        min(limit, (2 + request.spec_stats.accepted + sum(request.output)) % 3)
        for request, limit in zip(requests, limits, strict=True)
    ]


@pytest.mark.parametrize("tree", ["", ",width=7,branches=3,max_depth=2"])
@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_widths_chosen_from_earlier_steps_keep_the_distribution(
    tiny_folder, verify: str, tree: str, monkeypatch
) -> None:
    if tree and verify == "block":
        pytest.skip("block verifies chains only")
    monkeypatch.setattr(AdaptiveController, "plan", plan_from_history)
    llm = LLM(str(tiny_folder()), speculate=f"laws.dice:verify={verify},draft=probabilistic,costs_time=yes{tree}")
    found, length = excess(llm, seed=None)
    assert found < 1
    assert length > 1.02
    assert len(llm.method_stats["laws.dice"].widths) > 2


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_a_request_with_a_seed_keeps_its_width(tiny_llm, verify: str, monkeypatch) -> None:
    monkeypatch.setattr(AdaptiveController, "plan", lambda self, requests, limits, others=0: [0] * len(limits))
    llm = tiny_llm(speculate=f"laws.dice:verify={verify},draft=probabilistic,costs_time=yes")
    drafted = {}
    for name, chosen in {"seed": {"seed": 1}, "none": {}, "greedy": {"seed": 1, "temperature": 0.0}}.items():
        params = SamplingParams(max_tokens=9, allowed_token_ids=TOKENS, ignore_eos=True, **chosen)
        drafted[name] = llm.generate(PROMPT, params)[0].stats.speculation.drafted
    assert drafted["seed"] > 0 == drafted["none"] == drafted["greedy"]


SIBLINGS = "verify=rejection,draft=probabilistic"
TREES = {"few": "width=4,branches=2", "many": "width=7,branches=3,max_depth=2"}


@pytest.mark.parametrize(
    ("backend", "options", "tree"),
    [
        *itertools.product(FAST, [SIBLINGS, f"{SIBLINGS},replacement=yes"], TREES),
        *itertools.product(FAST, ["verify=rejection,draft=greedy", "verify=exact,draft=probabilistic"], TREES),
        *(
            (backend, *case)
            for backend in SLOW
            for case in ((SIBLINGS, "many"), (f"{SIBLINGS},replacement=yes", "few"))
        ),
    ],
)
def test_drafted_trees_keep_the_distribution(tiny_folder, backend: str, options: str, tree: str) -> None:
    method = f"laws.dice:{options},{TREES[tree]},adaptive=no"
    found, length = excess(LLM(str(tiny_folder()), backend=backend, speculate=method))
    assert found < 1
    assert length > 1.2


@pytest.mark.parametrize("sabotage", ["peeking", "once"])
def test_a_sabotaged_tree_breaks_the_distribution(tiny_folder, sabotage: str) -> None:
    """Drop a tree by its tokens; sample siblings independently and verify them as without replacement.

    Shared noise is tested with chains: in a tree with two of four tokens its effect is too small.
    """
    method = f"laws.dice:verify=rejection,draft=probabilistic,{TREES['many']},sabotage={sabotage}"
    assert excess(LLM(str(tiny_folder()), speculate=method))[0] > 1


def test_a_seed_reproduces_the_text(tiny_llm) -> None:
    for verify in ("rejection", "block"):
        llm = tiny_llm(speculate=f"laws.dice:verify={verify},draft=probabilistic")
        alone = [llm.generate(PROMPT, SamplingParams(max_tokens=9, seed=seed))[0] for seed in range(3)]
        together = llm.generate([PROMPT] * 3, [SamplingParams(max_tokens=9, seed=seed) for seed in range(3)])
        assert [one.completions[0].token_ids for one in alone] == [one.completions[0].token_ids for one in together]


@pytest.mark.parametrize("method", ["ngram", "suffix", "suffix:branches=3", "prediction", "prediction+suffix+ngram"])
def test_a_seed_reproduces_the_text_regardless_of_other_requests(tiny_llm, method: str) -> None:
    """With rejection sampling drafts influence the text, so they may not come from other requests."""
    llm = tiny_llm(speculate=with_options(method, verify="rejection", least=0))
    prompts = [[3, 4, 4, 3, 3, 4][: 2 + number] * 4 for number in (0, 2, 4)]
    shared = SamplingParams(max_tokens=12, temperature=0.5, allowed_token_ids=[3, 4], ignore_eos=True)
    brought = [4, 3, 4, 4, 3] * 4 if "prediction" in method else None
    params = [replace(shared, seed=seed, prediction=brought) for seed in range(len(prompts))]
    together = llm.generate(prompts, params)
    alone = [llm.generate(prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
    assert any(output.stats.speculation.accepted for output in together)
    assert [one.completions[0].token_ids for one in alone] == [one.completions[0].token_ids for one in together]


def with_options(method: str, **options: object) -> str:
    name, _, own = method.partition(":")
    return f"{name}:" + ",".join(filter(None, [own, *(f"{key}={value}" for key, value in options.items())]))
