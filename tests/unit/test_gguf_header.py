"""GGUF headers: what is right is read as the gguf package reads it, what lies is refused in one sentence."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf as gguf_package
import numpy as np
import pytest
from gguf_writer import F32, IQ2_XXS, Q4_0, Tensor, gguf, string
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import UserError
from outrider.weights.checkpoint import map_file
from outrider.weights.gguf_header import GgufHeader, read_header
from refusals import refusal


def read(path: Path, content: bytes) -> GgufHeader:
    path.write_bytes(content)
    return read_header(path, map_file(path))


def head(tensors: int, entries: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def entry(key: str, kind: int, body: bytes) -> bytes:
    return head(0, 1) + string(key) + struct.pack("<I", kind) + body


def tensor_head(name: str, body: bytes) -> bytes:
    return head(1, 0) + string(name) + body + b"\0" * 64


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf_package.GGUFWriter(path, "llama")
    writer.add_uint64("count", 2**40)
    writer.add_int32("below", -3)
    writer.add_float32("real", 0.5)
    writer.add_bool("flag", True)
    writer.add_string("text", "grüße")
    writer.add_array("words", ["a", "", "\u65e5"])
    writer.add_array("numbers", [1, -2, 3])
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    writer.add_tensor("matrix", matrix)
    writer.add_tensor("half", np.ones(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    header = read_header(path, map_file(path))
    expected = {"count": 2**40, "below": -3, "real": 0.5, "flag": True, "text": "grüße"}
    expected |= {"general.architecture": "llama", "words": ["a", "", "\u65e5"], "numbers": [1, -2, 3]}
    assert header.metadata == expected
    first, second = header.tensors
    assert (first.name, first.kind, first.shape) == ("matrix", "f32", (2, 3))
    assert path.read_bytes()[first.offset : first.offset + first.size] == matrix.tobytes()
    assert (second.name, second.kind, second.shape, second.size) == ("half", "f16", (5,), 10)


HOSTILE = {
    "not a model": (b"PK\x03\x04" + b"\0" * 64, "is not a model"),
    "cut in the preamble": (b"GGUF\x03", "ends inside its version"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (head(0, 0, version=1), "version 1"),
    "huge tensor count": (head(2**63, 0), "9223372036854775808 tensors"),
    "huge entry count": (head(0, 2**60), "metadata entries"),
    "huge key": (head(0, 1) + struct.pack("<Q", 2**62) + b"\0" * 32, "a metadata key claims"),
    "huge string": (entry("k", 8, struct.pack("<Q", 2**40)), "the metadata `k` claims"),
    "huge number list": (entry("k", 9, struct.pack("<IQ", 5, 2**61)), "items in the metadata `k`"),
    "huge string list": (entry("k", 9, struct.pack("<IQ", 8, 2**61)), "items in the metadata `k`"),
    "string list past the end": (entry("k", 9, struct.pack("<IQQ", 8, 1, 2**63)), "`k` ends beyond the file"),
    "string list cut short": (entry("k", 9, struct.pack("<IQ", 8, 2) + string("x" * 16)), "`k` ends beyond the file"),
    "list of lists": (entry("k", 9, struct.pack("<IQ", 9, 0)), "unsupported type 9"),
    "unknown value type": (entry("k", 13, b"\0" * 8), "unknown type 13"),
    "bad text": (entry("k", 8, string(b"\xff\xfe")), "not UTF-8"),
    "bad text in a list": (entry("k", 9, struct.pack("<IQ", 8, 1) + string(b"\xff")), "not UTF-8"),
    "same key twice": (head(0, 2) + (string("k") + struct.pack("<II", 4, 1)) * 2, "`k` occurs twice"),
    "bad alignment": (gguf({"general.alignment": 24}), "`general.alignment` is 24"),
    "alignment zero": (gguf({"general.alignment": 0}), "`general.alignment` is 0"),
    "no dimensions": (tensor_head("t", struct.pack("<IIQ", 0, F32, 0)), "`t` has 0 dimensions"),
    "many dimensions": (tensor_head("t", struct.pack("<I", 2**31) + b"\1" * 64), "2147483648 dimensions"),
    "product that wraps": (tensor_head("t", struct.pack("<IQQIQ", 2, 2**62, 4, F32, 0)), "larger than the file"),
    "empty tensor": (tensor_head("t", struct.pack("<IQQIQ", 2, 2**62, 0, F32, 0)), "`t` is empty"),
    "ragged blocks": (tensor_head("t", struct.pack("<IQIQ", 1, 33, Q4_0, 0)), "rows of 33 numbers"),
    "foreign quantisation": (tensor_head("t", struct.pack("<IQIQ", 1, 256, IQ2_XXS, 0)), "`t` as `iq2_xxs`"),
    "unknown quantisation": (tensor_head("t", struct.pack("<IQIQ", 1, 256, 999, 0)), "`type 999`"),
    "misaligned": (tensor_head("t", struct.pack("<IQIQ", 1, 4, F32, 4)), "no multiple of the alignment 32"),
    "beyond the file": (tensor_head("t", struct.pack("<IQIQ", 1, 4, F32, 2**63)), "`t` lies beyond the end"),
    "overlap": (
        gguf({}, [Tensor("a", (16,), b"\0" * 64), Tensor("b", (8,), b"\0" * 32, offset=32)]),
        "`b` overlaps `a`",
    ),
    "same name twice": (gguf({}, [Tensor("a", (8,), b"\0" * 32), Tensor("a", (8,), b"\0" * 32)]), "`a` occurs twice"),
    "cut in the data": (gguf({}, [Tensor("a", (8,), b"\0" * 31)]), "`a` lies beyond the end"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name: str, tmp_path: Path) -> None:
    content, expected = HOSTILE[name]
    path = tmp_path / "bad.gguf"
    message = refusal(lambda: read(path, content))
    assert expected in message
    assert str(path) in message


def test_lies_cost_no_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        for name, (content, _) in HOSTILE.items():
            with pytest.raises(UserError):
                read(tmp_path / f"{name}.gguf", content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = gguf({"a": "text", "b": [1, 2], "c": ["x", "yz"]}, [Tensor("t", (8,), b"\1" * 32)])
    assert read(tmp_path / "whole.gguf", whole).metadata["c"] == ["x", "yz"]
    for size in range(1, len(whole)):
        with pytest.raises(UserError):
            read(tmp_path / "cut.gguf", whole[:size])


SAMPLE = gguf(
    {"a": "text", "b": [1, 2], "c": ["x", "yz"]}, [Tensor("t", (8,), b"\1" * 32), Tensor("u", (2, 4), b"\2" * 32)]
)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 65), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_a_scrambled_header_is_read_or_refused(changes: list[tuple[int, bytes]]) -> None:
    """Whatever the bytes, the answer is a header inside of the file or a UserError."""
    content = bytearray(SAMPLE)
    for start, patch in changes:
        content[start : start + len(patch)] = patch
    path = Path("scrambled.gguf")
    try:
        header = read_header(path, bytes(content))
    except UserError:
        return
    assert all(tensor.offset + tensor.size <= len(content) for tensor in header.tensors)
