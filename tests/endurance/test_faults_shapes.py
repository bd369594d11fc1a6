"""The library behind structured output fails, at any call: one answer ends there, the others do not notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from endurance.sabotage import CAUSE, LONG, Fragile, Trap, check_nothing_left
from endurance.scenes import BASE, HEAD, MIXED, PROMPTS, VisibleOutput, alone, check_most, visible_output
from outrider import Output
from outrider.scheduler import NO_TOKEN_ALLOWED
from outrider.structured_output.matcher import Matcher
from outrider.types import StructuredOutput

SHAPED = replace(BASE, structured=StructuredOutput("regex", "([5-9A-D ]{2,4},){3}end"), max_tokens=24, ignore_eos=False)


def check(outputs: list[Output], expected: list[VisibleOutput]) -> int:
    """As for all faults, but that what breaks at the very end is known as an answer that broke off."""
    cause = NO_TOKEN_ALLOWED if visible_output(outputs[-1])[3] == NO_TOKEN_ALLOWED else CAUSE
    return check_most(outputs, expected, cause)


@pytest.mark.parametrize("verb", ["accept", "fill"])
@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_a_shape_that_cannot_be_followed(
    fragile: Callable[..., Fragile], monkeypatch: pytest.MonkeyPatch, method: str, verb: str
) -> None:
    llm, trap = fragile(method).llm, Trap()
    prompts, params = [*PROMPTS, HEAD], [*MIXED, SHAPED]
    shaped = visible_output(fragile().llm.generate([HEAD], replace(SHAPED, speculate=False))[0])
    assert shaped[2] == "stop"
    expected = [*alone(fragile().llm, MIXED), shaped]
    whole = getattr(Matcher, verb)

    def failing(matcher: Matcher, *given: object) -> object:
        trap.step_on()
        return whole(matcher, *given)

    monkeypatch.setattr(Matcher, verb, failing)
    assert check(llm.generate(prompts, params), expected) == 0
    broken = 0
    for together in (True, False):
        if not together:
            prompts, params, expected = prompts[-1:], params[-1:], expected[-1:]
        with trap.counting():
            llm.generate(prompts, params)
        for call in range(0, trap.count, 1 if LONG else 8):
            trap.arm(call, lambda: ValueError(CAUSE))
            broken += check(llm.generate(prompts, params), expected)
            assert trap.sprung
            trap.rest()
            check_nothing_left(llm)
    assert broken or method != "none"  # a draft that cannot be pruned is left out
    assert check(llm.generate(prompts, params), expected) == 0
