"""Several drafters in one tree: merging, which drafters are called, what they receive, and how they are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny_heads
from outrider import SamplingParams, UserError
from outrider.request import Request
from outrider.speculation import DraftBatch, DraftContext, Needs
from outrider.speculation.adaptive.backoff import MAX_PAUSE
from outrider.speculation.combined import CombinedDrafter, path_acceptance, ranking
from outrider.speculation.config import parse
from outrider.types import Draft, DrafterStats, SpecStats

PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9] * 5


class Clock:
    """A clock that only calls of drafters advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr("outrider.speculation.combined.time.perf_counter", lambda: self.seconds)


class Fake:
    """Return a given draft and record every call."""

    def __init__(self, needs: Needs, says: Draft, clock: Clock | None = None) -> None:
        self.needs, self.says, self.clock = needs, says, clock
        self.widths: list[int] = []
        self.kept: list[int] = []
        self.states: torch.Tensor | None = None
        self.recorded = False  # its calls take longer

    def propose(self, contexts: Sequence[DraftContext], last: torch.Tensor, hidden: torch.Tensor | None) -> DraftBatch:
        self.widths += [context.num_draft_tokens for context in contexts]
        if self.clock is not None:
            each = 10.0 if self.recorded else 0.05
            self.clock.seconds += 0.1 + each * max(context.num_draft_tokens for context in contexts)
        self.states = hidden
        drafts = [self.says.cut(context.num_draft_tokens) for context in contexts]
        parents = None if self.says.parents is None else [draft.parents or [] for draft in drafts]
        confidence = None if self.says.confidence is None else [draft.confidence or [] for draft in drafts]
        tokens = [draft.tokens for draft in drafts]
        return DraftBatch(tokens, parents=parents, confidence=confidence, recorded=self.recorded)

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        self.kept += kept

    def release(self, requests: Sequence[Request]) -> None:
        return


def context(request: Request, fresh: list[int], width: int = 8) -> DraftContext:
    return DraftContext(request, request.length - 1, request.length, fresh, width, 0)


def request() -> Request:
    return Request("one", [1, 2, 3], PARAMS, 0)


NONE = torch.zeros(0, dtype=torch.int32)
probability = st.floats(0.01, 0.99)


@st.composite
def draft(draw: st.DrawFn) -> Draft:
    count = draw(st.integers(0, 8))
    parents = [draw(st.integers(-1, index - 1)) for index in range(count)]
    tokens: list[int] = []
    for index in range(count):
        taken = {tokens[other] for other in range(index) if parents[other] == parents[index]}
        tokens.append(draw(st.sampled_from([token for token in range(12) if token not in taken])))
    return Draft(tokens, parents, confidence=[draw(probability) for _ in range(count)])


def reach(draft: Draft, text: Sequence[int]) -> int:
    return len(draft.path(text))


@given(st.lists(draft(), min_size=1, max_size=3), st.lists(st.integers(0, 11), max_size=8))
def test_a_merged_tree_accepts_as_much_as_its_best_member(drafts: list[Draft], text: list[int]) -> None:
    members = [(str(n), Fake(Needs(width=8), one)) for n, one in enumerate(drafts)]
    total = sum(len(one.tokens) for one in drafts)
    combined = CombinedDrafter(members, max(total, 1), learns=False)
    draft_batch = combined.propose([context(request(), [4], max(total, 1))], NONE, None)
    merged = draft_batch.drafts()[0]
    assert reach(merged, text) == max(reach(one, text) for one in drafts)
    # No token is there twice, and every member's tokens are all there.
    assert len({(parent, token) for parent, token in zip(merged.parent_indices(), merged.tokens, strict=True)}) == len(
        merged.tokens
    )
    assert draft_batch.origins is not None
    for bit, one in enumerate(drafts):
        assert sum(origin >> bit & 1 for origin in draft_batch.origins[0]) == len(one.tokens)


@given(draft(), st.integers(0, 8))
def test_any_beginning_of_a_tree_is_the_best_tree_of_its_size(one: Draft, width: int) -> None:
    one = replace(one, origins=[1] * len(one.tokens))
    chosen = one.pick(ranking(one)[:width])
    assert sorted(path_acceptance(one), reverse=True)[: len(chosen.tokens)] == path_acceptance(chosen)
    assert all(parent < index for index, parent in enumerate(chosen.parent_indices()))
    assert chosen.pick(ranking(chosen)[:3]) == chosen.cut(3)


def test_the_budget_goes_to_the_most_probable_tokens_of_any_member() -> None:
    sure = Fake(Needs(width=4), Draft([7, 7, 7, 7], confidence=[0.9] * 4))
    unsure = Fake(Needs(width=4), Draft([9, 7, 9, 9], confidence=[0.8, 0.2, 0.2, 0.2]))
    combined = CombinedDrafter([("sure", sure), ("unsure", unsure)], 5, learns=False)
    draft_batch = combined.propose([context(request(), [4], 5)], NONE, None)
    assert draft_batch.tokens == [[7, 7, 9, 7, 7]]
    assert draft_batch.parents == [[-1, 0, -1, 1, 3]]
    assert draft_batch.origins == [[1, 1, 2, 1, 1]]


