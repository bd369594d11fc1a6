"""Documents in files that only grow, whole after a crash at any moment.

A shard is two files, small enough to travel: `tokens-N.bin`, ids one after the other, and `index-N.bin`, one record a
document. A record is written once its tokens are on the disk, and its checksum covers both. So whatever a crash
leaves behind lies after the last good record, and is cut off before anything else is written.
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
BODY = struct.Struct("<qqiifI")  # the same without the checksum
CHECK = struct.Struct("<I")

log = logging.getLogger(__name__)
Entry = tuple[bytes, bytes]  # the tokens of a document, and its record


def entry(tokens: bytes, *body: float) -> Entry:
    """`body`: what the record says, in its order."""
    record = BODY.pack(*body)
    return tokens, record + CHECK.pack(_check(record, tokens))


class Shards:
    """`records` is what lies on the disk for good, an array for each shard."""

    def __init__(self, folder: Path, token: np.dtype[Any], shard_bytes: int) -> None:
        self.folder, self.token, self.shard_bytes = folder, token, shard_bytes
        self.records = self._read()
        self._repaired = False

    def tokens(self, shard: int) -> NDArray[Any]:
        """The tokens of a shard, a view of its file, as far as the index speaks of them."""
        count = self._used(shard) // self.token.itemsize
        return np.asarray(np.memmap(self._path("tokens", shard), self.token, "r", shape=(count,)))

    def add(self, entries: list[Entry]) -> None:
        """Raises OSError where the disk is full, and the like: `records` says how many of the entries made it."""
        if not self._repaired:
            self._repair()
        try:
            while entries:
                entries = self._add_to_last(entries)
        except OSError:
            self._repaired = False  # a part of something may have been written
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
        """The good records of each shard. Only in the last one may anything be cut off."""
        last = max(self._present(), default=-1)
        shards: list[NDArray[Any]] = []
        for shard in range(last + 1):
            records = self._read_records(shard)
            whole = len(records) and _size(self._path("index", shard)) == records.nbytes
            if not whole and shard < last:
                raise UserError(
                    f"shard {shard} in `{self.folder}` is incomplete: copy `{self._path('tokens', shard).name}` and "
                    f"`{self._path('index', shard).name}` there again"
                )
            if len(records):
                shards.append(records)
        return shards

    def _read_records(self, shard: int) -> NDArray[Any]:
        count = _size(self._path("index", shard)) // RECORD.itemsize
        room = _size(self._path("tokens", shard)) // self.token.itemsize
        if not count or not room:
            return np.zeros(0, RECORD)
        records = np.fromfile(self._path("index", shard), RECORD, count)
        ends = np.cumsum(records["length"], dtype=np.int64)
        wrong = (records["length"] < 1) | (records["prompt_length"] > records["length"]) | (ends > room)
        records = records[: int(wrong.argmax())] if wrong.any() else records
        tokens = np.memmap(self._path("tokens", shard), self.token, "r", shape=(room,))
        while len(records):
            end, record = int(ends[len(records) - 1]), records[-1]
            read = tokens[end - int(record["length"]) : end].tobytes()
            if _check(record.tobytes()[: BODY.size], read) == record["check"]:
                break
            records = records[:-1]
        if len(records) < count:
            log.warning("`%s`: the last %d records of shard %d are damaged", self.folder, count - len(records), shard)
        return records

    def _repair(self) -> None:
        """Cut off whatever lies behind the last good record."""
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

    def _add_to_last(self, entries: list[Entry]) -> list[Entry]:
        """Add as many as the last shard has room for, or, if it has none, as a new one has; return the others."""
        shard, kept, count = len(self.records) - 1, np.zeros(0, RECORD), 0
        if self.records:
            kept = self.records[shard]
            count = self._fitting(entries, self._used(shard), kept.nbytes)
        if not count:
            shard, kept = shard + 1, np.zeros(0, RECORD)
            count = self._fitting(entries, 0, 0)
        written = b"".join(record for _, record in entries[:count])
        self._append("tokens", shard, b"".join(tokens for tokens, _ in entries[:count]))
        self._append("index", shard, written)
        self.records[shard:] = [np.concatenate([kept, np.frombuffer(written, RECORD)])]
        return entries[count:]

    def _fitting(self, entries: list[Entry], used: int, listed: int) -> int:
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
