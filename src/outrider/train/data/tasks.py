"""The documents that the target is asked to write: a sequence that depends only on the plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import UserError
from ...input_processor import mix

SamplingMode = tuple[float, float, float]  # temperature, top_p, fraction of the documents
DEFAULT_MODES: tuple[SamplingMode, ...] = ((0.0, 1.0, 0.5), (0.7, 0.95, 0.3), (1.0, 1.0, 0.2))
SELF_WRITTEN = -1
ORDER, MODE, NOISE, OWN = range(4)  # the use of a random number, mixed into its seed


@dataclass(frozen=True)
class AnswerPlan:
    """How many answers to generate, and how. The first documents do not depend on the number of tokens."""

    tokens: int  # of all answers
    max_new: int = 512  # tokens of one answer at most
    temperatures: tuple[SamplingMode, ...] = DEFAULT_MODES
    seed: int = 0
    held_out: float = 0.01  # fraction of the prompts
    self_prompted: float = 0.0  # fraction of the documents whose prompt the target writes itself
    longest: int = 1024  # tokens of a document; prompts of more than half of it are skipped

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("max_new", 1), ("seed", 0), ("longest", 4)):
            if getattr(self, name) < least:
                raise UserError(f"`{name}` is {getattr(self, name)}: it must be {least} or more")
        for name in ("held_out", "self_prompted"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"`{name}` is {getattr(self, name)}: it must be between 0 and 1")
        shares = [share for _, _, share in self.temperatures]
        if min(shares, default=-1.0) < 0 or sum(shares) <= 0:
            raise UserError(f"`temperatures` has the fractions {shares}: none may be negative, and one must be above 0")

    def settings(self) -> dict[str, Any]:
        """Return the settings that documents depend on: all but the number of tokens."""
        return {name: value for name, value in asdict(self).items() if name != "tokens"}


def default_modes(greedy: float) -> tuple[SamplingMode, ...]:
    """Return the default modes with another fraction of greedy answers; the others keep their proportion."""
    if not 0 <= greedy <= 1:
        raise UserError(f"`greedy` is {greedy}: it must be between 0 and 1")
    others = sum(share for temperature, _, share in DEFAULT_MODES if temperature > 0)
    return tuple(
        (temperature, top_p, share * (1 - greedy) / others if temperature > 0 else greedy)
        for temperature, top_p, share in DEFAULT_MODES
    )


@dataclass(frozen=True, slots=True)
class AnswerTask:
    """One document to generate."""

    number: int
    prompt: int  # its index; SELF_WRITTEN: the target writes it
    temperature: float
    top_p: float
    seed: int


def answer_tasks(plan: AnswerPlan, prompts: int) -> Iterator[AnswerTask]:
    """Yield all prompts once, in an order that depends on the seed, then all again, mixed with self-written ones.

    Ends when every prompt has its greedy answer and no other answers are wanted.
    """
    given = _given(plan, prompts)
    for number in itertools.count():
        own = _random(plan, OWN, number, 0)
        given_task = None if own / 2**63 < plan.self_prompted else next(given, None)
        if given_task is not None:
            yield AnswerTask(number, *given_task)
        elif plan.self_prompted:
            temperature, top_p = _choose_mode(plan, mix(own, MODE), greedy=True) or (0.0, 1.0)
            yield AnswerTask(number, SELF_WRITTEN, temperature, top_p, mix(own, NOISE))
        else:
            return


def _given(plan: AnswerPlan, prompts: int) -> Iterator[tuple[int, float, float, int]]:
    greedy = bytearray(prompts)  # 1: its greedy answer has been asked for; a second would be equal
    for sample in itertools.count():
        count = 0
        for prompt in sorted(range(prompts), key=lambda prompt: _random(plan, ORDER, prompt, sample)):
            mode = _choose_mode(plan, _random(plan, MODE, prompt, sample), greedy=not greedy[prompt])
            if mode is None:
                continue
            greedy[prompt] |= mode[0] == 0
            count += 1
            yield prompt, *mode, _random(plan, NOISE, prompt, sample)
        if not count:
            return


def _random(plan: AnswerPlan, use: int, index: int, sample: int) -> int:
    return mix(mix(mix(plan.seed, use), index), sample)


def _choose_mode(plan: AnswerPlan, random: int, greedy: bool) -> tuple[float, float] | None:
    """Choose temperature and top_p by their fractions. None: only greedy answers are wanted, and greedy is False."""
    modes = [mode for mode in plan.temperatures if mode[2] > 0 and (greedy or mode[0] > 0)]
    left = random / 2**63 * sum(share for _, _, share in modes)
    for temperature, top_p, share in modes:
        left -= share
        if left < 0:
            return temperature, top_p
    return modes[-1][:2] if modes else None
