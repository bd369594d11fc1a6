"""Predicted outputs: the request brings the text that it expects, and drafts are copied from it.

Where the answer departs from the prediction, the position is searched again: most edits replace or insert a few tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UserError
from ...request import Request
from ...types import Draft
from ..adaptive.acceptance_model import Rates
from ..drafters.lookup import (
    MAX_MATCH,
    RESUME_WINDOW,
    AcceptanceTracker,
    LookupDrafter,
    growing_matches,
    rates_by_match_length,
)
from ..interface import DraftContext, MethodOptions, Target

DRAFTS_FROM = "prediction"

UNALIGNED = MAX_MATCH + 1  # evidence from here on: the answer left the prediction one token ago, two, ...
UNALIGNED_KEYS = 4
UNALIGNED_RATE = 0.15  # prior acceptance rate
INITIAL_MATCH = 4  # match length that is assumed at the start, since the user named the prediction


@dataclass(frozen=True)
class Options(MethodOptions):
    width: int = 16  # tokens that it drafts at most
    longest: int = 4  # tokens of the longest n-gram by which the position is searched again
    least: float = 0.1  # a draft ends below this acceptance probability

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise UserError(f"`longest` is {self.longest}: it must be at least 1")


def build(options: Options, target: Target) -> PredictionDrafter:
    return PredictionDrafter(options, target.coupled)


class Alignment:
    """The position in the prediction that an answer has reached."""

    def __init__(self, text: list[int], longest: int) -> None:
        self.text = text
        self.longest = longest
        self.answer: list[int] = []
        self.position = 0  # of the next expected token; of an unaligned answer: of the first that did not come
        self.matched = INITIAL_MATCH  # tokens before `position` that matched; 0: unaligned
        self.unaligned = 0  # tokens since the alignment was lost
        self.tracker = AcceptanceTracker()
        self.index: dict[tuple[int, ...], list[int]] | None = None  # n-gram -> positions after it, ascending

    def extend(self, tokens: Sequence[int]) -> None:
        """Advance by tokens of the answer."""
        for token in tokens:
            self.answer.append(token)
            if self.matched and self.position < len(self.text) and self.text[self.position] == token:
                self.position += 1
                self.matched += 1
            else:
                self.matched = 0
                self.unaligned += 1
                self._realign()

    def _realign(self) -> None:
        """Find the longest n-gram at the answer's end: its next occurrence, else the last one before.

        A single token is weak evidence: it counts only within a window after the position.
        """
        index = self._ngram_positions()
        for size in range(min(self.longest, len(self.answer)), 0, -1):
            positions = index.get(tuple(self.answer[-size:]))
            if not positions:
                continue
            # The nearest is right behind the token that did not come: another was inserted, and now it came.
            following = bisect_left(positions, self.position + 1)
            if following < len(positions) and (size > 1 or positions[following] <= self.position + RESUME_WINDOW):
                self.position = positions[following]
            elif size > 1:
                self.position = positions[-1]
            else:
                continue
            self.matched, self.unaligned = size, 0
            return

    def _ngram_positions(self) -> dict[tuple[int, ...], list[int]]:
        if self.index is None:  # not needed while the answer is the prediction
            self.index = {}
            for position in range(1, len(self.text) + 1):
                for size in range(1, min(self.longest, position) + 1):
                    self.index.setdefault(tuple(self.text[position - size : position]), []).append(position)
        return self.index

    def next_tokens(self, width: int) -> tuple[list[int], int]:
        """Return the next tokens, and the evidence for the first. An unaligned answer may have replaced one token."""
        if self.matched:
            return self.text[self.position : self.position + width], min(self.matched, MAX_MATCH)
        start = self.position + 1
        return self.text[start : start + width], UNALIGNED + min(self.unaligned, UNALIGNED_KEYS) - 1


class PredictionDrafter(LookupDrafter[Alignment]):
    def __init__(self, options: Options, learns: bool = True) -> None:
        """learns: False if the text depends on the drafts: then requests may not influence each other."""
        super().__init__(options.width)
        self.options = options
        self.rates = Rates([*rates_by_match_length(), *[UNALIGNED_RATE] * UNALIGNED_KEYS], learns=learns)
        self.matches = growing_matches(options.width)

    def new_state(self, request: Request) -> Alignment:
        return Alignment(request.prediction, self.options.longest)

    def draft(self, state: Alignment, context: DraftContext, width: int) -> Draft:
        if not state.text:
            return Draft([])
        answer = state.answer
        state.extend(context.tokens(len(context.request.prompt) + len(answer), context.length))
        state.tracker.observe(self.rates, answer)
        tokens, key = state.next_tokens(width)
        evidence = [key, *self.matches[1:width]] if key >= UNALIGNED else self.matches[key : key + width]
        return state.tracker.start_draft(self.rates, len(answer), tokens, evidence[: len(tokens)], self.options.least)
