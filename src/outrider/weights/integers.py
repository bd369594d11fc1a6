"""Integer matrices of GPTQ, AWQ and compressed-tensors: unpacked codes, and their repacking into quantized blocks.

weight[n, k] = scale[n, g] * (code[n, k] - zero[n, g]), where g is the group of input k. Codes and zero points are
unsigned. Letters: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels import Weight
from ..kernels.quantization import BLOCK, FORMATS

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds each of eight columns
FLOAT_KINDS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words [..., W] into fields of 4 or 8 bits, the lowest first: [..., W * 32 / bits] uint8."""
    octets = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)  # also of one word with any stride
    if bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], -1).flatten(-2)


def unpack_awq(words: Tensor) -> Tensor:
    """Unpack the words [..., W] of AWQ, whose nibbles are permuted: [..., 8 * W] uint8."""
    nibbles = unpack_words(words, 4)
    return nibbles.view(*words.shape, 8)[..., AWQ_ORDER].view(nibbles.shape)


@dataclass(frozen=True)
class IntegerMatrix:
    bits: int  # 4 or 8
    codes: Tensor  # [N, K] uint8
    scales: Tensor  # [N, G] floats
    zeros: Tensor | None = None  # [N, G] uint8; None: all are half of the range
    groups: Tensor | None = None  # [K]: the group of each input; None: neighbours share one
    group_size: int = 0  # inputs of a group; the last group may have fewer

    def weight(self, reorder: bool = True) -> Weight:
        """Return the matrix in blocks with the same codes, scales and zero points; in floats if blocks cannot hold it.

        Blocks have a scale in half precision for every 32 neighbouring inputs. With `reorder`, inputs of one group that
        are no neighbours (act-order) become such: the weight states the order.
        """
        if self.groups is not None and reorder:
            order = self.groups.argsort(stable=True)  # [K]
            if torch.equal(self.groups[order], torch.arange(len(order)) // self._size):
                sorted_inputs = replace(self, codes=self.codes[:, order], groups=None)
                weight = sorted_inputs.weight()
                if FORMATS[weight.kind].quantized:
                    return replace(weight, order=order.to(torch.int32))
        rows, columns = self.codes.shape
        halves = self.scales.to(torch.float16)
        exact = torch.equal(halves.to(self.scales.dtype), self.scales)
        if self.groups is not None or columns % BLOCK or self._size % BLOCK or not exact:
            return self.floats()
        of_block = torch.arange(0, columns, BLOCK) // self._size  # [K / 32]: the group of each block
        middle = 1 << (self.bits - 1)
        symmetric = self.zeros is None or bool((self.zeros == middle).all())
        kind = ("q4_0" if self.bits == 4 else "q8_0") if symmetric else ("q4_z" if self.bits == 4 else "q8_z")
        blocks = torch.empty(rows, columns // BLOCK, FORMATS[kind].bytes, dtype=torch.uint8)
        blocks[..., :2] = halves[:, of_block].unsqueeze(-1).view(torch.uint8)
        codes, first = self.codes.reshape(rows, -1, BLOCK), 2
        if not symmetric:
            assert self.zeros is not None
            zeros = self.zeros.to(torch.float16) - (0 if self.bits == 4 else middle)
            blocks[..., 2:4] = zeros[:, of_block].unsqueeze(-1).view(torch.uint8)
            first = 4
        if self.bits == 4:
            blocks[..., first:] = codes[..., :16] | (codes[..., 16:] << 4)
        else:
            blocks[..., first:] = codes ^ 128  # signed: minus 128
        return Weight(kind, (rows, columns), blocks.view(rows, -1))

    def floats(self) -> Weight:
        """Dequantize in the dtype of the scales, as the libraries do."""
        rows, columns = self.codes.shape
        of_input = self.groups if self.groups is not None else torch.arange(columns) // self._size  # [K]
        zeros = torch.full((1, 1), 1 << (self.bits - 1)) if self.zeros is None else self.zeros[:, of_input].int()
        values = (self.codes.int() - zeros).to(self.scales.dtype) * self.scales[:, of_input]
        return Weight(FLOAT_KINDS[values.dtype], (rows, columns), values)

    @property
    def _size(self) -> int:
        return self.group_size or self.codes.shape[1]
