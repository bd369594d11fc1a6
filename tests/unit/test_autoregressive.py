"""Drafters with a network of their own: what they draft, and what their pages hold, whatever happened on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_target import SIZE, Stage, continuation, entries, from_scratch
from torch import Tensor

import tiny
from outrider.kernels import Batch, Kernels, load
from outrider.models import build
from outrider.recordings import Recordings
from outrider.request import Request
from outrider.speculation import DraftContext
from outrider.speculation.drafters.autoregressive import Autoregressive

WIDTH = 3


@pytest.fixture(scope="module", params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    return load(request.param)


class Same:
    """A network that is the target itself, over pages of its own."""

    features = 0
    ids = None

    def __init__(self, stage: Stage, context: int = 128, mask: int = -1) -> None:
        self.model = build(tiny.checkpoint("llama"), stage.ops)
        self.context, self.mask, self.parallel = context, mask, mask >= 0
        shape = self.model.config
        self.pages = stage.target.storage(shape.layers, shape.kv_heads, shape.head_dim, "float32")
        self.ran: list[list[int]] = []  # positions of each pass
        self.broken = False

    def project_features(self, features: Tensor) -> Tensor:
        raise AssertionError("it reads no states")

    def run(self, batch: Batch, features: Tensor | None) -> Tensor:
        assert features is None
        states, _ = self.model.forward(batch, self.pages.layers)
        self.ran.append(batch.positions.tolist())
        if self.broken:
            raise RuntimeError("broken on purpose")
        return states

    def logits(self, states: Tensor) -> Tensor:
        return self.model.logits(states)

    def feedback_features(self, states: Tensor) -> Tensor | None:
        return None


def play(ops: Kernels, width: int = WIDTH, context: int = 128, mask: int = -1, **options: Any) -> tuple[Stage, Same]:
    stage = Stage(ops, **options)
    network = Same(stage, context, mask)
    stage.begin(Autoregressive(network, stage.target, width))
    return stage, network


def assert_draft(stage: Stage, request: Request, width: int = WIDTH) -> None:
    text = request.prompt + request.output
    assert stage.drafts[request] == continuation(stage.model, request, text, width)


def assert_entries(stage: Stage, network: Same, request: Request) -> None:
    """Everything below the newest token is there, to the bit, and so is that of the newest."""
    text = request.prompt + request.output
    assert torch.equal(entries(network.pages, request.pages, 0, len(text)), from_scratch(network.model, text))


def test_needs(ops: Kernels) -> None:
    stage, _ = play(ops, context=50)
    needs = stage.proposer.needs
    assert (needs.width, needs.lookahead, needs.context, needs.has_kv, needs.aux_layers) == (3, 3, 50, True, ())


@pytest.mark.parametrize("chunk", [1, 3, SIZE, 7, 11])
def test_drafts_are_the_targets_own_continuation_however_the_prompt_is_cut(ops: Kernels, chunk: int) -> None:
    stage, network = play(ops)
    request = stage.request(tiny.prompt(11))
    while request.computed + chunk < 11:
        assert stage.step((request, chunk, 0)) == [[]]
    stage.decode(request, width=WIDTH)
    assert_draft(stage, request)
    assert_entries(stage, network, request)


def test_what_was_kept_is_not_computed_again_and_what_was_not_is(ops: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recordings, "find", lambda *_: None)  # the passes of a replay are not seen here
    stage, network = play(ops)
    stage.surprises = {13, 14, 17, 19, 22}
    request = stage.request(tiny.prompt(9))
    stage.decode(request, width=WIDTH)
    lengths = []
    for _ in range(8):
        before, network.ran = request.length, []
        stage.decode(request, width=WIDTH)
        lengths.append(request.length - before)
        assert_draft(stage, request)
        assert_entries(stage, network, request)
        # The last drafted token never ran: after a whole draft two entries are missing, else one.
        assert len(network.ran[0]) == (2 if lengths[-1] == WIDTH + 1 else 1)
        assert [len(ran) for ran in network.ran[1:]] == [1] * (WIDTH - 1)
    assert set(lengths) == {1, 2, 3, 4}


def test_a_request_drafts_the_same_beside_others(ops: Kernels) -> None:
    def texts(together: bool) -> list[list[list[int]]]:
        stage, _ = play(ops)
        stage.surprises = {12, 15, 16}
        requests = [stage.request(tiny.prompt(length, seed), seed) for seed, length in enumerate((5, 9, 14))]
        seen: list[list[list[int]]] = [[] for _ in requests]
        widths = [(3, 1, 2), (0, 3, 3), (2, 3, 0), (3, 3, 3), (1, 2, 3)]
        for step in widths:
            works = [(r, r.length - r.computed, width) for r, width in zip(requests, step, strict=True)]
            drafts = stage.step(*works) if together else [stage.step(work)[0] for work in works]
            for each, draft_batch in zip(seen, drafts, strict=True):
                each.append(draft_batch)
            assert [len(draft_batch) for draft_batch in drafts] == list(step)
        return seen

    assert texts(together=True) == texts(together=False)


def test_prompts_and_answers_share_a_step(ops: Kernels) -> None:
    stage, network = play(ops)
    old, new = stage.request(tiny.prompt(6)), stage.request(tiny.prompt(13, 1), 1)
    stage.decode(old, width=WIDTH)
    for start in (0, 5, 10):
        count = min(5, 13 - start)
        drafts = stage.step((new, count, 2 if start == 10 else 0), (old, old.length - old.computed, start % 4))
        assert len(drafts[1]) == start % 4
        assert_draft(stage, old, start % 4)
    for request in (old, new):
        assert_entries(stage, network, request)
    assert_draft(stage, new, 2)


def test_preemption_starts_anew_in_other_pages(ops: Kernels) -> None:
    stage, network = play(ops)
    request = stage.request(tiny.prompt(10))
    for _ in range(3):
        stage.decode(request, width=WIDTH)
    stage.preempt(request)
    stage.step((request, 7, 0))
    stage.decode(request, width=WIDTH)
    assert_draft(stage, request)
    assert_entries(stage, network, request)


def test_a_shared_prefix_is_not_computed_again(ops: Kernels) -> None:
    stage, network = play(ops)
    first = stage.request(tiny.prompt(14))
    stage.decode(first, width=WIDTH)
    second = stage.request([*tiny.prompt(14)[:12], 7, 8], 1)
    second.pages, second.computed = first.pages[:3], 12
    network.ran = []
    stage.decode(second, width=WIDTH)
    assert network.ran[0] == [12, 13, 14]
    assert_draft(stage, second)
    assert_entries(stage, network, second)


def test_entries_wait_for_their_pages(ops: Kernels) -> None:
    stage, network = play(ops)
    request = stage.request(tiny.prompt(11))
    stage.step((request, 8, 0), lookahead=0)
    assert network.ran == [list(range(8))]  # the entry of token 8 has no page yet
    stage.step((request, 1, 0), lookahead=0)
    assert network.ran[1:] == [[8, 9]]
    stage.step((request, 2, 3), lookahead=0)
    assert [len(draft) for draft in stage.drafts.values()] == [1]  # two pages and three tokens: room for one draft
    assert_draft(stage, request, 1)
    stage.decode(request, width=WIDTH)
    assert_draft(stage, request)
    assert_entries(stage, network, request)


def test_a_text_that_outgrows_the_network_is_given_up_alone(ops: Kernels) -> None:
    stage, network = play(ops, context=16)
    long, short = stage.request(tiny.prompt(11)), stage.request(tiny.prompt(5, 1), 1)
    stage.surprises = set(range(100))  # one token a step
    lengths = []
    for _ in range(8):
        drafts = stage.decode(long, short, width=WIDTH)
        lengths.append(len(drafts[0]))
        assert len(drafts[1]) == WIDTH
        assert_draft(stage, long, lengths[-1])
    assert lengths == [3, 3, 3, 2, 1, 0, 0, 0]
    assert max(max(ran) for ran in network.ran) == 15
    late = stage.request(tiny.prompt(30, 2), 2)
    assert stage.decode(late, width=WIDTH) == [[]]
    held = entries(network.pages, late.pages, 0, 16)
    assert torch.equal(held, from_scratch(network.model, late.prompt[:16]))  # for others who share the page


def test_a_failed_pass_leaves_nothing_behind(ops: Kernels) -> None:
    stage, network = play(ops)
    request = stage.request(tiny.prompt(6))
    stage.reach(request, 20)
    stage.run([(request.prompt, 0, request.pages)])
    context = DraftContext(request, 0, 6, [9], WIDTH, 0)
    network.broken = True
    with pytest.raises(RuntimeError, match="on purpose"):
        stage.proposer.propose([context], torch.tensor([9], dtype=torch.int32), None)
    network.broken = False
    for _ in range(2):  # a step may be repeated after it went well, too
        draft_batch = stage.proposer.propose([context], torch.tensor([9], dtype=torch.int32), None)
        expected = continuation(stage.model, request, [*request.prompt, 9], WIDTH)
        assert draft_batch.rows(draft_batch.tokens) == [expected]
    stage.proposer.release([request])
    stage.proposer.accept([request], [1])


def test_mask_tokens_give_all_drafts_in_one_pass(ops: Kernels) -> None:
    mask = 99
    stage, network = play(ops, mask=mask)
    stage.surprises = {12, 14}
    requests = [stage.request(tiny.prompt(length, length), length) for length in (5, 8)]
    for widths in [(3, 1), (2, 3), (0, 3), (3, 3), (1, 0)]:
        network.ran = []
        works = [(r, r.length - r.computed, width) for r, width in zip(requests, widths, strict=True)]
        drafts = stage.step(*works)
        assert len(network.ran) == 1
        for request, draft_batch, width in zip(requests, drafts, widths, strict=True):
            text = request.prompt + request.output
            logits, _ = tiny.run(stage.model, text + [mask] * (width - 1), chunk=100)
            assert draft_batch == logits[len(text) - 1 :].argmax(-1).tolist()[:width]
            if width:  # else it may be read later
                assert_entries(stage, network, request)


def test_mask_tokens_end_where_the_context_does(ops: Kernels) -> None:
    stage, network = play(ops, mask=99, context=10)
    requests = [stage.request(tiny.prompt(length, length), length) for length in (8, 4, 10)]
    drafts = stage.decode(*requests, width=WIDTH)
    assert [len(draft_batch) for draft_batch in drafts] == [2, 3, 0]
    assert max(network.ran[0]) == 9


def test_logits_are_kept_where_the_verification_asks_for_them(ops: Kernels) -> None:
    stage, network = play(ops, sampled=True, coupled=False)
    request, greedy = stage.request(tiny.prompt(9), 5, temperature=0.9), stage.request(tiny.prompt(4, 1), 1)
    stage.step((request, 9, 3), (greedy, 4, 2))
    draft_batch = stage.draft_batch
    assert (
        draft_batch is not None
        and draft_batch.logits is not None
        and draft_batch.logits.shape == (2, 3, tiny.VOCABULARY)
    )
    assert draft_batch.logits.dtype is torch.float32
    for row, (each, width) in enumerate([(request, 3), (greedy, 2)]):
        text = each.prompt + each.output + stage.drafts[each]
        logits, _ = tiny.run(network.model, text, chunk=100)
        assert torch.equal(draft_batch.logits[row, :width], logits[-width - 1 : -1])
    assert_draft(stage, greedy, 2)
    earlier, copy = draft_batch.logits, draft_batch.logits.clone()
    stage.decode(request, greedy, width=WIDTH)
    assert torch.equal(earlier, copy)


@pytest.mark.parametrize("shape", [{}, {"top_k": 5}, {"top_p": 0.6, "min_p": 0.05}])
def test_coupled_drafts_are_the_targets_own_samples(ops: Kernels, shape: dict[str, Any]) -> None:
    stage, _ = play(ops, sampled=True)
    requests = [stage.request(tiny.prompt(6, seed), seed, temperature=1.3, **shape) for seed in range(1, 4)]
    stage.decode(*requests, width=WIDTH)
    for _ in range(3):
        before = [request.length for request in requests]
        assert stage.draft_batch is not None and stage.draft_batch.logits is None
        stage.decode(*requests, width=WIDTH)
        assert [request.length for request in requests] == [length + WIDTH + 1 for length in before]
    plain = [continuation(stage.model, request, request.prompt, 13) for request in requests]
    assert [request.output for request in requests] == plain
    assert len({tuple(text) for text in plain}) == 3


def test_who_is_not_asked_reads_several_tokens_at_once(ops: Kernels) -> None:
    """Zero is a width, so a drafter that does not pay may cost little. Full pages are shared: they are whole."""
    stage, network = play(ops)
    request = stage.request(tiny.prompt(SIZE + 1, seed=5))
    stage.decode(request, width=0)
    read = len(network.ran)
    for _ in range(3 * SIZE):
        stage.decode(request, width=0)
        full = request.computed // SIZE * SIZE
        mine, true = entries(network.pages, request.pages, 0, full), entries(stage.pages, request.pages, 0, full)
        torch.testing.assert_close(mine, true)
    assert len(network.ran) == read + 3
    assert stage.decode(request, width=WIDTH)[0] == continuation(stage.model, request, request.tokens(0, 999), WIDTH)
