"""Mutate files with a seeded random source: bytes, JSON, safetensors.

Mutations respect the format, so that most of them pass the reader's first checks.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

EXTREMES = (0, 1, 7, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
ABSURD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 2.5, -0.0, 1e-300, 1e308, float("inf"), float("nan"), 10**6, 2**24, 2**31, 10**12,
    2**63, 10**400, "", "x", "\ud800", "\0", "../../x", "9" * 5000, [], {}, [None], [[]], [1, "a"], [-1], [10**9, 0],
    {"a": 1}, {"": {}}, list(range(1000)), ["full_attention"], {"rope_type": "llama3"}, {"type": "linear", "factor": 0},
)  # fmt: skip
Damage = Callable[[Random, bytes], bytes]
Path = list[str | int]


def choose(random: Random, *damages: Damage) -> Damage:
    return random.choice(damages)


# Bytes


def flip(random: Random, data: bytes) -> bytes:
    """Some bits, most of them near the front, where headers are."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8)) if data else 0):
        reach = len(data) if random.random() < 0.3 else min(len(data), random.choice((32, 512, 4096)))
        changed[random.randrange(reach)] ^= 1 << random.randrange(8)
    return bytes(changed)


def cut(random: Random, data: bytes) -> bytes:
    where = random.choice((len(data), 4096, 64))
    return data[: random.randrange(min(where, len(data)) + 1)]


def overwrite(random: Random, data: bytes) -> bytes:
    """A number of 4 or 8 bytes set to an extreme."""
    form = random.choice(("<I", "<Q"))
    number = random.choice(EXTREMES) % 2 ** (8 * struct.calcsize(form))
    at = random.randrange(min(max(len(data) - 8, 1), random.choice((64, 2048, 1 << 30))))
    return data[:at] + struct.pack(form, number) + data[at + struct.calcsize(form) :]


def shift(random: Random, data: bytes) -> bytes:
    """Bytes taken out, put in or said twice."""
    first = random.randrange(len(data) + 1)
    last = min(len(data), first + random.choice((1, 4, 33, 5000)))
    kind = random.randrange(3)
    if kind == 0:
        return data[:first] + data[last:]
    return data[:first] + (random.randbytes(last - first) if kind == 1 else data[first:last]) + data[first:]


def damage_bytes(random: Random, data: bytes) -> bytes:
    return choose(random, flip, flip, cut, overwrite, shift)(random, data)


# JSON


def paths(value: Any, prefix: Path | None = None) -> list[Path]:
    """Where every value lies; of long lists and tables the beginning is enough."""
    here = prefix or []
    keys: list[Any] = list(value)[:64] if isinstance(value, dict) else []
    keys = list(range(min(len(value), 8))) if isinstance(value, list) else keys
    return [path for key in keys for path in [[*here, key], *paths(value[key], [*here, key])]]


def holder(value: Any, path: Path) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


