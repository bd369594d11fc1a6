"""The assembly that unpacks words: the interpreter does not run it, so its instructions are modelled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from outrider.kernels.cuda.matrices import UNITS
from outrider.kernels.cuda.quantized_matmul import FP8, INT4, INT8
from outrider.kernels.cuda.tables import TABLES, assembly

Register = np.ndarray[Any, np.dtype[np.uint32]]


def bf16(halves: Register) -> np.ndarray[Any, Any]:
    """Return the low 16 bits as floats."""
    return ((halves & 0xFFFF) << 16).astype(np.uint32).view(np.float32)


def fma_pairs(a: Register, b: Register, c: Register) -> Register:
    """Model fma.rn.bf16x2. The results must be exact: rounding is not modelled."""
    out = np.zeros_like(a)
    for shift in (0, 16):
        value = bf16(a >> shift) * bf16(b >> shift) + bf16(c >> shift)
        bits = value.astype(np.float32).view(np.uint32)
        assert not (bits & 0xFFFF).any()
        out |= (bits >> 16) << np.uint32(shift)
    return out


def permute(a: Register, b: Register, selector: Register) -> Register:
    """Model prmt.b32 in its default mode, without replicated signs."""
    sources = [*((a >> 8 * index) & 255 for index in range(4)), *((b >> 8 * index) & 255 for index in range(4))]
    out = np.zeros_like(a)
    for index in range(4):
        field = (selector >> 4 * index) & 15
        assert (field < 8).all()
        out |= np.choose(field, sources).astype(np.uint32) << np.uint32(8 * index)
    return out


OPERATORS = {"and.b32": np.bitwise_and, "or.b32": np.bitwise_or, "shr.b32": np.right_shift, "shl.b32": np.left_shift}


def run(text: str, source: Register) -> list[Register]:
    """Run PTX over `source` as the operand after the results, and return these."""
    count = 4 if "$4" in text else 2
    known: dict[str, Register] = {f"${count}": source}

    def read(operand: str) -> Register:
        return known[operand] if operand in known else np.full_like(source, int(operand, 0))

    for name, operands in re.findall(r"([\w.]+) ([^;]+);", text.partition(";")[2]):
        target, *inputs = [part.strip() for part in operands.split(",")]
        values = [read(operand) for operand in inputs]
        if name == "mov.b32":
            known[target] = values[0]
        elif name in OPERATORS:
            known[target] = OPERATORS[name](*values)
        elif name == "lop3.b32":
            first, second, third, table = values
            assert (table == table[0]).all() and table[0] in (0xEA, 0xE2)
            known[target] = (first & second) | (third if table[0] == 0xEA else third & ~second)
        elif name == "prmt.b32":
            known[target] = permute(*values)
        else:
            assert name == "fma.rn.bf16x2", name
            known[target] = fma_pairs(*values)
    return [known[f"${index}"] for index in range(count)]


@pytest.mark.parametrize("table", TABLES)
def test_every_word_gives_the_values_of_its_nibbles(table: str) -> None:
    words = np.arange(1 << 16, dtype=np.uint32)
    other = (words * 40503 + 12345) & 0xFFFF
    found = run(assembly(TABLES[table]), words | other << np.uint32(16))
    values = np.array(TABLES[table], np.float32)
    for index, pair in enumerate(found):
        assert np.array_equal(bf16(pair), values[(words >> 4 * index) & 15])
        assert np.array_equal(bf16(pair >> 16), values[(other >> 4 * index) & 15])


def int4(word: Register, index: int) -> np.ndarray[Any, Any]:
    magnitude = ((word >> 4 * (index ^ 1)) & 7) + 0.5
    return np.where((word >> 15 - 4 * index) & 1, -magnitude, magnitude)


def int8(word: Register, index: int) -> np.ndarray[Any, Any]:
    return ((word >> 8 * index) & 255) - 128.0


def fp8(word: Register, index: int) -> np.ndarray[Any, Any]:
    byte = (word >> 8 * index) & 255
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = np.where(exponent == 0, mantissa / 8, 1 + mantissa / 8) * 2.0 ** (np.maximum(exponent, 1) - 7.0)
    return np.where(byte & 128, -size, size)


@pytest.mark.parametrize(("kind", "text", "quant"), [("int4", INT4, int4), ("int8", INT8, int8), ("fp8", FP8, fp8)])
def test_every_word_gives_the_quants_of_its_fields(
    kind: str, text: str, quant: Callable[[Register, int], np.ndarray[Any, Any]]
) -> None:
    words = np.arange(1 << 16, dtype=np.uint32)
    other = (words * 40503 + 12345) & 0xFFFF
    for index, pair in enumerate(run(text, words | other << np.uint32(16))):
        for word, half in ((words, pair), (other, pair >> 16)):
            assert np.array_equal(bf16(half).astype(np.float64), quant(word, index) * UNITS[kind])


def test_values_are_exact_in_bf16() -> None:
    for values in TABLES.values():
        assert torch.tensor(values).to(torch.bfloat16).tolist() == list(values)
