"""Append-only files of documents, consistent after a crash at any moment.

A shard is two files: `tokens-N.bin`, concatenated ids, and `index-N.bin`, one record per document. A record is written
when its tokens are on the disk, and its checksum covers both. So all that a crash leaves behind is after the last valid
record, and is truncated before the next write.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UserError
from ..io.disk import sync_folder

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


def make_entry(tokens: bytes, *body: float) -> ShardEntry:
    """Encode a document. body: the fields of its record, in order."""
    record = BODY.pack(*body)
    return tokens, record + CHECK.pack(_check(record, tokens))


class Shards:
    """The shards of a folder. `records`: one array per shard, of what is safely on the disk."""

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
