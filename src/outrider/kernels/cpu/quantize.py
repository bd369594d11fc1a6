"""Quantize float weights into blocks of 32: int8 is q8_0 (symmetric), int5 is q5_1 and int4 is q4_1 (asymmetric).

fp8 is e4m3 with a scale for each row. int8, int4 and fp8 are quantized on the device of the weight, int5 on the host,
before they are packed or uploaded.
"""

from __future__ import annotations

import torch

from ...errors import UserError
from ..quantization import BLOCK, FORMATS, quantize_fp8, quantize_int4, quantize_int8, row_bytes
from ..structures import Weight
from . import _native

TARGETS = {"int8": "q8_0", "int5": "q5_1", "int4": "q4_1", "fp8": "fp8"}
ON_DEVICE = {"int8": quantize_int8, "int4": quantize_int4}  # where the weight is not on the host


def quantize_weight(weight: Weight, to: str) -> Weight:
    """Quantize a float matrix [N, K]; `to` is int8, int5, int4 or fp8."""
    if to not in TARGETS:
        raise UserError(f"`quantize` is `{to}`: expected one of {', '.join(TARGETS)}")
    rows, columns = weight.shape
    if FORMATS[weight.kind].quantized:
        raise ValueError(f"a matrix of `{weight.kind}` is quantised already")
    if columns % BLOCK:
        raise UserError(f"a matrix with rows of {columns} numbers has no whole blocks of {BLOCK}: drop `quantize`")
    if to == "fp8":
        return quantize_fp8(weight)
    if to in ON_DEVICE and weight.data.device.type != "cpu":
        return ON_DEVICE[to](weight)
    kind, source = TARGETS[to], weight.data.cpu().contiguous()
    if source.dtype is not FORMATS[weight.kind].dtype or source.numel() != rows * columns:
        raise ValueError(
            f"a `{weight.kind}` matrix of {rows} x {columns} has {source.numel()} numbers of {source.dtype}"
        )
    packed = torch.empty(rows, row_bytes(kind, columns), dtype=torch.uint8)  # [N, bytes of a row]
    _native.quantize(weight.kind, kind, rows * columns, source.data_ptr(), packed.data_ptr())
    return Weight(kind, weight.shape, packed)
