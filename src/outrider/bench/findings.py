"""What `outrider verify` finds in answers: where they depart from the expected ones, and what their law says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..input_processor import Prompt
from ..llm import LLM
from ..types import SamplingParams
from . import law
from .chi_square import FALSE_ALARM, Comparison


@dataclass(frozen=True)
class Question:
    prompt: Prompt
    params: SamplingParams
    number: int  # of the prompt


Told = tuple[list[int], str, str | None]  # tokens, text, why it ended


@dataclass(frozen=True)
class Plain:
    """What plain decoding says: the measure of all that follows."""

    questions: list[Question]
    answers: list[Told]  # one by one
    coins: list[int]
    law: dict[law.Text, float]


def differences(
    questions: Sequence[Question], expected: Sequence[Told], ways: Mapping[str, Sequence[Told]], llm: LLM
) -> dict[str, Any]:
    """How many answers, by the way that they were asked for, are not the expected ones, and where the first departs."""
    found: dict[str, Any] = {"compared": 0, "different": 0, "first": None}
    for way, answers in ways.items():
        for question, meant, told in zip(questions, expected, answers, strict=True):
            found["compared"] += 1
            if told == meant:
                continue
            found["different"] += 1
            found["first"] = found["first"] or {
                "prompt": question.number + 1,
                "temperature": question.params.temperature,
                "way": way,
                **departure(meant, told, llm),
            }
    return found


def departure(expected: Told, told: Told, llm: LLM) -> dict[str, Any]:
    pairs = zip(expected[0], told[0], strict=False)
    at = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(expected[0]), len(told[0])))
    said = [llm.tokenizer.decode(each[0][at : at + 1]) if at < len(each[0]) else None for each in (expected, told)]
    return {"token": at + 1, "expected": said[0], "found": said[1], "finish_reason": told[2]}


def report(compared: dict[tuple[int, ...], Comparison]) -> dict[str, Any]:
    """The comparison that came closest to its threshold, or passed it furthest; what all of them would have caught."""
    places, worst = max(compared.items(), key=lambda item: item[1].excess)
    whole = max(compared.values(), key=lambda one: one.detectable)
    impossible = worst.statistic == math.inf
    return {
        "holds": worst.holds,
        "statistic": None if impossible else worst.statistic,
        "threshold": worst.threshold,
        "freedom": worst.freedom,
        "positions": [place + 1 for place in places],
        "impossible_answers": impossible,
        "comparisons": len(compared),
        "detectable_total_variation": whole.detectable,
    }


def why(found: dict[str, Any], idle: bool) -> str:
    """What is wrong, in words; empty: nothing."""
    texts, law_found = found["texts"], found["law"]
    reasons = []
    if texts["different"]:
        first = texts["first"]
        said = {key: "the end" if first[key] is None else repr(first[key]) for key in ("expected", "found")}
        reasons.append(
            f"{texts['different']} of {texts['compared']} texts differ from {texts['against']}: "
            f"prompt {first['prompt']} at temperature {first['temperature']:g}, {first['way']}, "
            f"has {said['found']} for {said['expected']} as token {first['token']}"
        )
    if law_found is not None and law_found["impossible_answers"]:
        reasons.append("answers came that the model never gives")
    elif law_found is not None and not law_found["holds"]:
        reasons.append(
            f"the law is broken: chi-square {law_found['statistic']:.0f} where {law_found['threshold']:.0f} is passed "
            f"once in {1 / FALSE_ALARM:,.0f} runs"
        )
    if idle:
        reasons.append("nothing was drafted, so nothing is proven: give prompts that it has guesses for")
    return "; ".join(reasons)


def line(found: dict[str, Any]) -> str:
    """A finding in one line, as it comes."""
    who = " ".join(filter(None, (found["drafter"], found["verification"])))
    return f"{who}: {found['verdict']}{', ' if found['reason'] else ''}{found['reason']}"