def bend(random: Random, value: Any) -> Any:
    """A value near this one, or nothing like it."""
    if isinstance(value, int | float) and not isinstance(value, bool) and random.random() < 0.6:
        return random.choice(
            (value + 1, value - 1, -value, value * 2, value // 2, value * 10**6, float(value), [value])
        )
    if isinstance(value, list) and value and random.random() < 0.6:
        return random.choice((value[:-1], value * 2, value[::-1], value[0], [*value[:-1], random.choice(ABSURD)]))
    if isinstance(value, str) and random.random() < 0.3:
        return random.choice((value[:-1], value * 2, value.upper(), value + "\n", [value]))
    return random.choice(ABSURD)


def damage_value(random: Random, value: Any, likely: tuple[str, ...] = ()) -> None:
    """Changes a JSON object in place. likely: keys that it might hold as well."""
    nodes = paths(value)
    if (likely and isinstance(value, dict) and random.random() < 0.2) or not nodes:
        value[random.choice(likely or ("x",))] = random.choice(ABSURD)
        return
    path = random.choice(nodes)
    inner, key = holder(value, path), path[-1]
    kind = random.randrange(6)
    if kind == 0:
        del inner[key]
    elif kind == 1:  # trade places with another
        other = random.choice(nodes)
        outer = holder(value, other)
        inner[key], outer[other[-1]] = outer[other[-1]], inner[key]
    else:
        inner[key] = bend(random, inner[key])


def write_json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def damage_text(random: Random, data: bytes) -> bytes:
    """JSON that is none, or is more than meets the eye."""
    kind = random.randrange(5)
    if kind == 0:
        depth = random.choice((500, 5000, 200_000))
        return data[:-1].rstrip(b"}") + b',"deep":' + b"[" * depth + b"]" * depth + b"}"
    if kind == 1:
        return random.choice(
            (b"", b"null", b"[]", b"7", b'"x"', b"{}", b"\xff\xfe{}", b"{" * 100_000, b"\xef\xbb\xbf{}")
        )
    if kind == 2:  # a key that comes twice
        return data.replace(b"{", b'{"hidden_size": 7, "shape": [3], "model": {},', 1)
    return damage_bytes(random, data)


def damage_json(random: Random, data: bytes, likely: tuple[str, ...] = ()) -> bytes:
    if random.random() < 0.2:
        return damage_text(random, data)
    value = json.loads(data)
    try:
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            damage_value(random, value, likely)
        return write_json(value)
    except (LookupError, TypeError, ValueError, OverflowError):  # the damage before it has left no place for more
        return damage_text(random, data)


# safetensors: the length of the header, the header, the data

DTYPES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1}
Tensors = dict[str, tuple[str, list[int], bytes]]


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = write_json(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def damage_header(random: Random, data: bytes) -> bytes:
    """The header's own words, the data as it was."""
    header, body = split(data)
    names = [name for name in header if name != "__metadata__"]
    entry, other = header[random.choice(names)], header[random.choice(names)]
    kind = random.randrange(7)
    if kind == 0:
        field = random.choice(("data_offsets", "shape", "dtype"))
        entry[field], other[field] = other[field], entry[field]
    elif kind == 1:
        entry["data_offsets"][random.randrange(2)] = random.choice(EXTREMES)
    elif kind == 2:
        entry["shape"] = random.choice(([], [0], [2**63, 2], [2**32, 2**32], [-1, -1], entry["shape"][::-1], [1] * 80))
    elif kind == 3:
        entry["dtype"] = random.choice((*DTYPES, "F4", "", None, 3))
    elif kind == 4:
        header["__metadata__"] = random.choice(ABSURD)
    elif kind == 5:
        return join(header, body, random.choice((*EXTREMES, len(data), len(data) - 8, len(data) - 7)))
    else:
        damage_value(random, header)
    return join(header, body)


def read_tensors(data: bytes) -> Tensors:
    header, body = split(data)
    found: Tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            found[name] = (entry["dtype"], entry["shape"], body[first:last])
    return found


def write_tensors(tensors: Tensors) -> bytes:
    """A file without a contradiction, whatever the tensors are."""
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    return join(header, body)


def bend_tensor(random: Random, dtype: str, shape: list[int], data: bytes) -> tuple[str, list[int], bytes]:
    """A sound tensor of another type, shape or content."""
    kind = random.randrange(8)
    if kind == 0:
        other = random.choice([each for each in DTYPES if len(data) % DTYPES[each] == 0])
        return other, [len(data) // DTYPES[other]] if random.random() < 0.5 else shape, data
    if kind == 1:
        return dtype, shape[::-1], data
    if kind == 2:
        return dtype, [len(data) // DTYPES[dtype]], data
    if kind == 3:
        return dtype, [1, *shape], data
    if kind == 4 and shape:  # some rows, or none
        rows = random.choice((0, 1, shape[0] // 2, shape[0] - 1))
        return dtype, [rows, *shape[1:]], data[: len(data) // max(shape[0], 1) * rows]
    if kind == 5:
        return dtype, [], data[: DTYPES[dtype]]
    word = random.choice((b"\0", b"\xff", b"\x7f\x80\x00\x00"[::-1], b"\x7f\x7f\xff\xff"[::-1], random.randbytes(4)))
    return dtype, shape, (word * (len(data) // len(word) + 1))[: len(data)]


def damage_tensors(random: Random, data: bytes) -> bytes:
    """A sound file, whose tensors are not what the configuration says."""
    tensors = read_tensors(data)
    name, other = random.choice(sorted(tensors)), random.choice(sorted(tensors))
    kind = random.randrange(6)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[name], tensors[other] = tensors[other], tensors[name]
    elif kind == 2:
        number = random.choice(("1", "-1", "1000000000000", "x", ""))
        tensors[random.choice((name.replace("0", number), name + ".bias", "", name[: len(name) // 2]))] = tensors[name]
    else:
        for each in random.sample(sorted(tensors), min(len(tensors), random.choice((1, 1, 2)))):
            tensors[each] = bend_tensor(random, *tensors[each])
    return write_tensors(tensors)


def damage_safetensors(random: Random, data: bytes) -> bytes:
    return choose(random, damage_bytes, damage_header, damage_header, damage_tensors, damage_tensors)(random, data)