def test_each_member_receives_its_own_accepted_count() -> None:
    one, two = Fake(Needs(width=3), Draft([7, 8, 9])), Fake(Needs(width=3), Draft([7, 5, 6]))
    combined, asked = CombinedDrafter([("one", one), ("two", two)], 6, learns=True), request()
    combined.propose([context(asked, [4])], NONE, None)
    asked.output.append(4)
    combined.propose([context(asked, [7, 5, 3])], NONE, None)
    assert (one.kept, two.kept) == ([1], [2])
    combined.propose([context(asked, [])], NONE, None)  # inside a prompt there is nothing to hear
    assert (one.kept, two.kept) == ([1], [2])


def test_a_costly_member_is_skipped_while_a_free_one_drafts_better() -> None:
    free = Fake(Needs(width=8), Draft([7] * 8, confidence=[0.95] * 8))
    costly = Fake(Needs(width=4, costs_time=True, has_kv=True), Draft([1, 2, 3, 4], confidence=[0.3] * 4))
    combined, asked = CombinedDrafter([("costly", costly), ("free", free)], 12, learns=True), request()
    for _ in range(40):
        combined.propose([context(asked, [7, 7, 7, 7, 7], 12)], NONE, None)
        asked.output += [7] * 5
    assert len(costly.widths) == 40  # it follows the text all the while
    assert 1 <= sum(width > 0 for width in costly.widths) <= 4  # and is tried from time to time
    free.says = Draft([], confidence=[])
    costly.widths.clear()
    combined.propose([context(asked, [7], 12)], NONE, None)
    assert costly.widths == [4]


def test_each_costly_member_is_explored_again() -> None:
    """A member that is called at every step does not delay the exploration of another."""
    needs = Needs(width=4, costs_time=True, has_kv=True)
    right, wrong = (Fake(needs, Draft([token] * 4, confidence=[0.5] * 4)) for token in (7, 1))
    combined, asked = CombinedDrafter([("right", right), ("wrong", wrong)], 8, learns=True), request()
    for _ in range(2 * MAX_PAUSE + 40):
        combined.propose([context(asked, [7] * 5, 8)], NONE, None)
        asked.output += [7] * 5
    assert all(right.widths)
    assert 1 <= sum(width > 0 for width in wrong.widths[-MAX_PAUSE - 10 :]) <= 2


def test_a_member_that_costs_more_than_it_adds_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = Needs(width=4, costs_time=True, has_kv=True)
    costly = Fake(needs, Draft([1, 2, 3, 4], confidence=[0.9] * 4), Clock(monkeypatch))
    combined = CombinedDrafter([("costly", costly)], 4, learns=True)
    for costly.recorded in (False, True):  # recordings are not learned as latencies
        for width in (0, 4):
            for _ in range(9):
                found = combined.propose([context(request(), [4], width)], NONE, None)
                assert found.recorded is costly.recorded
    costly.recorded = False
    # Tokens a second: the 0.2 seconds of a draft are worth one token, or four. The first draft that loses is a probe.
    for tokens_per_second, widths in ((5.0, [4, 4]), (20.0, [4, 0])):
        costly.widths.clear()
        asked = replace(context(request(), [4], 4), tokens_per_second=tokens_per_second)
        for _ in range(2):
            combined.propose([asked], NONE, None)
        assert costly.widths == widths


def test_a_draft_that_was_never_verified_is_not_counted_as_accepted() -> None:
    """A call that fails after drafting is repeated for the same text."""
    member = Fake(Needs(width=4), Draft([7] * 4, confidence=[0.5] * 4))
    combined, asked = CombinedDrafter([("member", member)], 4, learns=True), request()
    for _ in range(2):
        combined.propose([context(asked, [7, 7, 7], 4)], NONE, None)
    assert member.kept == []
    asked.output += [7, 7, 7]
    combined.propose([context(asked, [7, 7, 9], 4)], NONE, None)
    assert member.kept == [2]


def test_confidence_is_calibrated_by_acceptance() -> None:
    """The budget moves from a confident member that is wrong to a less confident one that is right."""
    boasts = Fake(Needs(width=2), Draft([1, 2], confidence=[0.9, 0.9]))
    modest = Fake(Needs(width=2), Draft([7, 8], confidence=[0.4, 0.4]))
    combined, asked = CombinedDrafter([("boasts", boasts), ("modest", modest)], 2, learns=True), request()
    first = combined.propose([context(asked, [4], 2)], NONE, None)
    for _ in range(60):
        asked.output += [4]
        combined.propose([context(asked, [7, 8, 4], 4)], NONE, None)
        asked.output += [7, 8]
    last = combined.propose([context(asked, [4], 2)], NONE, None)
    assert (first.tokens, last.tokens) == ([[1, 2]], [[7, 8]])


