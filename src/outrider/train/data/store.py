"""The target's answers on disk as token ids: a header with their origin, and append-only shards.

A shard is two files: `tokens-N.bin`, concatenated ids, and `index-N.bin`, one record per document. A record is written
when its tokens are on the disk, and its checksum covers both. So all that a crash leaves behind is after the last valid
record, and is truncated before the next write.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import struct
import zlib
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

RECORD = np.dtype(
    [
        ("number", "<i8"),
        ("prompt", "<i8"),
        ("prompt_length", "<i4"),
        ("length", "<i4"),
        ("temperature", "<f4"),
        ("held_out", "<u4"),
        ("check", "<u4"),
    ]
)
BODY = struct.Struct("<qqiifI")  # a record without its checksum
CHECK = struct.Struct("<I")

log = logging.getLogger(__name__)
ShardEntry = tuple[bytes, bytes]  # the tokens of a document, and its index record
FORMAT = 1
SHARD_BYTES = 15_000_000  # of a file at most, so that shards can be copied and resumed one by one
FLUSH_BYTES = 1_000_000  # of documents in memory before they are written


def make_entry(tokens: bytes, *body: float) -> ShardEntry:
    """Encode a document. body: the fields of its record, in order."""
    record = BODY.pack(*body)
    return tokens, record + CHECK.pack(_check(record, tokens))


class Shards:
    """The shards of a folder, consistent after a crash at any moment.

    `records` has one array per shard, of what is safely on the disk.
    """

    def __init__(self, folder: Path, token: np.dtype[Any], shard_bytes: int) -> None:
        self.folder, self.token, self.shard_bytes = folder, token, shard_bytes
        self.records = self._read()
        self._repaired = False

    def tokens(self, shard: int) -> NDArray[Any]:
        """Map the tokens of a shard that its index covers."""
        count = self._used(shard) // self.token.itemsize
        return np.asarray(np.memmap(self._path("tokens", shard), self.token, "r", shape=(count,)))

    def add(self, entries: list[ShardEntry]) -> None:
        """Append entries. On OSError, such as a full disk, `records` has the entries that were written."""
        if not self._repaired:
            self._repair()
        try:
            while entries:
                entries = self._add_to_last(entries)
        except OSError:
            self._repaired = False  # an entry may be half written
            raise

    def _path(self, part: str, shard: int) -> Path:
        return self.folder / f"{part}-{shard:05}.bin"

    def _used(self, shard: int) -> int:
        return int(self.records[shard]["length"].sum(dtype=np.int64)) * self.token.itemsize

    def _present(self) -> list[int]:
        numbers = [
            path.stem.split("-")[-1] for part in ("tokens", "index") for path in self.folder.glob(f"{part}-*.bin")
        ]
        return sorted({int(number) for number in numbers if number.isdecimal()})

    def _read(self) -> list[NDArray[Any]]:
        """Read the valid records of each shard. Only the last shard may be incomplete."""
        last = max(self._present(), default=-1)
        shards: list[NDArray[Any]] = []
        for shard in range(last + 1):
            records = self._read_records(shard)
            whole = len(records) and _size(self._path("index", shard)) == records.nbytes
            if not whole and shard < last:
                raise UserError(
                    f"shard {shard} in `{self.folder}` is incomplete: copy `{self._path('tokens', shard).name}` and "
                    f"`{self._path('index', shard).name}` again"
                )
            if len(records):
                shards.append(records)
        return shards

    def _read_records(self, shard: int) -> NDArray[Any]:
        count = _size(self._path("index", shard)) // RECORD.itemsize
        capacity = _size(self._path("tokens", shard)) // self.token.itemsize
        if not count or not capacity:
            return np.zeros(0, RECORD)
        records = np.fromfile(self._path("index", shard), RECORD, count)
        ends = np.cumsum(records["length"], dtype=np.int64)
        wrong = (records["length"] < 1) | (records["prompt_length"] > records["length"]) | (ends > capacity)
        records = records[: int(wrong.argmax())] if wrong.any() else records
        tokens = np.memmap(self._path("tokens", shard), self.token, "r", shape=(capacity,))
        while len(records):
            end, record = int(ends[len(records) - 1]), records[-1]
            read = tokens[end - int(record["length"]) : end].tobytes()
            if _check(record.tobytes()[: BODY.size], read) == record["check"]:
                break
            records = records[:-1]
        if len(records) < count:
            log.warning(
                "`%s`: the last %d records of shard %d are damaged and will be dropped",
                self.folder,
                count - len(records),
                shard,
            )
        return records

    def _repair(self) -> None:
        """Truncate the files after the last valid record."""
        for shard in self._present():
            if shard >= len(self.records):
                self._path("index", shard).unlink(missing_ok=True)
                self._path("tokens", shard).unlink(missing_ok=True)
        if self.records:
            last = len(self.records) - 1
            os.truncate(self._path("index", last), self.records[last].nbytes)
            os.truncate(self._path("tokens", last), self._used(last))
        sync_folder(self.folder)
        self._repaired = True

    def _add_to_last(self, entries: list[ShardEntry]) -> list[ShardEntry]:
        """Append the entries that fit the last shard, or, if none does, a new one; return the rest."""
        shard, present, count = len(self.records) - 1, np.zeros(0, RECORD), 0
        if self.records:
            present = self.records[shard]
            count = self._fitting(entries, self._used(shard), present.nbytes)
        if not count:
            shard, present = shard + 1, np.zeros(0, RECORD)
            count = self._fitting(entries, 0, 0)
        written = b"".join(record for _, record in entries[:count])
        self._append("tokens", shard, b"".join(tokens for tokens, _ in entries[:count]))
        self._append("index", shard, written)
        self.records[shard:] = [np.concatenate([present, np.frombuffer(written, RECORD)])]
        return entries[count:]

    def _fitting(self, entries: list[ShardEntry], used: int, listed: int) -> int:
        for count, (tokens, record) in enumerate(entries):
            used, listed = used + len(tokens), listed + len(record)
            if max(used, listed) > self.shard_bytes:
                return count
        return len(entries)

    def _append(self, part: str, shard: int, content: bytes) -> None:
        path = self._path(part, shard)
        created = not path.exists()
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        if created:
            sync_folder(self.folder)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check(body: bytes, tokens: bytes) -> int:
    return zlib.crc32(tokens, zlib.crc32(body))


@dataclass(frozen=True)
class StoreHeader:
    """The model that wrote the answers, and the settings of their generation."""

    model: str
    weights: int  # bytes of the model's files; 0: it has no files
    vocabulary: int
    settings: Mapping[str, Any]
    format: int = FORMAT

    @property
    def token(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocabulary <= 2**16 else "<u4")


@dataclass(frozen=True)
class Document:
    """A prompt and its answer."""

    tokens: Sequence[int] | NDArray[Any]
    prompt_length: int
    number: int  # of its task in the plan; rising
    prompt: int  # index of its prompt; -1: the model wrote it
    temperature: float
    held_out: bool


@dataclass(frozen=True)
class Documents:
    """All documents of a store [N]; `starts` count through the tokens of all shards."""

    starts: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    lengths: NDArray[np.int64]  # of prompt and answer together
    held_out: NDArray[np.bool_]
    temperatures: NDArray[np.float32]
    prompts: NDArray[np.int64]
    numbers: NDArray[np.int64]


class Store:
    """A store of answers. Reads see what is on the disk: documents appended since the last `flush` are not included."""

    def __init__(self, folder: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.shard_bytes = Path(folder), shard_bytes
        self._unwritten: list[ShardEntry] = []
        self._unwritten_bytes = 0
        self._lock: IO[bytes] | None = None
        self.header: StoreHeader | None = None
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
        """Return the type that ids are stored in."""
        assert self.header is not None, "claim() comes before writing"
        return self.header.token

    @property
    def answered(self) -> int:
        """Return the number of tokens of all answers."""
        listed = self.documents()
        return int((listed.lengths - listed.prompt_lengths).sum())

    def documents(self) -> Documents:
        return self._documents

    def tokens(self, index: int) -> NDArray[Any]:
        """Return prompt and answer of one document, a view of the file."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        shard = bisect_right(self._firsts, index) - 1
        start = int(self._documents.starts[index] - self._documents.starts[self._firsts[shard]])
        return self._mapped(shard)[start : start + int(self._documents.lengths[index])]

    def counts(self, vocabulary: int) -> Tensor:
        """Count each token in the answers that are not held out: [V] int64."""
        if self.header is not None and self.header.vocabulary != vocabulary:
            raise UserError(
                f"`{self.folder}` holds answers over {self.header.vocabulary} tokens and the model has {vocabulary}: "
                "pass the model that wrote them, or generate new ones"
            )
        counts = np.zeros(vocabulary, np.int64)
        for shard, records in enumerate(self._records):
            training = records["held_out"] == 0
            lengths = np.stack([records["prompt_length"], records["length"] - records["prompt_length"]], 1)  # [N, 2]
            answers = np.stack([np.zeros_like(training), training], 1)
            counted = np.repeat(answers.ravel(), lengths.ravel())  # [tokens of the shard]
            counts += np.bincount(self._mapped(shard)[counted], minlength=vocabulary)
        return torch.from_numpy(counts)

    def claim(self, header: StoreHeader) -> None:
        """Create the store for these answers, or check that the existing one is for the same."""
        header = StoreHeader(**as_read(asdict(header)))
        self._take_lock()
        if self.header is None:
            self._write_header(header)
            self.header, self._shards = header, Shards(self.folder, header.token, self.shard_bytes)
            return
        old, new = (_comparable(version) for version in (self.header, header))
        for name in [*old, *(name for name in new if name not in old)]:
            if old.get(name) != new.get(name):
                raise UserError(
                    f"`{self.folder}` was started with `{name}` {old.get(name)!r}, and now it is {new.get(name)!r}: "
                    "continue with the old value, or pass another folder"
                )

    def append(self, document: Document) -> None:
        assert 0 <= document.prompt_length <= len(document.tokens) > 0
        tokens = np.array(document.tokens, dtype=self.token).tobytes()
        if len(tokens) > self.shard_bytes:
            raise UserError(f"a document of {len(tokens)} bytes does not fit a shard: raise `shard_bytes`")
        entry = make_entry(
            tokens,
            document.number,
            document.prompt,
            document.prompt_length,
            len(document.tokens),
            document.temperature,
            document.held_out,
        )
        self._unwritten.append(entry)
        self._unwritten_bytes += len(tokens)
        if self._unwritten_bytes >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write all documents to the disk. If that fails, earlier documents are intact and the rest is lost."""
        unwritten, self._unwritten, self._unwritten_bytes = self._unwritten, [], 0
        if not unwritten:
            return
        assert self._shards is not None
        self._take_lock()
        try:
            self._shards.add(unwritten)
        except OSError as error:
            raise UserError(
                f"cannot write to `{self.folder}`: {reason(error)}; {len(self)} answers are kept there: "
                "make room and run again to continue"
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

    def _read_header(self) -> StoreHeader | None:
        path = self.folder / "header.json"
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UserError(f"cannot read `{path}`: {reason(error)}") from error
        except ValueError:
            raise UserError(f"`{path}` is not JSON: remove the folder, or pass another") from None
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise UserError(f"`{path}` is not of format {FORMAT}: generate the answers again in another folder")
        try:
            return StoreHeader(**value)
        except TypeError:
            raise UserError(f"`{path}` is not a header of answers: generate them again in another folder") from None

    def _write_header(self, header: StoreHeader) -> None:
        path = self.folder / "header.json"
        try:
            write_whole(path, as_json(asdict(header)))
            sync_folder(self.folder)
        except OSError as error:
            raise UserError(f"cannot write `{path}`: {reason(error)}") from error

    def _take_lock(self) -> None:
        """Lock the store for one writer; the lock ends with the process."""
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
            raise UserError(f"another run writes to `{self.folder}`: wait for it, or pass another folder") from None
        self._lock = lock
        self._read()  # another process may have written since


def _comparable(header: StoreHeader) -> dict[str, Any]:
    """Return the header for comparison; the folder of the model does not matter."""
    known = {"model": Path(header.model).name, "weights": header.weights, "vocabulary": header.vocabulary}
    return {**known, **header.settings}
