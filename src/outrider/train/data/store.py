"""The target's answers on disk, as token ids: a header that says whose they are, and shards that only grow."""

from __future__ import annotations

import fcntl
import itertools
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import UserError
from ..io.disk import as_json, as_read, reason, sync_folder, write_whole
from .shards import RECORD, Entry, Shards, entry

FORMAT = 1
SHARD_BYTES = 15_000_000
FLUSH_BYTES = 1_000_000


@dataclass(frozen=True)
class Header:
    """Whose answers these are, and how they were asked for."""

    model: str
    weights: int  # bytes of the model's files; 0: it has none
    vocabulary: int
    settings: Mapping[str, Any]
    format: int = FORMAT

    @property
    def token(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocabulary <= 2**16 else "<u4")


@dataclass(frozen=True)
class Document:
    """A prompt and its answer, as they enter the store."""

    tokens: Sequence[int] | NDArray[Any]
    prompt_length: int
    number: int  # its place in the plan that it was written by; rising
    prompt: int  # the number of its prompt; -1: the model wrote it
    temperature: float
    held_out: bool


@dataclass(frozen=True)
class Documents:
    """All documents of a store, an entry each [N]; the tokens of all shards are counted through."""

    starts: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    lengths: NDArray[np.int64]  # of prompt and answer together
    held_out: NDArray[np.bool_]
    temperatures: NDArray[np.float32]
    prompts: NDArray[np.int64]
    numbers: NDArray[np.int64]


