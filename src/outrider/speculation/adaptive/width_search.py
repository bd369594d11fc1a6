"""The widths of one step that promise the most tokens a second."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from .latency_model import isotonic


def fastest_widths(
    acceptance: Sequence[Sequence[float]], verification: Sequence[float], drafting: Sequence[float], batch_size: int
) -> tuple[list[int], float]:
    """Return the fastest width of each request, and the tokens a second: probable tokens first, as many as raise it.

    acceptance: of each request's tokens. verification, drafting: seconds by drafted tokens, and by the widest draft.
    """
    tokens: list[tuple[float, int, int, bool]] = []  # acceptance, index and request; whether a draft may end after it
    for row, probabilities in enumerate(acceptance):
        stop = 0
        for negative, size in isotonic([-probability for probability in probabilities]):
            stop += size  # tokens behind less probable ones share their mean with them
            for index in range(stop - size, stop):
                tokens.append((-negative, index, row, index == stop - 1))
    tokens.sort(key=itemgetter(0), reverse=True)  # stable: the tokens of a draft stay in order
    chosen, best, cheapest = tokens[:0], batch_size / (verification[0] + drafting[0]), float("inf")
    for width in range(len(drafting) - 1, 0, -1):
        if drafting[width] >= cheapest:
            continue  # a wider draft costs no more
        cheapest = drafting[width]
        tokens = [token for token in tokens if token[1] < width]
        expected, left = float(batch_size), len(tokens)
        for count, (probability, _, _, ends) in enumerate(tokens, 1):
            seconds = verification[count] + cheapest
            if expected + probability * left <= best * seconds:
                break  # the tokens that follow are no more probable
            expected, left = expected + probability, left - 1
            if ends and expected > best * seconds:
                best, chosen = expected / seconds, tokens[:count]
    widths = [0] * len(acceptance)
    for _, _, row, _ in chosen:
        widths[row] += 1
    return widths, best
