"""Cases of next_tokens, draft_inputs, next_slots, block_inputs and ngram_drafts. Items are requests. See case.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..protocol import Kernels
from ..structures import NgramLookup, TokenHistory
from . import inputs as make
from .case import Case, Run, listed

VOCABULARY = 1000
BACKUP = 7
# Rows of (tokens in the step, drafted among them, chosen), where 0 chosen is a row inside its prompt.
STEPS = ((5, 4, 5), (5, 4, 1), (3, 2, 2), (19, 0, 0), (1, 0, 1), (6, 0, 1), (2, 1, 1), (8, 4, 3), (4, 3, 0))


def next_tokens(name: str, padding: int, discarded: Sequence[int] = ()) -> Case:
    """`padding` fills `chosen` after a row's own tokens."""
    width = max(drafted for _, drafted, _ in STEPS)

    def build(ops: Kernels, seed: int) -> Run:
        chosen = _tokens(seed, len(STEPS), width + 1)  # [B, width + 1]
        for row, (_, _, count) in enumerate(STEPS):
            chosen[row, count:] = padding

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            rows = listed(items, len(STEPS))
            starts = _starts([STEPS[row][0] for row in rows])
            following = ops.next_tokens(
                chosen[rows],
                _integers([STEPS[row][1] for row in rows]),
                starts,
                _integers([BACKUP + row for row in rows]),
                torch.tensor([row in discarded for row in rows], dtype=torch.uint8),
                VOCABULARY,
            )
            return following.tokens, following.counts, following.rejected, following.ends - starts[:-1]

        return run

    return Case("next_tokens", name, len(STEPS), 0.0, build)


def draft_inputs(name: str, extra: int, shift: bool) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        tokens = [_tokens(seed + row, length) for row, (length, _, _) in enumerate(STEPS)]
        newest = _tokens(seed, len(STEPS))  # [B]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            rows = listed(items, len(STEPS))
            lengths = [STEPS[row][0] for row in rows]
            starts = _starts(lengths)
            positions = [torch.arange(100 * row, 100 * row + length) for row, length in zip(rows, lengths, strict=True)]
            found = ops.draft_inputs(
                torch.cat([tokens[row] for row in rows]),
                torch.cat(positions).to(torch.int32),
                starts,
                starts[1:] - 1 - _integers([_rejected(row) for row in rows]),
                newest[rows],
                extra,
                shift,
                VOCABULARY - 1,
            )
            begins = found.query_starts[:-1]  # [B]
            sources = found.sources - begins.repeat_interleave(_integers(lengths))  # [T], -1 shows as less than 0
            return (
                _pad(found.tokens, found.query_starts),
                _pad(found.positions, found.query_starts),
                _pad(found.rejected, found.query_starts),
                found.query_starts.diff(),
                found.samples.reshape(-1, extra) - begins[:, None],
                _pad(sources.clamp(min=-1), starts),
            )

        return run

    return Case("draft_inputs", name, len(STEPS), 0.0, build)


def next_slots(name: str, limit: int, page_size: int = make.PAGE, count: int = 1) -> Case:
    """Positions around the ends of pages, of the page table and of `limit`; a missing page."""
    positions = _integers([0, page_size - 2, page_size - 1, page_size, 50, 98, 99, 100, 3 * page_size - 1])  # [B]

    def build(ops: Kernels, seed: int) -> Run:
        order = torch.randperm(positions.shape[0] * 6, generator=make.generator(seed))
        tables = order.reshape(-1, 6).to(torch.int32)  # [B, P]
        tables[:, 5] = -1
        tables[8, 3] = -1

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            rows = listed(items, positions.shape[0])
            found = ops.next_slots(positions[rows], tables[rows], page_size, limit, count)
            return tuple(part.reshape(len(rows), count) for part in found)

        return run

    return Case("next_slots", name, positions.shape[0], 0.0, build)


def block_inputs(name: str, width: int, limit: int = 1000, page_size: int = make.PAGE) -> Case:
    """Contexts that end around the ends of pages, of the page table and of `limit`; rejected tokens; a missing page."""
    # Rows of (first position, tokens in the step, rejected among them).
    steps = ((0, 1, 0), (0, 7, 3), (3, 5, 4), (page_size - 1, 2, 1), (44, 6, 0), (90, 9, 2), (30, 1, 0), (99, 4, 3))
    longest = max(length for _, length, _ in steps)

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        tables = torch.randperm(len(steps) * 8, generator=random).reshape(-1, 8).to(torch.int32)  # [B, P]
        tables[6, 2] = tables[:, 7] = -1
        newest = torch.randint(0, 1000, (len(steps),), dtype=torch.int32, generator=random)  # [B]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            rows = listed(items, len(steps))
            own = [steps[row] for row in rows]
            starts = torch.tensor([0] + [length for _, length, _ in own]).cumsum(0).to(torch.int32)  # [B + 1]
            positions = torch.cat([torch.arange(first, first + length) for first, length, _ in own]).to(torch.int32)
            ends = starts[1:] - 1 - torch.tensor([rejected for *_, rejected in own], dtype=torch.int32)
            found = ops.block_inputs(positions, starts, ends, newest[rows], tables[rows], page_size, width, 999, limit)
            context = torch.full((len(rows), longest), -2, dtype=torch.int32)
            for row, (begin, end) in enumerate(pairwise(starts.tolist())):
                context[row, : end - begin] = found.context_slots[begin:end]
            block = [part.reshape(len(rows), width + 1) for part in (found.tokens, found.positions, found.slots)]
            return context, *block, found.query_starts.diff()

        return run

    return Case("block_inputs", name, len(steps), 0.0, build)


