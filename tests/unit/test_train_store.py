"""The store of answers: what was flushed is there after any crash, and nothing else ever is."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import UserError
from outrider.train.data.store import Document, Store, StoreHeader

HEADER = StoreHeader("some/model", 100, 300, {"seed": 3, "mix": ((0.0, 1.0, 0.5),)})
SHARD_BYTES = 200  # a few documents each


@pytest.fixture(autouse=True, scope="module")
def no_fsync():
    """Skip fsync: the disk of a test never fails."""
    with mock.patch("os.fsync"):
        yield


def document(number: int) -> Document:
    length = 3 + number * 7 % 20
    tokens = [(number * 31 + index * 17) % 300 for index in range(length)]
    return Document(tokens, 1 + number % 3, number, number % 5 - 1, 0.5 * (number % 3), bool(number % 4 == 0))


DOCUMENTS = [document(number) for number in range(24)]


def write(folder: Path, documents: list[Document], every: int = 1, shard_bytes: int = SHARD_BYTES) -> None:
    with Store(folder, shard_bytes) as store:
        store.claim(HEADER)
        for index, each in enumerate(documents, start=1):
            store.append(each)
            if index % every == 0:
                store.flush()


def same(store: Store, documents: list[Document]) -> None:
    listed = store.documents()
    assert len(store) == len(listed.lengths) == len(documents)
    assert [store.tokens(index).tolist() for index in range(len(store))] == [each.tokens for each in documents]
    assert listed.prompt_lengths.tolist() == [each.prompt_length for each in documents]
    assert listed.held_out.tolist() == [each.held_out for each in documents]
    assert listed.numbers.tolist() == [each.number for each in documents]
    assert listed.prompts.tolist() == [each.prompt for each in documents]
    assert listed.temperatures.tolist() == [each.temperature for each in documents]
    assert listed.starts.tolist() == np.cumsum([0, *listed.lengths])[:-1].tolist()
    assert store.answered == sum(len(each.tokens) - each.prompt_length for each in documents)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("every", [1, 5, 100])
def test_documents_are_read_back(tmp_path: Path, every: int) -> None:
    write(tmp_path, DOCUMENTS, every)
    same(Store(tmp_path), DOCUMENTS)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.bin")]
    assert max(sizes) <= SHARD_BYTES and len(sizes) > 4


def test_flush_interval_does_not_change_files(tmp_path: Path) -> None:
    write(tmp_path / "often", DOCUMENTS, every=1)
    write(tmp_path / "once", DOCUMENTS, every=100)
    assert contents(tmp_path / "often") == contents(tmp_path / "once")


def test_short_documents_fill_the_index_first(tmp_path: Path) -> None:
    write(tmp_path, [Document([1], 0, number, 0, 0.0, False) for number in range(30)])
    assert max(path.stat().st_size for path in tmp_path.glob("index-*.bin")) <= SHARD_BYTES
    assert len(Store(tmp_path)) == 30


def test_unflushed_documents_are_not_read(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.claim(HEADER)
        store.append(DOCUMENTS[0])
        assert len(store) == 0 and store.answered == 0
        store.flush()
        same(store, DOCUMENTS[:1])
        store.append(DOCUMENTS[1])
        store.flush()
        same(store, DOCUMENTS[:2])  # the views of before are not used any more
        with pytest.raises(IndexError):
            store.tokens(2)


def test_ids_take_as_many_bytes_as_they_need(tmp_path: Path) -> None:
    large = Document([70_000, 5, 99_999], 1, 0, 0, 0.0, False)
    with Store(tmp_path) as store:
        store.claim(StoreHeader("m", 0, 100_000, {}))
        store.append(large)
    assert Store(tmp_path).tokens(0).tolist() == large.tokens
    assert (tmp_path / "tokens-00000.bin").stat().st_size == 12
    assert StoreHeader("m", 0, 2**16, {}).token.itemsize == 2


def test_counts_are_of_answers_that_are_not_held_out(tmp_path: Path) -> None:
    write(tmp_path, DOCUMENTS)
    expected = [0] * 300
    for each in DOCUMENTS:
        for token in each.tokens[each.prompt_length :] if not each.held_out else ():
            expected[token] += 1
    assert Store(tmp_path).counts(300).tolist() == expected
    with pytest.raises(UserError, match="300 tokens and the model has 299"):
        Store(tmp_path).counts(299)


def test_an_empty_store_has_no_documents(tmp_path: Path) -> None:
    store = Store(tmp_path / "none")
    assert len(store) == 0 and store.header is None and store.counts(7).tolist() == [0] * 7
    assert not (tmp_path / "none").exists()


def test_records_are_written_once_their_tokens_are_safe(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.claim(HEADER)
        calls: list[str] = []
        real = os.write

        def name(handle: int) -> str:
            return Path(f"/proc/self/fd/{handle}").readlink().name

        def write(handle: int, content: memoryview) -> int:
            calls.append(f"write {name(handle)}")
            return real(handle, content)

        with mock.patch("os.write", write), mock.patch("os.fsync", lambda handle: calls.append(f"sync {name(handle)}")):
            store.append(DOCUMENTS[0])
            store.flush()
    files = [call for call in calls if call.endswith(".bin")]
    tokens, index = "tokens-00000.bin", "index-00000.bin"
    assert files == [f"write {tokens}", f"sync {tokens}", f"write {index}", f"sync {index}"]
    assert calls[-1] == f"sync {tmp_path.name}"


class KilledError(BaseException):
    pass


@contextmanager
def dying(after: int, error: BaseException):
    """Fail after the given number of bytes written to shards."""
    left, real = after, os.write

    def write(handle: int, content: memoryview) -> int:
        nonlocal left
        if left < len(content):
            real(handle, content[:left])
            left = 0
            raise error
        left -= len(content)
        return real(handle, content)

    with mock.patch("os.write", write):
        yield


@settings(max_examples=60)
@given(after=st.integers(0, 1_800), every=st.integers(1, 8))
def test_a_writer_killed_at_any_byte_keeps_its_flushed_documents(after: int, every: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, whole = Path(name) / "killed", Path(name) / "whole"
        write(whole, DOCUMENTS)
        store = Store(folder, SHARD_BYTES)
        flushed = 0
        try:
            with dying(after, KilledError()):
                store.claim(HEADER)
                for index, each in enumerate(DOCUMENTS, start=1):
                    store.append(each)
                    if index % every == 0:
                        store.flush()
                        flushed = index
        except KilledError:
            pass
        if store._lock is not None:
            store._lock.close()  # as the death of its process would
        kept = len(Store(folder))
        assert kept >= flushed
        same(Store(folder), DOCUMENTS[:kept])
        write(folder, DOCUMENTS[kept:])
        same(Store(folder), DOCUMENTS)
        assert contents(folder) == contents(whole)


@settings(max_examples=60)
@given(tokens=st.integers(0, 200), index=st.integers(0, 200), junk=st.binary(max_size=80))
def test_a_truncated_last_shard_keeps_its_valid_records(tokens: int, index: int, junk: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, whole = Path(name) / "cut", Path(name) / "whole"
        write(folder, DOCUMENTS[:-1])
        write(whole, DOCUMENTS)
        last = max(int(path.stem.split("-")[1]) for path in folder.glob("tokens-*.bin"))
        for part, size in (("tokens", tokens), ("index", index)):
            path = folder / f"{part}-{last:05}.bin"
            path.write_bytes(path.read_bytes()[:size] + junk)
        kept = len(Store(folder))
        same(Store(folder), DOCUMENTS[:kept])
        write(folder, DOCUMENTS[kept:])
        same(Store(folder), DOCUMENTS)
        assert contents(folder) == contents(whole)


def test_a_changed_byte_of_the_last_document_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, DOCUMENTS)
    path = max(tmp_path.glob("tokens-*.bin"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    same(Store(tmp_path), DOCUMENTS[:-1])


@pytest.mark.parametrize("name", ["tokens-00001.bin", "index-00001.bin"])
@pytest.mark.parametrize("size", [None, 10])
def test_an_incomplete_earlier_shard_is_refused(tmp_path: Path, name: str, size: int | None) -> None:
    """Only a crash may cut, and it cuts the last shard: to drop all behind this one would lose finished work."""
    write(tmp_path, DOCUMENTS)
    (tmp_path / name).unlink() if size is None else os.truncate(tmp_path / name, size)
    with pytest.raises(UserError, match=r"shard 1 .* is incomplete: copy `tokens-00001.bin`"):
        Store(tmp_path)


@pytest.mark.parametrize("after", [0, 50, 230, 500, 777])
def test_a_full_disk_loses_only_what_did_not_fit(tmp_path: Path, after: int) -> None:
    store = Store(tmp_path / "full", SHARD_BYTES)
    store.claim(HEADER)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with dying(after, full), pytest.raises(UserError, match="no space left on device") as refusal:
        for each in DOCUMENTS:
            store.append(each)
            store.flush()
    kept = len(store)
    assert f"{kept} answers are kept" in str(refusal.value)
    same(store, DOCUMENTS[:kept])
    for each in DOCUMENTS[kept:]:  # there is room again
        store.append(each)
    store.close()
    write(tmp_path / "whole", DOCUMENTS)
    assert contents(tmp_path / "full") == contents(tmp_path / "whole")


def test_a_disk_too_full_for_the_header_is_reported(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    refused = pytest.raises(UserError, match=r"header.json.*no space left")
    with Store(tmp_path) as store, mock.patch("os.fsync", side_effect=full), refused:
        store.claim(HEADER)
    write(tmp_path, DOCUMENTS)
    same(Store(tmp_path), DOCUMENTS)


OTHERS = {
    "model": StoreHeader("some/other", 100, 300, HEADER.settings),
    "weights": StoreHeader("some/model", 101, 300, HEADER.settings),
    "vocabulary": StoreHeader("some/model", 100, 301, HEADER.settings),
    "seed": StoreHeader("some/model", 100, 300, {**HEADER.settings, "seed": 4}),
    "mix": StoreHeader("some/model", 100, 300, {"seed": 3}),
    "more": StoreHeader("some/model", 100, 300, {**HEADER.settings, "more": 1}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_answers_of_another_origin_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, DOCUMENTS)
    with Store(tmp_path) as store, pytest.raises(UserError, match=f"was started with `{name}`"):
        store.claim(OTHERS[name])
    same(Store(tmp_path), DOCUMENTS)


def test_the_same_model_in_another_folder_is_accepted(tmp_path: Path) -> None:
    write(tmp_path, DOCUMENTS)
    with Store(tmp_path) as store:
        store.claim(StoreHeader("/elsewhere/model", 100, 300, HEADER.settings))


HEADERS = {
    "no JSON": ("{", "is not JSON"),
    "a list": ("[]", "is not of format 1"),
    "another format": (json.dumps({"format": 2}), "is not of format 1"),
    "a field is missing": (json.dumps({"format": 1, "model": "m"}), "not a header of answers"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_invalid_headers_are_refused(tmp_path: Path, name: str) -> None:
    content, expected = HEADERS[name]
    (tmp_path / "header.json").write_text(content)
    with pytest.raises(UserError, match=expected):
        Store(tmp_path)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    write(tmp_path, DOCUMENTS[:1])
    early = Store(tmp_path)
    with Store(tmp_path) as first:
        first.claim(HEADER)
        first.append(DOCUMENTS[1])
        with pytest.raises(UserError, match="another run writes"):
            Store(tmp_path).claim(HEADER)
    same(early, DOCUMENTS[:1])
    with early:  # what it has not seen yet is not overwritten
        early.claim(HEADER)
        early.append(DOCUMENTS[2])
    same(Store(tmp_path), DOCUMENTS[:3])


def test_a_document_larger_than_a_shard_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path, 10) as store:
        store.claim(HEADER)
        with pytest.raises(UserError, match="raise `shard_bytes`"):
            store.append(Document(list(range(6)), 1, 0, 0, 0.0, False))
