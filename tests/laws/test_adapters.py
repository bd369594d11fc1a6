"""Adapters keep the laws: every method gives the text of the adapted model alone, beside any other adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tiny_lora
from laws.mix import BASE, PROMPT, interrupted, visible
from outrider import LLM, SamplingParams

ADAPTERS = {"first": 1, "second": 2}
SLOTS = ["first", None, "second", "first", "second", None]
PARAMS = [
    BASE,
    replace(BASE, logprobs=2),
    replace(BASE, temperature=0.8),
    replace(BASE, temperature=1.1, top_k=9, repetition_penalty=1.3),
    replace(BASE, speculate="ngram", always_draft=True),
    replace(BASE, temperature=0.6),
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: str(tiny_lora.save("llama", folder / name, seed, strength=0.2)) for name, seed in ADAPTERS.items()}


def plain(params: SamplingParams) -> SamplingParams:
    return replace(params, speculate=False)


@pytest.fixture(scope="module")
def expected(tiny_llm, adapters: dict[str, str]) -> list[object]:
    """The texts of plain decoding, each request alone."""
    llm = tiny_llm(lora=adapters)
    return [
        visible(llm.generate(PROMPT, plain(params), lora_request=name)[0])
        for name, params in zip(SLOTS, PARAMS, strict=True)
    ]


def generate(llm: LLM) -> list[object]:
    outputs = llm.generate([PROMPT] * len(PARAMS), PARAMS, lora_request=SLOTS)
    llm.engine.scheduler.check()
    return [visible(output) for output in outputs]


def test_each_method_beside_any_adapters_gives_the_adapted_text(
    tiny_llm, method: str, adapters: dict[str, str], expected: list[object]
) -> None:
    llm = tiny_llm(lora=adapters, speculate=method)
    assert generate(llm) == expected
    assert generate(llm) == expected  # from cached prefixes
    if not method.startswith("prediction"):  # which drafts for requests with a prediction alone
        assert all(stats.drafted for by_method in llm.adapter_stats.values() for stats in by_method.values())


@pytest.mark.parametrize(
    "options",
    [{"max_step_tokens": 7}, {"cache_tokens": 16 * 9}, {"max_loras": 1}, {"decode_steps": 4}],
    ids=["chunks", "few pages", "one slot", "several steps"],
)
def test_in_chunks_with_few_pages_with_one_slot_and_without_the_host(
    tiny_llm, adapters: dict[str, str], expected: list[object], options: dict[str, int]
) -> None:
    assert generate(tiny_llm(lora=adapters, **options)) == expected


def test_an_adapted_text_alone_is_that_of_the_merged_model(tiny_llm, adapters: dict[str, str], tmp_path: Path) -> None:
    merged = tiny_lora.copy_merged("llama", Path(adapters["first"]), tmp_path / "merged")
    llm = tiny_llm(lora=adapters)
    found = llm.generate(PROMPT, BASE, lora_request="first")[0].completions[0].token_ids
    backend = llm.resolved.backend
    assert found == LLM(str(merged), backend=backend).generate(PROMPT, BASE)[0].completions[0].token_ids
    assert found != llm.generate(PROMPT, BASE)[0].completions[0].token_ids


def test_rows_without_an_adapter_keep_their_bits(tiny_llm, adapters: dict[str, str]) -> None:
    params = replace(BASE, logprobs=50)
    alone = visible(tiny_llm().generate(PROMPT, params)[0])
    mixed = tiny_llm(lora=adapters).generate([PROMPT] * 3, params, lora_request=["second", None, "first"])
    assert visible(mixed[1]) == alone


def test_a_preempted_request_goes_on_with_its_adapter(tiny_llm, adapters: dict[str, str]) -> None:
    llm = tiny_llm(lora=adapters, speculate="ngram:adaptive=no")
    wanted = llm.generate(PROMPT, plain(BASE), lora_request="second")[0]
    found = interrupted(llm, BASE, {1, 4}, lora_request="second")
    assert found.stats.preemptions == 2 and visible(found) == visible(wanted)
