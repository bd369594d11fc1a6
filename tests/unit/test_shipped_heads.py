"""The shipped heads on the real model: they change no text, and their acceptance lengths stay within recorded bands.

The model comes from the catalog: `outrider pull smollm2-135m` downloads it, else the first test does. `ngram`, which
needs no head, is measured beside them. `python tests/unit/test_shipped_heads.py` records the bands again.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import LLM, Output, SamplingParams
from outrider.bench.acceptance import figures
from outrider.catalog import shipped
from outrider.types import SpecStats

MODEL = "smollm2-135m"
PROMISED = ("eagle3", "dspark", "medusa", "draft_model")  # methods whose heads ship for it
BANDS = Path(__file__).parents[1] / "vectors" / "acceptance.json"
TOLERANCE = 0.4  # share of the length above 1: other processors round differently, so a text may diverge
METHODS = ("ngram", *(entry.method for entry in shipped.entries() if entry.model == MODEL))
PROMPTS = (
    "Why do leaves change colour in autumn?",
    "Write a short letter that thanks a neighbour for watering the plants.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Explain each step.",
    "Write a Python function that returns the second largest number of a list.",
    "Translate into French: The market opens early, and the bread is still warm.",
    "List five things to pack for a week in the mountains.",
    "Explain to a ten-year-old how a bicycle stays upright.",
    "Summarise in two sentences: Bees visit flowers for nectar. While they drink, pollen sticks to their legs, and at "
    "the next flower some of it falls off. Without this, many plants would bear no fruit.",
    "Write an SQL query that counts the orders of each customer in the year 2020.",
    "Tell the beginning of a story about a lighthouse keeper who finds a map.",
)
LONG = SamplingParams(max_tokens=48, temperature=0, seed=11)
SHORT = [replace(LONG, max_tokens=16, temperature=temperature) for temperature in (0, 0.8, 1) for _ in range(3)]


def open_llm(method: str) -> LLM:
    """Load the model with the default options of a method, but a fixed width: the adaptive one depends on timing."""
    return LLM(MODEL, backend="cpu", speculate=f"{method}:adaptive=false" if method else "none", max_step_tokens=2048)


def chat_prompts(llm: LLM) -> list[list[int]]:
    return [llm.chat_prompt([{"role": "user", "content": prompt}]) for prompt in PROMPTS]


def mean_length(outputs: list[Output]) -> float:
    """Return the mean acceptance length over all answers."""
    spec_stats = SpecStats()
    for output in outputs:
        assert output.stats is not None
        spec_stats.add(output.stats.speculation)
    length: float = figures(spec_stats)["mean_acceptance_length"]
    return length


def long_answers(llm: LLM) -> list[Output]:
    """Answer all prompts in one batch."""
    return llm.generate(chat_prompts(llm), LONG)


def short_answers(llm: LLM) -> list[Output]:
    """Answer three prompts at each temperature in one batch."""
    return llm.generate(chat_prompts(llm)[:3] * 3, SHORT)


def check_band(outputs: list[Output], method: str, answers: str) -> None:
    band = json.loads(BANDS.read_text())[answers][method]
    assert mean_length(outputs) == pytest.approx(band["length"], abs=band["tolerance"])


@pytest.fixture(scope="module", params=METHODS)
def drafting(request: pytest.FixtureRequest) -> tuple[str, LLM]:
    return request.param, open_llm(request.param)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [output.completions[0].token_ids for output in short_answers(open_llm(""))]


def test_every_promised_head_ships_and_has_its_bands() -> None:
    assert len(METHODS) == len(set(METHODS))
    bands = json.loads(BANDS.read_text())
    assert set(METHODS) == {"ngram", *PROMISED} == set(bands[MODEL]) == set(bands[f"{MODEL} short"])


def test_shipped_heads_change_no_text_and_keep_their_acceptance(
    drafting: tuple[str, LLM], plain: list[list[int]]
) -> None:
    method, llm = drafting
    outputs = short_answers(llm)
    for output, expected, params in zip(outputs, plain, SHORT, strict=True):
        assert output.completions[0].token_ids == expected, f"{method} at temperature {params.temperature}"
    if method in PROMISED:  # without accepted tokens the comparison proves nothing
        assert sum(output.stats.speculation.accepted for output in outputs if output.stats) > 0
    check_band(outputs, method, f"{MODEL} short")


@pytest.mark.slow
def test_acceptance_over_long_answers_stays_within_its_band(drafting: tuple[str, LLM]) -> None:
    method, llm = drafting
    check_band(long_answers(llm), method, MODEL)


def main() -> None:
    bands: dict[str, dict[str, dict[str, float]]] = {MODEL: {}, f"{MODEL} short": {}}
    for method in METHODS:
        llm = open_llm(method)
        for answers, outputs in zip(bands, (long_answers(llm), short_answers(llm)), strict=True):
            length = mean_length(outputs)
            bands[answers][method] = {"length": round(length, 3), "tolerance": round(TOLERANCE * (length - 1), 3)}
    BANDS.write_text(json.dumps(bands, indent=2) + "\n")
    sys.stdout.write(BANDS.read_text())


if __name__ == "__main__":
    main()