class Store:
    """What is read is what lies on the disk: what was appended since the last `flush` is not seen yet."""

    def __init__(self, folder: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.shard_bytes = Path(folder), shard_bytes
        self._pending: list[Entry] = []
        self._pending_bytes = 0
        self._lock: IO[bytes] | None = None
        self.header: Header | None = None
        self._shards: Shards | None = None
        self._read()

    def __len__(self) -> int:
        return self._count

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def token(self) -> np.dtype[Any]:
        """How an id is stored."""
        assert self.header is not None, "a store is claimed before it is written"
        return self.header.token

    @property
    def answered(self) -> int:
        """Tokens of all answers together."""
        kept = self.documents()
        return int((kept.lengths - kept.prompt_lengths).sum())

    def documents(self) -> Documents:
        return self._documents

    def tokens(self, index: int) -> NDArray[Any]:
        """Prompt and answer of one document, a view of the file."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        shard = bisect_right(self._firsts, index) - 1
        start = int(self._documents.starts[index] - self._documents.starts[self._firsts[shard]])
        return self._mapped(shard)[start : start + int(self._documents.lengths[index])]

    def counts(self, vocabulary: int) -> Tensor:
        """How often each token occurs in the answers that are not held out: [V] int64."""
        if self.header is not None and self.header.vocabulary != vocabulary:
            raise UserError(
                f"`{self.folder}` holds answers over {self.header.vocabulary} tokens and the model has {vocabulary}: "
                "pass the model that wrote them, or write them anew"
            )
        found = np.zeros(vocabulary, np.int64)
        for shard, records in enumerate(self._records):
            shown = records["held_out"] == 0
            lengths = np.stack([records["prompt_length"], records["length"] - records["prompt_length"]], 1)  # [N, 2]
            answers = np.stack([np.zeros_like(shown), shown], 1)
            wanted = np.repeat(answers.ravel(), lengths.ravel())  # [tokens of the shard]
            found += np.bincount(self._mapped(shard)[wanted], minlength=vocabulary)
        return torch.from_numpy(found)

    def claim(self, header: Header) -> None:
        """Begin a store for these answers, or make sure that the one that is here is for no others."""
        header = Header(**as_read(asdict(header)))
        self._take_lock()
        if self.header is None:
            self._write_header(header)
            self.header, self._shards = header, Shards(self.folder, header.token, self.shard_bytes)
            return
        old, new = (_comparable(one) for one in (self.header, header))
        for name in [*old, *(name for name in new if name not in old)]:
            if old.get(name) != new.get(name):
                raise UserError(
                    f"`{self.folder}` was begun with `{name}` {old.get(name)!r}, and now it is {new.get(name)!r}: "
                    "go on with the old one, or pick another folder"
                )

    def append(self, document: Document) -> None:
        assert 0 <= document.prompt_length <= len(document.tokens) > 0
        tokens = np.array(document.tokens, dtype=self.token).tobytes()
        if len(tokens) > self.shard_bytes:
            raise UserError(f"a document of {len(tokens)} bytes fits into no shard: raise `shard_bytes`")
        made = entry(
            tokens,
            document.number,
            document.prompt,
            document.prompt_length,
            len(document.tokens),
            document.temperature,
            document.held_out,
        )
        self._pending.append(made)
        self._pending_bytes += len(tokens)
        if self._pending_bytes >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Put everything on the disk. Where that fails, what lay there before is kept, and only the rest is lost."""
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        if not pending:
            return
        assert self._shards is not None
        self._take_lock()
        try:
            self._shards.add(pending)
        except OSError as error:
            raise UserError(
                f"cannot write to `{self.folder}`: {reason(error)}; {len(self)} answers are kept there: "
                "make room and run again, it goes on behind them"
            ) from error
        finally:
            self._forget_views()

    def close(self) -> None:
        """Flush, and let others write."""
        try:
            self.flush()
        finally:
            if self._lock is not None:
                self._lock.close()
            self._lock = None

    @property
    def _records(self) -> list[NDArray[Any]]:
        return [] if self._shards is None else self._shards.records

    def _forget_views(self) -> None:
        self._maps: dict[int, NDArray[Any]] = {}
        *self._firsts, self._count = [0, *itertools.accumulate(len(records) for records in self._records)]
        self.__dict__.pop("_documents", None)

    @cached_property
    def _documents(self) -> Documents:
        records = np.concatenate(self._records) if self._records else np.zeros(0, RECORD)
        lengths = records["length"].astype(np.int64)
        return Documents(
            starts=np.cumsum(lengths) - lengths,
            prompt_lengths=records["prompt_length"].astype(np.int64),
            lengths=lengths,
            held_out=records["held_out"] != 0,
            temperatures=records["temperature"].astype(np.float32),
            prompts=records["prompt"].astype(np.int64),
            numbers=records["number"].astype(np.int64),
        )

    def _mapped(self, shard: int) -> NDArray[Any]:
        assert self._shards is not None
        if shard not in self._maps:
            self._maps[shard] = self._shards.tokens(shard)
        return self._maps[shard]

    def _read(self) -> None:
        self.header = self._read_header()
        self._shards = None if self.header is None else Shards(self.folder, self.header.token, self.shard_bytes)
        self._forget_views()

    def _read_header(self) -> Header | None:
        path = self.folder / "header.json"
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UserError(f"cannot read `{path}`: {reason(error)}") from error
        except ValueError:
            raise UserError(f"`{path}` is no JSON: remove the folder, or pick another") from None
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise UserError(f"`{path}` is not of format {FORMAT}: write the answers anew in another folder")
        try:
            return Header(**value)
        except TypeError:
            raise UserError(f"`{path}` is no header of answers: write them anew in another folder") from None

    def _write_header(self, header: Header) -> None:
        path = self.folder / "header.json"
        try:
            write_whole(path, as_json(asdict(header)))
            sync_folder(self.folder)
        except OSError as error:
            raise UserError(f"cannot write `{path}`: {reason(error)}") from error

    def _take_lock(self) -> None:
        """One writer at a time; the lock goes with the process."""
        if self._lock is not None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("wb")
        except OSError as error:
            raise UserError(f"cannot write to `{self.folder}`: {reason(error)}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise UserError(f"another run writes to `{self.folder}`: wait for it, or pick another folder") from None
        self._lock = lock
        self._read()  # someone else may have written since


def _comparable(header: Header) -> dict[str, Any]:
    """A model is the same wherever it lies."""
    known = {"model": Path(header.model).name, "weights": header.weights, "vocabulary": header.vocabulary}
    return {**known, **header.settings}
