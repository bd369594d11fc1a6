"""SpecStats: vLLM's mean acceptance length and the tokens per step are different figures."""

from __future__ import annotations

import pytest

from outrider.types import Draft, SpecStats, Suspension

REASON = Suspension(batch_size=1, rows=2, cost=2.1, drafting=0.0, tokens=1.57, acceptance_rate=0.57)


def test_the_mean_acceptance_length_counts_only_steps_with_a_draft() -> None:
    spec_stats = SpecStats()
    spec_stats.count(Draft([1, 2, 3]), [1, 2, 3])
    spec_stats.count(Draft([1, 2, 3]), [1])
    spec_stats.count_plain(6)
    assert (spec_stats.steps, spec_stats.num_drafts) == (8, 2)
    assert spec_stats.mean_acceptance_length == 1 + 4 / 2  # vLLM: 1 + accepted tokens / drafts
    assert spec_stats.tokens_per_step == spec_stats.mean_length == 1 + 4 / 8


@pytest.mark.parametrize("plain", [0, 5])
def test_without_drafts_the_mean_acceptance_length_is_1(plain: int) -> None:
    spec_stats = SpecStats()
    spec_stats.count_plain(plain)
    assert spec_stats.mean_acceptance_length == 1 and spec_stats.tokens_per_step == float(plain > 0)


def test_suspensions_and_ignored_tokens_add_up_and_the_last_reason_stays() -> None:
    total, one, other = SpecStats(), SpecStats(), SpecStats()
    one.suspend(REASON, 3)
    one.nonfinite, other.nonfinite = 2, 3
    for each in (one, other):
        total.add(each)
    assert total.suspended == 3 and total.suspension == REASON and total.nonfinite == 5


def test_a_suspension_reads_as_a_sentence() -> None:
    assert str(REASON) == (
        "a step with 2 rows costs 2.10x of one row here, and yields 1.57x the tokens at acceptance rate 0.57"
    )
    busy = Suspension(batch_size=8, rows=11, cost=1.5, drafting=0.2, tokens=1.1, acceptance_rate=0.5)
    assert str(busy) == (
        "a step with 11 rows costs 1.50x of 8 rows here, 0.2x of it for drafting, and yields 1.10x the tokens "
        "at acceptance rate 0.50"
    )


@pytest.mark.parametrize("parents", [None, [-1, 0, 1]], ids=["chain", "tree"])
def test_a_path_ends_at_the_first_token_that_was_not_drafted(parents: list[int] | None) -> None:
    draft = Draft([5, 6, 7], parents)
    for tokens, count in (([], 0), ([5], 1), ([5, 9, 7], 1), ([9, 6, 7], 0), ([5, 6, 7], 3), ([5, 6, 7, 8], 3)):
        assert draft.path(tokens) == list(range(count))
