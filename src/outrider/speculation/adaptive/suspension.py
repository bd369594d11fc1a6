"""Why a request gets no draft, in the numbers that decide it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ...types import Suspension


def explain(
    acceptance: Sequence[float], verification: Sequence[float], drafting: Sequence[float], batch_size: int
) -> Suspension | None:
    """Describe the fastest step in which one request has a draft; None if it is faster than the step without one.

    acceptance: of the request's tokens. verification, drafting: seconds by drafted tokens, from 0 on.
    """
    plain = verification[0] + drafting[0]
    expected = list(accumulate(acceptance, initial=float(batch_size)))
    width = max(range(1, len(expected)), key=lambda width: expected[width] / (verification[width] + drafting[width]))
    cost, tokens = (verification[width] + drafting[width]) / plain, expected[width] / batch_size
    if tokens > cost:  # drafts of other requests are worth more, and all together would be too many
        return None
    share = (drafting[width] - drafting[0]) / plain
    return Suspension(batch_size, batch_size + width, cost, share, tokens, acceptance[0])
