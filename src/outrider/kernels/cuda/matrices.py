"""Weight matrices on the GPU: floats unchanged, quantized formats as words of 16 bits.

A word holds 4 weights (int4) or 2 (int8, fp8). They are not neighbours: a row is cut into chunks of `span` words, and
field i of the words of a chunk holds the weights of the i-th `span` columns of the chunk. So a tile of words unpacks
into tiles of consecutive columns without moving data between lanes, and words load as 16-bit elements, which the
tensor cores' load instruction supports. Rows are padded to whole tiles of PADDED columns.

weight = scale * quant + minimum. Quants are signed: minima of unsigned ones lie far from 0 and would lose bits in bf16.
Few instructions turn a field into the bf16 number UNITS * quant:
- int8: a byte is quant + 128. In a bf16 that is otherwise 0 it counts 2^-133, also where it reaches the exponent. A
  multiply-add makes UNITS * quant of it.
- int4: quants are -7.5, -6.5 .. 7.5, a sign and a magnitude of three bits and a half. Field i has its magnitude at bits
  4 * (i ^ 1) and its sign at bit 15 - 4 * i, from where shifts and exchanges of bytes move them to the sign and the
  mantissa of a bf16. The bit of the half is set there, and the exponent is 0.
- fp8: a byte is an e4m3 number. Its sign moves to the sign of a bf16, the other bits to its exponent and mantissa. So
  the words are a matrix of e4m3 numbers whose columns have another order, which cuBLAS can read.
- iq4_nl, mxfp4: nibbles at bits 4 * i are indices into a table of quants.

A chunk has `groups` scales for equal shares of its columns. Those of one chunk and of neighbouring rows lie together,
so that a tile reads whole lines of memory. They are divided by UNITS. Because large ones would overflow, those of int4
and fp8, and their minima, are divided by SUM_FACTOR too, by which sums are multiplied. If all groups of each row have
one scale, it is applied to the sums instead, in fp32: `channel`. Then states are enlarged where fp8 numbers are tiny.
Ranges of rows are matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ..quantization import FORMATS, Groups, dequantize
from ..structures import Weight
from .device import DEVICE, E4M3_SUPPORTED, INTERPRETED
from .tables import TABLES

CHUNK = 1 << 25  # weights that are converted at a time: bounds the temporary memory
PADDED = 128  # columns: rows are multiples of it
FOUR_BITS = ("q4_0", "q4_1", "q4_k", "q4_z")
WITH_MINIMA = ("q4_1", "q5_1", "q4_k", "q5_k", "q4_z", "q8_z")
PER_WORD = {"int4": 4, "int8": 2, "fp8": 2}  # weights of a word
# Rows up to this length are stored as bf16, but for an LM head: with few rows of activations unpacking takes as long as
# reading. On an H200 a layer of 0.5B (896) takes 24 us in bf16 and in int4, one of 1B (2048) 50 and 30.
EXPANDED = 0 if INTERPRETED else 1024
MANY_OUTPUTS = 32768  # as an LM head has them
MOST_TILES = 512  # output tiles of a matrix under split-k: the number of its counters
# Unpacked number of a quant, by the kind of matrices without a table. int4: without an exponent, bit 4 of a bf16 is
# 2^-129. fp8: the ratio of the exponents of bf16 and e4m3 with the same bits.
UNITS = {"int8": 2.0**-6, "int4": 2.0**-129, "fp8": 2.0**-120}
SUM_FACTOR = 2.0**24  # scales of up to 2^22 do not overflow
ALIGNMENT = 16  # bytes: vectorised loads need it
WIDEST = (torch.float32, torch.float16, torch.bfloat16)  # mixed float matrices take the first dtype that occurs

Kind = Literal["float", "int8", "int4", "fp8"]


@dataclass(frozen=True)
class Matrix:
    kind: Kind
    shape: tuple[int, int]  # N, K
    data: Tensor  # [N, K] floats, or words [N, padded K / weights of a word] int16
    compute: torch.dtype  # of both factors of the matmul; it accumulates in fp32
    span: int = 0  # words of a chunk
    groups: int = 0  # entries of `scales` for a chunk: 0, 1 or the weights of a word
    paired: bool = False  # entries of `scales` are pairs of scale and minimum
    table: str = ""  # of int4: the quants are indices into the values of this format (tables.py)
    scales: Tensor | None = None  # [chunks, N, groups] bf16, or int32: two bf16, the scale in the low bits
    channel: Tensor | None = None  # [N] f32: scales of whole rows
    batch_invariant: bool = False  # a row's result must not depend on the number of rows
    terms: int = 0  # of fp8: e4m3 numbers of an activation in e4m3_matmul.py; 0: not multiplied there
    one: Tensor = field(default_factory=lambda: torch.ones((), device=DEVICE))  # f32: the scale for cuBLAS there
    split_counters: Tensor = field(default_factory=lambda: torch.zeros(MOST_TILES, dtype=torch.int32, device=DEVICE))

    @property
    def chunk(self) -> int:
        """Return the columns of a chunk."""
        return PER_WORD[self.kind] * self.span


def matrix(weight: Weight, *, batch_invariant: bool = False) -> Matrix:
    return pack([weight], batch_invariant)


def pack(
    weights: Sequence[Weight], batch_invariant: bool = False, expand: bool = True, fast_activations: bool = False
) -> Matrix:
    """Stack matrices with equal row length.

    expand: store short rows of quantized blocks as bf16.
    fast_activations: round activations to e4m3 beside fp8 weights with a scale for each row.
    """
    outputs = sum(weight.shape[0] for weight in weights)
    assert len({weight.shape[1] for weight in weights}) == 1, [weight.shape for weight in weights]
    kinds = {weight.kind for weight in weights}
    short = expand and weights[0].shape[1] <= EXPANDED and outputs < MANY_OUTPUTS
    ordered = any(weight.order is not None for weight in weights)  # act-order
    if short or ordered or not all(FORMATS[kind].quantized for kind in kinds):
        return _floats(weights, batch_invariant)
    if "fp8" in kinds:
        if kinds != {"fp8"}:
            return _floats(weights, batch_invariant)
        found = _quantized(weights, "fp8", batch_invariant)
        head = len(weights) == 1 and outputs >= MANY_OUTPUTS  # its product is too large to be written twice
        if E4M3_SUPPORTED and found.channel is not None and not head:
            return replace(found, terms=1 if fast_activations else 2)
        return found
    for table in TABLES:
        if kinds == {table}:
            return _quantized(weights, "int4", batch_invariant, table)
    return _quantized(weights, "int4" if kinds.issubset(FOUR_BITS) else "int8", batch_invariant)


def rows(matrix: Matrix, begin: int, end: int) -> Matrix:
    """Return rows begin .. end - 1 as a view."""
    return replace(
        matrix,
        shape=(end - begin, matrix.shape[1]),
        data=matrix.data[begin:end],
        scales=None if matrix.scales is None else matrix.scales[:, begin:end],
        channel=None if matrix.channel is None else matrix.channel[begin:end],
    )


def _floats(weights: Sequence[Weight], batch_invariant: bool) -> Matrix:
    kinds = {FORMATS[weight.kind].dtype for weight in weights}
    dtype = next((kind for kind in WIDEST if kind in kinds), torch.bfloat16)
    parts = [
        weight.data.reshape(weight.shape).to(DEVICE, dtype)
        if FORMATS[weight.kind].dtype
        else dequantize(replace(weight, data=weight.data.to(DEVICE))).to(dtype)
        for weight in weights
    ]
    data = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)  # [N, K]
    if data.data_ptr() % ALIGNMENT:
        data = data.clone()
    return Matrix("float", (data.shape[0], data.shape[1]), data, dtype, batch_invariant=batch_invariant)


def _quantized(
    weights: Sequence[Weight], kind: Literal["int8", "int4", "fp8"], batch_invariant: bool, table: str = ""
) -> Matrix:
    """Stack quantized matrices in the layout `kind`, with the smallest group size among them."""
    count, columns = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    group = 16 if any(weight.kind == "q6_k" for weight in weights) else 32
    padded = -(-columns // PADDED) * PADDED
    signed = kind == "int4" and not table
    paired = signed or any(weight.kind in WITH_MINIMA for weight in weights)
    quants = torch.zeros(count, padded, dtype=torch.uint8, device=DEVICE)  # of padding: times a scale of 0, or no state
    scales = torch.zeros(count, padded // group, device=DEVICE)
    minima = torch.zeros_like(scales)
    begin = 0
    for part in (_halved(part) if signed else _centered(part) for weight in weights for part in _split(weight)):
        at = slice(begin, begin + part.quants.numel() // columns)
        begin = at.stop
        stored = (_indices(part.quants, table) if table else part.quants).reshape(-1, columns).view(torch.uint8)
        quants[at, :columns] = stored ^ 128 if kind == "int8" else stored
        scales[at, : columns // group] = _spread(part.scales, at.stop - at.start, columns // group)
        if part.minima is not None:
            minima[at, : columns // group] = _spread(part.minima, at.stop - at.start, columns // group)
    found = Matrix(
        kind, (count, columns), quants, torch.bfloat16, paired=paired, table=table, batch_invariant=batch_invariant
    )
    unit = 1.0 if table else UNITS[kind]
    if not paired and _equal(scales[:, : columns // group]):
        span = PADDED // PER_WORD[kind]
        channel = scales[:, 0] * (1.0 if kind == "fp8" else 1 / unit)
        return replace(found, data=_words(quants, kind, span, signed), span=span, channel=channel)
    factor = SUM_FACTOR if kind == "fp8" or signed else 1.0
    scales, minima = scales * (1 / unit / factor), minima / factor  # a division by `unit` would overflow on a GPU
    wide = all(_equal(values.view(count * padded // PADDED, -1)) for values in (scales, minima))
    span = PADDED // PER_WORD[kind] if wide or kind == "int4" else group
    groups = 1 if wide else PER_WORD[kind]
    step = PADDED // group if wide else 1  # entries that are equal
    entries = [v[:, ::step].reshape(count, -1, groups).transpose(0, 1) for v in (scales, minima if paired else scales)]
    packed = _pairs(*entries) if paired or groups == 1 else entries[0].to(torch.bfloat16).contiguous()
    return replace(found, data=_words(quants, kind, span, signed), span=span, groups=groups, scales=packed)


def _split(weight: Weight) -> Iterator[Groups]:
    """Unpack the blocks of a range of rows at a time, on the device."""
    block = FORMATS[weight.kind]
    assert block.split is not None
    packed = weight.data.reshape(weight.shape[0], -1)  # [N, bytes of a row]
    step = max(CHUNK // weight.shape[1], 1)
    for first in range(0, weight.shape[0], step):
        yield block.split(packed[first : first + step].to(DEVICE).reshape(-1, block.bytes))


def _centered(part: Groups) -> Groups:
    """Subtract zero points that fit a byte from the quants, so that minima are near 0."""
    if part.minima is None:
        return part
    quants = part.quants.reshape(*part.scales.shape, -1).to(torch.int32)  # [X, groups, elements of a group]
    zeros = (-part.minima / part.scales).nan_to_num(0, 0, 0).round()
    zeros = zeros.clamp(quants.amax(2) - 127, quants.amin(2) + 128)  # [X, groups]
    shifted = (quants - zeros[:, :, None].to(torch.int32)).to(torch.int8)
    return Groups(shifted.flatten(1), part.scales, part.minima + zeros * part.scales)


def _halved(part: Groups) -> Groups:
    """Return nibbles 0 to 15 that stand for -7.5 to 7.5, and their minima."""
    if part.minima is None:  # nibbles -8 to 7
        return Groups(part.quants + 8, part.scales, -part.scales / 2)
    return Groups(part.quants, part.scales, part.minima + 7.5 * part.scales)


def _indices(quants: Tensor, table: str) -> Tensor:
    """Return the index in the table of each value: int8, 0 to 15."""
    indices = torch.zeros(256, dtype=torch.int8)
    for index, value in reversed(list(enumerate(TABLES[table]))):  # the first of equal values
        indices[value & 255] = index
    return indices.to(quants.device)[quants.view(torch.uint8).long()]


def _words(quants: Tensor, kind: Kind, span: int, signed: bool) -> Tensor:
    """Pack [N, padded K] bytes into words [N, padded K / weights of a word] int16; signed: nibbles of `_halved`."""
    count = PER_WORD[kind]
    words = torch.zeros(len(quants), quants.shape[1] // count, dtype=torch.int16, device=quants.device)
    step = max(CHUNK // quants.shape[1], 1)
    for first in range(0, len(quants), step):
        fields = quants[first : first + step].view(-1, quants.shape[1] // (count * span), count, span)
        packed = words[first : first + step].view(-1, fields.shape[1], span)
        for index, field_bits in enumerate(fields.to(torch.int16).unbind(2)):  # [rows, chunks, span] each
            if signed:
                negative = field_bits < 8
                packed |= torch.where(negative, 7 - field_bits, field_bits - 8) << (4 * (index ^ 1))
                packed |= negative.to(torch.int16) << (15 - 4 * index)
            else:
                packed |= field_bits << (16 // count * index)
    return words


def _spread(values: Tensor, rows: int, groups: int) -> Tensor:
    """Repeat the values of larger groups: [rows, groups]."""
    values = values.reshape(rows, -1)
    return values.repeat_interleave(groups // values.shape[1], 1)


def _equal(values: Tensor) -> bool:
    """Return whether each row has one value."""
    return bool((values == values[:, :1]).all())


def _pairs(first: Tensor, second: Tensor) -> Tensor:
    """Round to bf16 and interleave: int32 of the same shape."""
    return torch.stack([first, second], -1).to(torch.bfloat16).view(torch.int32).squeeze(-1)
