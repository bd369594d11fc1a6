"""The assembly that converts nibbles: the interpreter does not run it, so its instructions are modelled."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from outrider.kernels.cuda.matrices import NIBBLE
from outrider.kernels.cuda.quantized_matmul import NIBBLES
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
    """Run PTX over `source` as $4; return $0 to $3."""
    known: dict[str, Register] = {"$4": source}

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
            assert (values[3] == 0xEA).all()
            known[target] = (values[0] & values[1]) | values[2]
        elif name == "prmt.b32":
            known[target] = permute(*values)
        else:
            assert name == "fma.rn.bf16x2", name
            known[target] = fma_pairs(*values)
    return [known[f"${index}"] for index in range(4)]


@pytest.mark.parametrize("table", TABLES)
def test_every_word_gives_the_values_of_its_nibbles(table: str) -> None:
    words = np.arange(1 << 16, dtype=np.uint32)
    other = (words * 40503 + 12345) & 0xFFFF
    found = run(assembly(TABLES[table]), words | other << np.uint32(16))
    values = np.array(TABLES[table], np.float32)
    for index, pair in enumerate(found):
        assert np.array_equal(bf16(pair), values[(words >> 4 * index) & 15])
        assert np.array_equal(bf16(pair >> 16), values[(other >> 4 * index) & 15])


def test_every_word_gives_the_quants_of_its_fields() -> None:
    words = np.arange(1 << 16, dtype=np.uint32)
    other = (words * 40503 + 12345) & 0xFFFF
    found = run(NIBBLES.value, words | other << np.uint32(16))
    for index, pair in enumerate(found):
        for word, half in ((words, pair), (other, pair >> 16)):
            magnitude = ((word >> 4 * (index ^ 1)) & 7).astype(np.float64) + 0.5
            sign = np.where((word >> 15 - 4 * index) & 1, -1.0, 1.0)
            assert np.array_equal(bf16(half).astype(np.float64), sign * magnitude * NIBBLE)


def test_values_are_exact_in_bf16() -> None:
    for values in TABLES.values():
        assert torch.tensor(values).to(torch.bfloat16).tolist() == list(values)