def test_each_member_reads_its_own_states() -> None:
    low, high = Fake(Needs(width=1, aux_layers=(1, 3)), Draft([1])), Fake(Needs(width=1, aux_layers=(3,)), Draft([2]))
    blind = Fake(Needs(width=1), Draft([3]))
    combined = CombinedDrafter([("low", low), ("high", high), ("blind", blind)], 3, learns=True)
    assert combined.needs.aux_layers == (1, 3)
    combined.propose([context(request(), [4])], NONE, torch.tensor([[1.0, 1.0, 3.0, 3.0]]))
    assert low.states is not None and low.states.tolist() == [[1.0, 1.0, 3.0, 3.0]]
    assert high.states is not None and high.states.tolist() == [[3.0, 3.0]]
    assert blind.states is None


def test_stats_count_the_tokens_of_each_drafter() -> None:
    spec_stats = SpecStats()
    spec_stats.count(Draft([7, 8, 9], [-1, -1, 0], origins=[3, 2, 1]), [7, 9], ["one", "two"])
    spec_stats.count(None, [])
    assert spec_stats.drafters == {"one": DrafterStats(2, 2), "two": DrafterStats(2, 1)}
    assert spec_stats.widths == {3: 1, 0: 1} and (spec_stats.drafted, spec_stats.accepted) == (3, 2)
    both = SpecStats()
    both.add(spec_stats)
    both.add(spec_stats)
    assert both.drafters == {"one": DrafterStats(4, 4), "two": DrafterStats(4, 2)} and both.widths == {3: 2, 0: 2}


# ---- through the engine ----


def test_drafters_work_together_in_an_engine(tiny_llm, tmp_path) -> None:
    head = tiny_heads.make("eagle3", tmp_path)["model"]
    expected = tiny_llm().generate(PROMPT, PARAMS)[0].completions[0].token_ids
    llm = tiny_llm(speculate=f"suffix+eagle3+ngram:eagle3.model={head},ngram.width=3,adaptive=no")
    stats = llm.generate(PROMPT, PARAMS)[0]
    assert stats.completions[0].token_ids == expected
    spec_stats = stats.stats.speculation
    assert set(spec_stats.drafters) == {"suffix", "eagle3", "ngram"}
    assert all(0 <= stats.accepted <= stats.drafted for stats in spec_stats.drafters.values())
    assert spec_stats.drafters["eagle3"].drafted > 0
    assert spec_stats.accepted <= sum(stats.accepted for stats in spec_stats.drafters.values())
    assert llm.method_stats["suffix+eagle3+ngram"] == spec_stats


def test_options_reach_the_method_that_they_name() -> None:
    plan = parse("suffix+ngram:ngram.shortest=2,suffix.width=5,width=9,least=0.3")
    (suffix, first), (ngram, second) = plan.options.members
    assert (suffix, ngram, plan.options.width) == ("suffix", "ngram", 9)
    assert (first.width, first.least, second.shortest, second.least) == (5, 0.3, 2, 0.3)
    assert parse("suffix+ngram").options.width == 0  # 0: as many tokens as all members draft


@pytest.mark.parametrize(
    ("speculate", "message"),
    [
        ("suffix+suffix", "must name different methods"),
        ("suffix+", "must name different methods"),
        ("none+ngram", "must name different methods"),
        ("suffix+guesswork", "no method called `guesswork`"),
        ("suffix+ngram:colour=3", "none of `suffix+ngram` has an option `colour`"),
        ("suffix+ngram:ngram.colour=3", "`ngram.colour` is not an option of the method `ngram`"),
        ("suffix+ngram:width=0", "`width` is 0"),
    ],
)
def test_methods_that_cannot_be_combined_are_refused(speculate: str, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse(speculate)
    assert message in str(refusal.value)


def test_merged_drafts_have_no_distribution(tiny_llm, tmp_path) -> None:
    head = tiny_heads.make("eagle3", tmp_path)["model"]
    with pytest.raises(UserError, match="the distribution that they were sampled from is lost"):
        tiny_llm(speculate=f"suffix+eagle3:model={head},verify=rejection,draft=probabilistic")


def test_a_request_may_name_several_that_need_nothing(tiny_llm) -> None:
    llm = tiny_llm(speculate="suffix+ngram:suffix.width=5,ngram.width=3")
    assert llm.engine.spec_manager.methods["suffix+ngram"].needs.width == 8
    llm = tiny_llm(speculate="none")
    output = llm.generate(PROMPT, replace(PARAMS, speculate="suffix+ngram"))[0]
    assert output.stats.method == "suffix+ngram"
    with pytest.raises(UserError, match="`eagle3`, which needs a model"):
        llm.generate(PROMPT, replace(PARAMS, speculate="suffix+eagle3"))