def ngram_drafts(
    name: str,
    width: int,
    vocabulary: int = 6,
    shortest: int = 1,
    longest: int = 3,
    lengths: Sequence[int] = (1, 2, 3, 5, 17, 18, 40, 90),
    page_size: int = make.PAGE,
) -> Case:
    """Texts of few different tokens, or of a period, that grow by some tokens between six drafts."""
    added, most = (1, 3, 1, 5, 2), 24
    pages = -(-(max(lengths) + sum(added)) // page_size)

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        count = len(lengths)
        texts = torch.randint(0, vocabulary, (count, pages * page_size), dtype=torch.int32, generator=random)
        texts[1::3] = texts[1::3, :7].repeat(1, texts.shape[1])[:, : texts.shape[1]]  # they repeat themselves
        tables = torch.randperm(count * pages, generator=random).reshape(count, pages).to(torch.int32)  # [B, P]
        tokens = torch.empty(count * pages, page_size, dtype=torch.int32)
        tokens[tables.long()] = texts.view(count, pages, page_size)
        kept = torch.randint(0, width + 1, (most + 1,), dtype=torch.int32, generator=random)
        lookup = NgramLookup(shortest, longest, 32, kept)

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            rows = listed(items, count)
            copies = torch.full((len(rows), 3), -1, dtype=torch.int32)
            results = []
            ends = [lengths[row] for row in rows]
            for more in (0, *added):
                ends = [end + more for end in ends]
                last = _integers(ends) - 1  # [B]
                limits = _integers([1 + lengths[row] + 15 - row for row in rows])
                known = tokens.flatten().clone()
                newest = texts[rows].gather(1, last[:, None].long())[:, 0]
                history = TokenHistory(known, tables[rows], page_size)
                results.append(ops.ngram_drafts(history, lookup, newest, last, limits, copies, width))
                results.append(copies.clone())
            return tuple(results)

        return run

    return Case("ngram_drafts", name, len(lengths), 0.0, build)


def _tokens(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, dtype=torch.int32, generator=make.generator(seed))


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _starts(lengths: Sequence[int]) -> Tensor:
    return _integers([0, *lengths]).cumsum(0).to(torch.int32)  # [B + 1]


def _rejected(row: int) -> int:
    _, drafted, count = STEPS[row]
    return drafted + 1 - count if count else 0


def _pad(values: Tensor, starts: Tensor) -> Tensor:
    """Ragged rows side by side: [B, the longest of any batch], -2 after a row's end."""
    longest = 2 * max(length for length, _, _ in STEPS)
    out = torch.full((starts.shape[0] - 1, longest), -2, dtype=torch.int32)
    for row, own in enumerate(values.tensor_split(starts[1:-1].long())):
        out[row, : own.shape[0]] = own
    return out


DRAFTER_INPUT_CASES = [
    next_tokens("rejections", -1),
    next_tokens("discarded rows", -1, discarded=(0, 2, 4)),
    next_tokens("ids beyond the vocabulary", VOCABULARY),
    draft_inputs("draft model", extra=1, shift=False),
    draft_inputs("parallel draft model", extra=4, shift=False),
    draft_inputs("draft head", extra=1, shift=True),
    draft_inputs("parallel draft head", extra=4, shift=True),
    next_slots("several pages", limit=1000),
    next_slots("short limit", limit=51),
    next_slots("one slot in a page", limit=1000, page_size=1),
    next_slots("five steps at once", limit=19, count=5),
    next_slots("a page's worth of steps at once", limit=1000, count=make.PAGE + 1),
    block_inputs("fifteen masks", width=15),
    block_inputs("no masks", width=0),
    block_inputs("short limit", width=7, limit=100),
    block_inputs("one slot in a page", width=3, page_size=1),
    ngram_drafts("eight tokens", width=8),
    ngram_drafts("one token, few matches", width=1, vocabulary=40),
    ngram_drafts("long n-grams", width=15, shortest=2, longest=6, vocabulary=3),
    ngram_drafts("several blocks of positions", width=7, vocabulary=30, lengths=(1030, 2100, 9), page_size=64),
    ngram_drafts("one slot in a page", width=3, lengths=(4, 9, 30), page_size=1),
]
