"""The heads that ship, on the real model: what they accept stays within a band, and they change no text.

The model comes from the catalog: `outrider pull smollm2-135m` fetches it, else the first test does. A method that needs
no head is measured beside them. `python tests/unit/test_shipped_heads.py` writes the bands anew.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import LLM, Output, SamplingParams
from outrider.bench.acceptance import figures
from outrider.types import SpecStats
from outrider.weights import shipped

MODEL = "smollm2-135m"
PROMISED = ("eagle3", "dspark", "medusa", "draft_model")  # methods whose heads ship for it
BANDS = Path(__file__).parents[1] / "vectors" / "acceptance.json"
TOLERANCE = 0.4  # of what drafts add to a length: other processors round otherwise, and a text may take another turn
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
ASKED = SamplingParams(max_tokens=48, temperature=0, seed=11)
WARM = [replace(ASKED, max_tokens=16, temperature=temperature) for temperature in (0, 0.8, 1) for _ in range(3)]


def opened(method: str) -> LLM:
    """As a user writes it, but with drafts of full width: what a clock decides would differ from run to run."""
    return LLM(MODEL, backend="cpu", speculate=f"{method}:adaptive=false" if method else "none", max_step_tokens=2048)


def asked(llm: LLM) -> list[list[int]]:
    return [llm.chat_prompt([{"role": "user", "content": prompt}]) for prompt in PROMPTS]


def length(llm: LLM) -> float:
    """The mean acceptance length over all prompts, answered in one batch."""
    spec_stats = SpecStats()
    for output in llm.generate(asked(llm), ASKED):
        assert output.stats is not None
        spec_stats.add(output.stats.speculation)
    found: float = figures(spec_stats)["mean_acceptance_length"]
    return found


def answers(llm: LLM) -> list[Output]:
    """A few of the prompts, at every temperature."""
    return llm.generate(asked(llm)[:3] * 3, WARM)


@pytest.fixture(scope="module", params=METHODS)
def drafting(request: pytest.FixtureRequest) -> tuple[str, LLM]:
    return request.param, opened(request.param)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [output.completions[0].token_ids for output in answers(opened(""))]


def test_what_ships_is_what_was_promised_and_measured() -> None:
    assert len(METHODS) == len(set(METHODS))
    assert set(METHODS) == {"ngram", *PROMISED} == set(json.loads(BANDS.read_text())[MODEL])


def test_acceptance_stays_within_its_band(drafting: tuple[str, LLM]) -> None:
    method, llm = drafting
    expected = json.loads(BANDS.read_text())[MODEL][method]
    assert length(llm) == pytest.approx(expected["length"], abs=expected["tolerance"])


def test_no_text_changes_at_any_temperature(drafting: tuple[str, LLM], plain: list[list[int]]) -> None:
    method, llm = drafting
    outputs = answers(llm)
    for output, expected, params in zip(outputs, plain, WARM, strict=True):
        assert output.completions[0].token_ids == expected, f"{method} at temperature {params.temperature}"
    if method in PROMISED:  # else there would be nothing that could go wrong
        assert sum(output.stats.speculation.accepted for output in outputs if output.stats) > 0


def main() -> None:
    lengths = {method: length(opened(method)) for method in METHODS}
    bands = {
        method: {"length": round(found, 3), "tolerance": round(TOLERANCE * (found - 1), 3)}
        for method, found in lengths.items()
    }
    BANDS.write_text(json.dumps({MODEL: bands}, indent=2) + "\n")
    sys.stdout.write(BANDS.read_text())


if __name__ == "__main__":
    main()
