"""Damage to GGUF files: to what the metadata says, to where tensors lie, to the counts, and to bytes anywhere."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from random import Random

from fuzz_mutations import ABSURD, EXTREMES, choose, damage_bytes
from outrider.weights.gguf_writer import tensor_info, text, value

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its type
STRING, ARRAY, MOST_TYPES, ALIGNMENT = 8, 9, 40, 32
NUMBERS = (0, 1, 2, 3, 5, 63, 64, 65, 2**20, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, -1)


@dataclass(frozen=True)
class Info:
    name: bytes
    shape: tuple[int, ...]  # outermost first
    kind: int
    offset: int


@dataclass(frozen=True)
class Parts:
    """A file taken apart. The counts are its own, so that they can lie."""

    entries: list[tuple[bytes, bytes]]  # key; type and value
    infos: list[Info]
    data: bytes
    counts: tuple[int, int] | None = None  # of tensors and entries; None: the truth


class GgufReader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> int:
        found: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return found

    def text(self) -> bytes:
        return self.take(self.number("<Q"))

    def skip(self, kind: int) -> None:
        if kind == ARRAY:
            inner, count = self.number("<I"), self.number("<Q")
            for _ in range(count):
                self.skip(inner)
        elif kind == STRING:
            self.text()
        else:
            self.take(SIZES[kind])


def take_apart(data: bytes) -> Parts:
    reader = GgufReader(data)
    reader.take(8)
    tensors, count = reader.number("<Q"), reader.number("<Q")
    entries, infos = [], []
    for _ in range(count):
        key, start = reader.text(), reader.at
        reader.skip(reader.number("<I"))
        entries.append((key, data[start : reader.at]))
    for _ in range(tensors):
        name = reader.text()
        shape = tuple(reader.number("<Q") for _ in range(reader.number("<I")))[::-1]
        infos.append(Info(name, shape, reader.number("<I"), reader.number("<Q")))
    return Parts(entries, infos, data[-(-reader.at // ALIGNMENT) * ALIGNMENT :])


def put_together(parts: Parts) -> bytes:
    counts = parts.counts or (len(parts.infos), len(parts.entries))
    head = b"GGUF" + struct.pack("<IQQ", 3, *counts)
    head += b"".join(text(key) + content for key, content in parts.entries)
    for info in parts.infos:
        shape = [size % 2**64 for size in info.shape]
        head += tensor_info(info.name, shape, info.kind, info.offset % 2**64)  # type: ignore[arg-type]
    return head + b"\0" * (-len(head) % ALIGNMENT) + parts.data


def absurd_value(random: Random, content: bytes) -> bytes:
    """Another value, most often a number, since most keys hold one."""
    if random.random() < 0.5:
        return value(random.choice(NUMBERS))
    if random.random() < 0.4:
        return struct.pack("<I", random.choice((*range(14), 255))) + content[4:]
    try:
        return value(random.choice(ABSURD))
    except (ValueError, OverflowError, struct.error):  # GGUF has no room for it
        return value(random.choice([["a", "b"], [1, 2, 3], [0.5], "llama", False, 2.5, float("nan"), ""]))


def damage_entries(random: Random, parts: Parts) -> Parts:
    entries = list(parts.entries)
    at, other = random.randrange(len(entries)), random.randrange(len(entries))
    key, content = entries[at]
    kind = random.randrange(6)
    if kind == 0:
        del entries[at]
    elif kind == 1:
        entries.append(entries[at])
    elif kind == 2:
        entries[at], entries[other] = (key, entries[other][1]), (entries[other][0], content)
    elif kind == 3:
        entries[at] = (key, damage_bytes(random, content))
    else:
        entries[at] = (key, absurd_value(random, content))
    return replace(parts, entries=entries)


def damage_info(random: Random, info: Info, other: Info) -> Info:
    kind = random.randrange(6)
    if kind == 0:
        return replace(info, kind=random.randrange(MOST_TYPES))
    if kind == 1:
        return replace(info, offset=random.choice((other.offset, info.offset + ALIGNMENT, *EXTREMES)))
    if kind == 2:
        return replace(info, name=random.choice((other.name, b"", b"\xff", info.name + b"x", b"output.weight")))
    if kind == 3:
        return replace(info, shape=random.choice((info.shape[::-1], (1, *info.shape), other.shape, (), (1,) * 5)))
    at = random.randrange(len(info.shape))
    size = random.choice((info.shape[at] + 1, info.shape[at] // 2, *EXTREMES, *NUMBERS))
    return replace(info, shape=(*info.shape[:at], size, *info.shape[at + 1 :]))


def damage_infos(random: Random, parts: Parts) -> Parts:
    infos = list(parts.infos)
    at, other = random.randrange(len(infos)), random.randrange(len(infos))
    kind = random.randrange(6)
    if kind == 0:
        del infos[at]
    elif kind == 1:
        infos[at], infos[other] = (
            replace(infos[at], offset=infos[other].offset),
            replace(infos[other], offset=infos[at].offset),
        )
    else:
        infos[at] = damage_info(random, infos[at], infos[other])
    return replace(parts, infos=infos)


def damage_counts(random: Random, parts: Parts) -> Parts:
    counts = [len(parts.infos), len(parts.entries)]
    at = random.randrange(2)
    counts[at] = random.choice((counts[at] + 1, counts[at] - 1, *EXTREMES))
    return replace(parts, counts=(counts[0], counts[1]))


def damage_data(random: Random, parts: Parts) -> Parts:
    """Weights that are no numbers, or that end too early."""
    word = random.choice((b"\xff", b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f"))
    first = random.randrange(len(parts.data))
    last = min(len(parts.data), first + random.choice((4, 256, len(parts.data))))
    fill = (word * (last - first))[: last - first]
    return replace(parts, data=parts.data[:first] + (fill + parts.data[last:] if random.random() < 0.7 else b""))


def damage_parts(random: Random, data: bytes) -> bytes:
    parts = take_apart(data)
    damages = (damage_entries, damage_entries, damage_entries, damage_infos, damage_infos, damage_counts, damage_data)
    for _ in range(random.choice((1, 1, 1, 2))):
        parts = random.choice(damages)(random, parts)
    return put_together(parts)


def damage_gguf(random: Random, data: bytes) -> bytes:
    return choose(random, damage_parts, damage_parts, damage_parts, damage_bytes)(random, data)
