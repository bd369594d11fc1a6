"""Packing: nothing is lost, torn or seen twice, little is padding, and any step can be made by itself."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import UserError
from outrider.train.data.pack import Pack, Packer, ahead, best_fit
from outrider.train.data.store import Document, Store, StoreHeader

Array = np.ndarray[Any, Any]
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Listed:
    prompt_lengths: Array
    lengths: Array
    held_out: Array


@dataclass
class Texts:
    """Documents in lists. Token i of document n is 1000 * n + i, so that a pack tells where each came from."""

    prompts: list[int]
    answers: list[int]
    held_out: list[bool]

    def documents(self) -> Listed:
        prompts, answers = np.array(self.prompts, int), np.array(self.answers, int)
        return Listed(prompts, prompts + answers, np.array(self.held_out, bool))

    def tokens(self, index: int) -> Array:
        return 1000 * index + np.arange(self.prompts[index] + self.answers[index])

    def chosen(self, length: int, held_out: bool = False) -> dict[int, int]:
        """The documents that should come, with their lengths."""
        sizes = zip(self.prompts, self.answers, self.held_out, strict=True)
        return {n: min(p + a, length) for n, (p, a, held) in enumerate(sizes) if held == held_out and a and p < length}


documents = st.builds(
    lambda rows: Texts(*map(list, zip(*rows, strict=True))),
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40), st.booleans()), min_size=1, max_size=60),
)


def of_pass(packer: Packer, number: int) -> list[Pack]:
    steps = packer.steps_per_pass
    return [packer.pack(step) for step in range(number * steps, (number + 1) * steps)]


def read(pack: Pack, texts: Texts) -> list[tuple[int, int]]:
    """Documents and lengths, in their order in the pack, each checked to be whole."""
    found = []
    for tokens, positions, numbers, answered in zip(
        pack.tokens.tolist(), pack.positions.tolist(), pack.documents.tolist(), pack.answered.tolist(), strict=True
    ):
        size = sum(number >= 0 for number in numbers)
        assert all(number == -1 for number in numbers[size:])
        assert not any(tokens[size:] + positions[size:] + answered[size:])
        begin = 0
        for number, run in itertools.groupby(numbers[:size]):
            end = begin + len(list(run))
            document = tokens[begin] // 1000
            assert number == (numbers[begin - 1] + 1 if begin else 0)
            assert tokens[begin:end] == [1000 * document + position for position in range(end - begin)]
            assert positions[begin:end] == list(range(end - begin))
            assert answered[begin:end] == [position >= texts.prompts[document] for position in range(end - begin)]
            found.append((document, end - begin))
            begin = end
    return found


def same(one: Pack, other: Pack) -> bool:
    names = "tokens", "positions", "documents", "answered"
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


@settings(max_examples=60)
@given(documents, st.integers(1, 5), st.integers(2, 50), st.integers(-3, 5), st.booleans())
def test_a_pass_holds_every_document_once(texts: Texts, rows: int, length: int, seed: int, held_out: bool) -> None:
    wanted = texts.chosen(length, held_out)
    if not wanted and not held_out:
        with pytest.raises(UserError, match="no document"):
            Packer(texts, rows, length, seed)
        return
    packer = Packer(texts, rows, length, seed, held_out)
    assert packer.tokens_per_pass == sum(wanted.values())
    for number in (0, 3):
        packs = of_pass(packer, number)
        assert all(pack.tokens.shape == (rows, length) for pack in packs)
        assert Counter(found for pack in packs for found in read(pack, texts)) == Counter(wanted.items())


def test_answer_limits_the_tokens_that_count_as_answered() -> None:
    texts = some()
    whole, cut = Packer(texts, 4, 64), Packer(texts, 4, 64, answer=7)
    listed = texts.documents()
    prompts, lengths = (each[~listed.held_out] for each in (listed.prompt_lengths, listed.lengths))
    kept = np.minimum(lengths - prompts, 7)
    assert whole.tokens_per_pass > cut.tokens_per_pass == int((prompts + kept).sum())
    assert sum(int(pack.answered.sum()) for pack in of_pass(cut, 0)) == int(kept.sum())


@settings(max_examples=30)
@given(documents, st.integers(0, 3), st.integers(0, 50))
def test_a_pack_depends_only_on_seed_and_step(texts: Texts, seed: int, step: int) -> None:
    if not texts.chosen(40):
        return
    walked = Packer(texts, 2, 40, seed)
    for earlier in range(step + 1):
        pack = walked.pack(earlier)
    assert same(pack, Packer(texts, 2, 40, seed).pack(step))


def some(count: int = 200) -> Texts:
    draws = np.random.default_rng(1)
    return Texts(
        draws.integers(5, 30, count).tolist(),
        draws.integers(1, 60, count).tolist(),
        (draws.random(count) < 0.2).tolist(),
    )


def test_the_order_depends_on_pass_and_seed_except_for_held_out_documents() -> None:
    texts = some()

    def order(packer: Packer, number: int) -> list[tuple[int, int]]:
        return [found for pack in of_pass(packer, number) for found in read(pack, texts)]

    packer, other = Packer(texts, 4, 64, seed=1), Packer(texts, 4, 64, seed=2)
    orders = [order(packer, 0), order(packer, 1), order(other, 0)]
    assert len({tuple(each) for each in orders}) == 3
    held = Packer(texts, 4, 64, seed=1, held_out=True)
    assert order(held, 0) == order(held, 1) == order(held, 7)
    assert not {document for document, _ in order(held, 0)} & {document for document, _ in orders[0]}


def test_documents_of_a_store_are_packed_by_their_split(tmp_path: Path) -> None:
    texts = Texts([3, 5, 4], [9, 2, 8], [False, False, True])
    with Store(tmp_path, shard_bytes=64) as store:
        store.claim(StoreHeader("some", 0, 5000, {}))
        for number, prompt in enumerate(texts.prompts):
            tokens = texts.tokens(number).tolist()
            store.append(Document(tokens, prompt, number, number, 0.0, texts.held_out[number]))
            store.flush()
    found = [Packer(Store(tmp_path), 1, 20, held_out=held_out).pack(0) for held_out in (False, True)]
    assert [sorted(read(pack, texts)) for pack in found] == [[(0, 12), (1, 7)], [(2, 12)]]


def test_tensors_of_a_pack_have_integer_and_bool_dtypes() -> None:
    pack = Packer(some(), 4, 64).pack(0)
    assert pack.tokens.dtype == pack.positions.dtype == pack.documents.dtype == torch.int64
    assert pack.answered.dtype == torch.bool


def test_padding_takes_less_than_three_percent_of_a_pass() -> None:
    draws = np.random.default_rng(2)
    prompts, answers = draws.integers(20, 200, 3000).tolist(), draws.integers(50, 700, 3000).tolist()
    packer = Packer(Texts(prompts, answers, [False] * 3000), 8, 1024)
    empty = sum(int((pack.documents < 0).sum()) for pack in of_pass(packer, 0))
    share = empty / (packer.steps_per_pass * 8 * 1024)
    assert share == pytest.approx(packer.padding)
    assert share < 0.03


def test_best_fit_fills_the_tightest_row() -> None:
    rows, count = best_fit([6, 7, 3, 4, 10, 1], 10)
    assert rows.tolist() == [0, 1, 1, 0, 2, 3]
    assert count == 4


def test_without_held_out_documents_there_are_no_steps() -> None:
    packer = Packer(Texts([3], [4], [False]), 2, 16, held_out=True)
    assert packer.steps_per_pass == 0
    assert packer.padding == 0


@pytest.mark.parametrize(("rows", "length"), [(0, 8), (1, 1)])
def test_packs_without_space_for_a_document_are_refused(rows: int, length: int) -> None:
    with pytest.raises(UserError, match=f"packs of {rows} rows of {length} tokens"):
        Packer(some(), rows, length)


def test_prefetched_packs_come_in_order_and_close_ends_the_thread() -> None:
    packer = Packer(some(), 4, 64)
    before = threading.active_count()
    coming = ahead(packer, 5, HOST)
    for step in range(5, 12):
        assert same(next(coming), packer.pack(step))
    assert threading.active_count() > before
    coming.close()
    assert threading.active_count() == before


def test_an_error_in_the_prefetch_thread_is_raised_by_the_consumer() -> None:
    packer = Packer(some(), 4, 64)

    class Broken(Texts):
        def tokens(self, index: int) -> Array:
            raise OSError("gone")

    packer.source = Broken([], [], [])
    with pytest.raises(OSError, match="gone"):
        next(ahead(packer, 0, HOST))
