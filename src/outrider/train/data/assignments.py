"""What the target is asked to write, document by document: a sequence that follows from the plan alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import UserError
from ...input_processor import mix

Way = tuple[float, float, float]  # temperature, top_p, share of the documents
USUAL: tuple[Way, ...] = ((0.0, 1.0, 0.5), (0.7, 0.95, 0.3), (1.0, 1.0, 0.2))
SELF_WRITTEN = -1
ORDER, CHOICE, NOISE, OWN = range(4)  # what a number is drawn for


@dataclass(frozen=True)
class AnswerPlan:
    """How many answers of which kind. The first documents are the same however many are asked for."""

    tokens: int  # of all answers together
    max_new: int = 512  # tokens of one answer; a longer one is cut
    temperatures: tuple[Way, ...] = USUAL
    seed: int = 0
    held_out: float = 0.01  # share of the prompts
    self_prompted: float = 0.0  # share of the documents whose prompt the target writes, too
    longest: int = 1024  # tokens of a document; prompts of more than half are left out

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("max_new", 1), ("seed", 0), ("longest", 4)):
            if getattr(self, name) < least:
                raise UserError(f"`{name}` is {getattr(self, name)}: it must be {least} or more")
        for name in ("held_out", "self_prompted"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"`{name}` is {getattr(self, name)}: it must lie between 0 and 1")
        shares = [share for _, _, share in self.temperatures]
        if min(shares, default=-1.0) < 0 or sum(shares) <= 0:
            raise UserError(f"`temperatures` has the shares {shares}: they must be 0 or more, and one above 0")

    def settings(self) -> dict[str, Any]:
        """What every document depends on: all but where to stop."""
        return {name: value for name, value in asdict(self).items() if name != "tokens"}


def usual_ways(greedy: float) -> tuple[Way, ...]:
    """As usual, but for the share of greedy answers: the other ways keep their proportion."""
    if not 0 <= greedy <= 1:
        raise UserError(f"`greedy` is {greedy}: it must lie between 0 and 1")
    others = sum(share for temperature, _, share in USUAL if temperature > 0)
    return tuple(
        (temperature, top_p, share * (1 - greedy) / others if temperature > 0 else greedy)
        for temperature, top_p, share in USUAL
    )


@dataclass(frozen=True, slots=True)
class Assignment:
    """One document to be written."""

    number: int
    prompt: int  # its number; SELF_WRITTEN: the target's own
    temperature: float
    top_p: float
    seed: int


def assignments(plan: AnswerPlan, prompts: int) -> Iterator[Assignment]:
    """All prompts once, in an order of the seed's, then all again, and so on; self-written ones among them.

    Ends where every prompt has its greedy answer and nothing else is wanted.
    """
    given = _given(plan, prompts)
    for number in itertools.count():
        own = _drawn(plan, OWN, number, 0)
        found = None if own / 2**63 < plan.self_prompted else next(given, None)
        if found is not None:
            yield Assignment(number, *found)
        elif plan.self_prompted:
            temperature, top_p = _way(plan, mix(own, CHOICE), greedy=True) or (0.0, 1.0)
            yield Assignment(number, SELF_WRITTEN, temperature, top_p, mix(own, NOISE))
        else:
            return


def _given(plan: AnswerPlan, prompts: int) -> Iterator[tuple[int, float, float, int]]:
    greedy = bytearray(prompts)  # 1: its greedy answer has been asked for, and another would be the same
    for sample in itertools.count():
        count = 0
        for prompt in sorted(range(prompts), key=lambda each: _drawn(plan, ORDER, each, sample)):
            way = _way(plan, _drawn(plan, CHOICE, prompt, sample), greedy=not greedy[prompt])
            if way is None:
                continue
            greedy[prompt] |= way[0] == 0
            count += 1
            yield prompt, *way, _drawn(plan, NOISE, prompt, sample)
        if not count:
            return


def _drawn(plan: AnswerPlan, use: int, index: int, sample: int) -> int:
    return mix(mix(mix(plan.seed, use), index), sample)


def _way(plan: AnswerPlan, drawn: int, greedy: bool) -> tuple[float, float] | None:
    """Temperature and top_p, by their shares. None: only a greedy answer is wanted, and there may be none."""
    ways = [way for way in plan.temperatures if way[2] > 0 and (greedy or way[0] > 0)]
    left = drawn / 2**63 * sum(share for _, _, share in ways)
    for temperature, top_p, share in ways:
        left -= share
        if left < 0:
            return temperature, top_p
    return ways[-1][:2] if ways else None
