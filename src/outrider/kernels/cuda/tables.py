"""Nibbles that are indices into 16 values (iq4_nl, mxfp4). Four registers hold a table, one byte for each value."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from ..quantization import IQ4_NL, MXFP4
from .device import EMULATED

TABLES = {"iq4_nl": IQ4_NL, "mxfp4": MXFP4}


def registers(values: Sequence[int]) -> list[int]:
    """Return 16 values of 8 bits as four signed integers, the first value in the lowest bits."""
    packed = bytes(value & 255 for value in values)
    return [int.from_bytes(packed[first : first + 4], "little", signed=True) for first in range(0, 16, 4)]


def assembly(values: Sequence[int]) -> str:
    """Return PTX that turns the nibbles of two words in $4 into four pairs of bf16, $0 to $3, in 3.5 instructions each.

    A permutation of bytes looks up four nibbles of a word among eight values; bit 3 chooses between two such results.
    Then as for int8: 128 + the low seven bits, minus 128, or minus 256 if the sign bit is set.
    """
    lines = [f"mov.b32 t{index}, {value & 0xFFFFFFFF:#010x};" for index, value in enumerate(registers(values))]
    lines += ["mov.b32 m, 0xBF80BF80;", "shr.b32 w1, $4, 16;", "mov.b32 w0, $4;"]
    for word in ("0", "1"):
        lines += [
            f"and.b32 s, w{word}, 0x7777;",
            "prmt.b32 l, t0, t1, s;",
            "prmt.b32 h, t2, t3, s;",
            f"and.b32 s, w{word}, 0x8888;",
            "shr.b32 s, s, 1;",
            "or.b32 s, s, 0x3210;",
            f"prmt.b32 v{word}, l, h, s;",
        ]
    for index in range(4):
        lines += [
            f"prmt.b32 l, v0, v1, 0x0{4 + index}0{index};",
            "lop3.b32 h, l, 0x007F007F, 0x43004300, 0xEA;",
            "lop3.b32 l, l, 0x00800080, 0x43004300, 0xEA;",
            f"fma.rn.bf16x2 ${index}, l, m, h;",
        ]
    return "\n".join(["{", ".reg .b32 t0, t1, t2, t3, m, s, l, h, w0, w1, v0, v1;", *lines, "}"])


IQ4_NL_ASSEMBLY: tl.constexpr = tl.constexpr(assembly(IQ4_NL))
MXFP4_ASSEMBLY: tl.constexpr = tl.constexpr(assembly(MXFP4))
IQ4_NL_0, IQ4_NL_1, IQ4_NL_2, IQ4_NL_3 = map(tl.constexpr, registers(IQ4_NL))
MXFP4_0, MXFP4_1, MXFP4_2, MXFP4_3 = map(tl.constexpr, registers(MXFP4))


@triton.jit
def looked_up(index, table: tl.constexpr):
    """Return the values of indices 0 to 15, as fp32."""
    if table == "iq4_nl":
        first = tl.where(index < 4, IQ4_NL_0, IQ4_NL_1)
        second = tl.where(index < 12, IQ4_NL_2, IQ4_NL_3)
    else:
        first = tl.where(index < 4, MXFP4_0, MXFP4_1)
        second = tl.where(index < 12, MXFP4_2, MXFP4_3)
    byte = (tl.where(index < 8, first, second) >> (index % 4 * 8)) & 255
    return (byte - ((byte & 128) << 1)).to(tl.float32)


@triton.jit
def looked_up_nibbles(tile, table: tl.constexpr):
    """Convert the four nibbles of words to bf16, two words at a time."""
    if EMULATED:
        bits = tile.to(tl.int32)
        return (
            looked_up(bits & 15, table),
            looked_up(bits >> 4 & 15, table),
            looked_up(bits >> 8 & 15, table),
            looked_up(bits >> 12 & 15, table),
        )
    code: tl.constexpr = IQ4_NL_ASSEMBLY if table == "iq4_nl" else MXFP4_ASSEMBLY
    return tl.inline_asm_elementwise(
        code,
        "=r,=r,=r,=r,r",
        [tile],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )
