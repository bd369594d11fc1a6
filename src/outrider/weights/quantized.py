"""Quantized safetensors checkpoints: GPTQ, AWQ, compressed-tensors, FP8 and MXFP4.

The tensors of a matrix (codes, scales, zero points) are joined under the name of the matrix, by their suffixes. Scales
and zero points of activations and of the KV cache are left out: activations have the precision of the backend.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..catalog.pulled import QUANTIZED as METHODS
from ..errors import UserError
from ..kernels import Weight
from ..kernels.quantization import BLOCK, FORMATS
from .integers import FLOAT_KINDS, IntegerMatrix, unpack_awq, unpack_words

log = logging.getLogger(__name__)

# Formats of compressed-tensors: the others store sparse or 4-bit float weights.
COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)
GPTQ_FORMATS = ("gptq", "gptq_v2")
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # added to the stored zero points
FP8 = torch.float8_e4m3fn
INDICES = (torch.int32, torch.int64)  # dtypes of shapes and groups
DEFAULT_BLOCK = (128, 128)  # rows and columns that share a scale, if the configuration does not say
# Tensors that belong to a matrix, beside its codes.
PARTS = (
    "qzeros",
    "scales",
    "g_idx",
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
)
UNUSED = (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".k_scale", ".v_scale")


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix in several tensors. Nothing is unpacked before `load`."""

    kind: str  # as the checkpoint stores it, for people: gptq-int4, awq-int4, int4, int8, fp8, mxfp4
    shape: tuple[int, ...]  # [N, K]; of mxfp4 also [experts, N, K]
    parts: Mapping[str, Tensor]  # by suffix
    settings: Settings
    reorder: bool = True  # whether the columns may be stored in another order

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def load(self, reorder: bool = True) -> Weight:
        """Return the matrix in blocks. reorder: its columns may be stored in another order, which the weight states."""
        if self.kind == "mxfp4":
            return self._mxfp4()
        reorder = reorder and self.reorder
        weight = self.settings.blocks(self) if self.kind == "fp8" else self.integers().weight(reorder)
        if not FORMATS[weight.kind].quantized:
            self.settings.report(self.kind, weight.kind)
        return weight

    def integers(self) -> IntegerMatrix:
        """Unpack codes and zero points."""
        unpack = {"qweight": self._awq if self.kind.startswith("awq") else self._gptq, "weight_packed": self._packed}
        first = next((suffix for suffix in unpack if suffix in self.parts), None)
        return unpack[first]() if first else self._plain()

    def _mxfp4(self) -> Weight:
        """Move the nibbles: in a checkpoint those of a byte are neighbours, in blocks they are 16 inputs apart."""
        pairs = self.parts["blocks"]  # [..., K / 32, 16]
        nibbles = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)  # [..., K / 32, 32]
        blocks = torch.cat([self.parts["scales"].unsqueeze(-1), nibbles[..., :16] | nibbles[..., 16:] << 4], -1)
        return Weight("mxfp4", self.shape, blocks.view(math.prod(self.shape[:-1]), -1))

    def _gptq(self) -> IntegerMatrix:
        bits, rows = self._bits, self.shape[0]
        words = self.parts["qweight"]  # [K / per word, N]
        codes = unpack_words(words.unsqueeze(-1), bits)  # [K / per word, N, per word]
        zeros = unpack_words(self.parts["qzeros"], bits)[:, :rows]  # [G, N]
        zeros = zeros + self.settings.zero_offset & (1 << bits) - 1
        return IntegerMatrix(
            bits,
            codes.transpose(0, 1).flatten(1)[:, : self.shape[1]],
            self.parts["scales"].T.contiguous(),
            zeros.T.contiguous(),
            **self._grouping(self.parts["scales"].shape[0], self.parts.get("g_idx")),
        )

    def _awq(self) -> IntegerMatrix:
        codes = unpack_awq(self.parts["qweight"])  # [K, N]
        zeros = unpack_awq(self.parts["qzeros"])  # [G, N]
        scales = self.parts["scales"].T.contiguous()
        return IntegerMatrix(4, codes.T.contiguous(), scales, zeros.T.contiguous(), **self._grouping(scales.shape[1]))

    def _packed(self) -> IntegerMatrix:
        rows, columns = self.shape
        scales, zeros = self._scales(), self.parts.get("weight_zero_point")
        if zeros is not None:  # packed along the outputs: [N / per word, G]
            zeros = unpack_words(zeros.T, self._bits)[:, :rows].T.contiguous()
        codes = unpack_words(self.parts["weight_packed"], self._bits)[:, :columns]
        groups = self._grouping(scales.shape[1], self.parts.get("weight_g_idx"))
        return IntegerMatrix(self._bits, codes, scales, zeros, **groups)

    def _plain(self) -> IntegerMatrix:
        """Return signed codes of 8 bits."""
        scales, zeros = self._scales(), self.parts.get("weight_zero_point")
        if zeros is not None:
            zeros = (zeros.to(torch.int16) + 128).to(torch.uint8).reshape(-1, scales.shape[1])
            zeros = zeros.expand(scales.shape)
        codes = self.parts["weight"].view(torch.uint8) ^ 128
        return IntegerMatrix(8, codes, scales, zeros, **self._grouping(scales.shape[1]))

    def _scales(self) -> Tensor:
        """Return the scales as [N, G], of whole tensors, rows, or groups of inputs."""
        scales = self.parts["weight_scale"]
        return (scales if scales.dim() == 2 else scales.reshape(-1, 1)).expand(self.shape[0], -1)

    def _grouping(self, count: int, of_input: Tensor | None = None) -> dict[str, Any]:
        """Return the inputs of a group; if the groups have no neighbours as members, the group of each input."""
        columns = self.shape[1]
        size = self.settings.group_size if count > 1 else columns
        if size <= 0 or math.ceil(columns / size) != count:
            size = math.ceil(columns / count)
        if of_input is not None and bool((of_input >= 0).all()):
            if bool((of_input >= count).any()):
                raise self.settings.refuse(f"a matrix with {count} groups has inputs of group {int(of_input.max())}")
            if not torch.equal(of_input, (torch.arange(columns) // size).to(of_input.dtype)):
                return {"groups": of_input.long(), "group_size": size}
        return {"group_size": size}

    @property
    def _bits(self) -> int:
        return int(self.kind.rpartition("int")[2])


@dataclass
class Settings:
    """What a `quantization_config` says of all matrices."""

    where: Path
    method: str
    bits: int  # of GPTQ and AWQ
    group_size: int
    zero_offset: int
    block: tuple[int, int]
    reported: set[str] = field(default_factory=set)  # kinds that were dequantized

    def refuse(self, problem: str) -> UserError:
        return UserError(f"`{self.where}` is quantised with `{self.method}`, but {problem}: fetch it again")

    def report(self, stored: str, kind: str) -> None:
        """Log once that matrices are kept as floats."""
        if stored not in self.reported:
            self.reported.add(stored)
            log.warning("`%s`: matrices stored as %s become %s, which takes more memory", self.where, stored, kind)

    def blocks(self, matrix: QuantizedMatrix) -> Weight:
        """Return an FP8 matrix in blocks with a scale for every 32 inputs; in bf16 if its rows are no whole blocks."""
        rows, columns = matrix.shape
        numbers = matrix.parts["weight"]
        scales = matrix.parts.get("weight_scale", matrix.parts.get("weight_scale_inv"))
        assert scales is not None
        per_input = self._spread(scales.to(torch.float32), rows, columns)  # [N, K], or [N, 1]
        if columns % BLOCK:
            values = (numbers.to(torch.float32) * per_input).to(torch.bfloat16)
            return Weight(FLOAT_KINDS[values.dtype], (rows, columns), values)
        blocks = torch.empty(rows, columns // BLOCK, FORMATS["fp8"].bytes, dtype=torch.uint8)
        blocks[..., :4] = per_input[:, ::BLOCK].contiguous().unsqueeze(-1).view(torch.uint8)
        blocks[..., 4:] = numbers.view(torch.uint8).view(rows, -1, BLOCK)
        return Weight("fp8", (rows, columns), blocks.view(rows, -1))

    def _spread(self, scales: Tensor, rows: int, columns: int) -> Tensor:
        """Repeat the scales of a tensor, of rows, of groups of inputs, or of blocks, for each row and input."""
        if scales.dim() < 2:
            scales = scales.reshape(-1, 1)
        if scales.shape in ((1, 1), (rows, 1)):
            return scales.expand(rows, 1)
        height, width = (1, math.ceil(columns / scales.shape[1])) if scales.shape[0] == rows else self.block
        if scales.shape != (math.ceil(rows / height), math.ceil(columns / width)) or width % BLOCK:
            raise self.refuse(f"a matrix of {rows} x {columns} has scales of shape {list(scales.shape)}")
        return scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]


def read_settings(where: Path, config: Mapping[str, Any]) -> Settings | None:
    """Return the settings of a config.json's `quantization_config`; None if it has none. Refuse unsupported methods."""
    stated = config.get("quantization_config") or config.get("compression_config")
    if not stated:
        return None
    method = stated.get("quant_method", "unknown") if isinstance(stated, dict) else stated
    if not isinstance(stated, dict) or method not in METHODS:
        raise UserError(
            f"`{where}` is quantised with `{method}`, which Outrider cannot read: pass the plain checkpoint, one of "
            f"{', '.join(METHODS)}, or a GGUF file"
        )
    weights = _first_scheme(stated)
    bits = stated.get("bits", stated.get("w_bit", weights.get("num_bits", 8 if "fp8" in method else 4)))
    form = stated.get("checkpoint_format", "gptq") if method == "gptq" else stated.get("format", "dense")
    size = stated.get("group_size", stated.get("q_group_size", weights.get("group_size")))
    layout = stated.get("version", "gemm")
    problem = None
    if (method == "gptq" and bits not in (4, 8)) or (method == "awq" and bits != 4):
        problem = f"in {bits} bits"
    elif method == "gptq" and form not in GPTQ_FORMATS:
        problem = f"in the layout `{form}`"
    elif method == "awq" and str(layout).lower() != "gemm":
        problem = f"in the layout `{layout}`"
    elif method == "compressed-tensors" and form not in COMPRESSED_FORMATS:
        problem = f"in the format `{form}`"
    if problem:
        raise UserError(f"`{where}` is quantised with `{method}` {problem}, which Outrider cannot read: take another")
    block = stated.get("weight_block_size") or weights.get("block_structure") or DEFAULT_BLOCK
    if not _are_counts(block) or len(block) != 2 or type(size) not in (int, type(None)):
        raise UserError(f"`{where}` has a damaged `quantization_config`: take config.json from the original checkpoint")
    return Settings(where, method, bits, size or 0, ZERO_OFFSETS.get(str(form), 0), (block[0], block[1]))


def _first_scheme(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the weights' part of the first group of compressed-tensors that has one."""
    groups = stated.get("config_groups")
    schemes = groups.values() if isinstance(groups, dict) else ()
    found = (scheme.get("weights") for scheme in schemes if isinstance(scheme, dict))
    return next((weights for weights in found if isinstance(weights, dict)), {})


def _are_counts(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(type(value) is int and value > 0 for value in values)


def join(settings: Settings, tensors: Mapping[str, Tensor]) -> tuple[dict[str, QuantizedMatrix], set[str]]:
    """Return the quantized matrices by name, and the names of all tensors that belong to them or are not used."""
    matrices: dict[str, QuantizedMatrix] = {}
    used = {name for name in tensors if name.endswith(UNUSED)}
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        scales = name.removesuffix("_blocks") + "_scales"
        if settings.method == "mxfp4" and name.endswith("_blocks") and scales in tensors:
            used |= {name, scales}
            matrices[name.removesuffix("_blocks")] = _mxfp4_matrix(settings, name, tensor, tensors[scales])
            continue
        codes = suffix in ("qweight", "weight_packed") and tensor.dtype == torch.int32
        if not codes and not (suffix == "weight" and tensor.dtype in (torch.int8, FP8)):
            continue
        parts = {part: tensors[f"{stem}.{part}"] for part in PARTS if f"{stem}.{part}" in tensors}
        used |= {name, *(f"{stem}.{part}" for part in parts)}
        matrices[f"{stem}.weight"] = _matrix(settings, stem, {suffix: tensor, **parts})
    return matrices, used


@dataclass(frozen=True)
class _Parts:
    """The tensors of one matrix by suffix, whose shapes are checked against each other."""

    settings: Settings
    stem: str
    parts: dict[str, Tensor]

    def check(self, suffix: str, *shapes: tuple[int, ...]) -> None:
        if suffix not in self.parts:
            raise self.settings.refuse(f"`{self.stem}.{suffix}` is missing")
        if shapes and tuple(self.parts[suffix].shape) not in shapes:
            raise self.settings.refuse(f"`{self.stem}.{suffix}` has the shape {list(self.parts[suffix].shape)}")

    def check_if_present(self, suffix: str, shape: tuple[int, ...]) -> None:
        if suffix in self.parts:
            self.check(suffix, shape)

    def gptq_or_awq(self) -> tuple[str, int, int]:
        """Return kind, rows and columns."""
        bits, awq = self.settings.bits, self.settings.method == "awq"
        per_word = 32 // bits
        words = self.parts["qweight"]
        height, width = words.shape if words.dim() == 2 else (0, 0)
        self.check("qweight", (height, width))
        columns, rows = (height, width * per_word) if awq else (height * per_word, width)
        self.check("scales")
        groups = self.parts["scales"].shape[0] if self.parts["scales"].dim() else 0
        self.check("scales", (groups, rows))
        self.check("qzeros", (groups, math.ceil(rows / per_word)))
        self.check_if_present("g_idx", (columns,))
        return f"{'awq' if awq else 'gptq'}-int{bits}", rows, columns

    def packed(self) -> tuple[str, int, int]:
        self.check("weight_shape", (2,))
        rows, columns = (int(size) for size in self.parts["weight_shape"])
        bits = 8 if tuple(self.parts["weight_packed"].shape) == (rows, math.ceil(columns / 4)) else 4
        per_word = 32 // bits
        self.check("weight_packed", (rows, math.ceil(columns / per_word)))
        groups = self._check_scales(rows)
        self.check_if_present("weight_zero_point", (math.ceil(rows / per_word), groups))
        self.check_if_present("weight_g_idx", (columns,))
        return f"int{bits}", rows, columns

    def plain(self) -> tuple[str, int, int]:
        numbers = self.parts["weight"]
        rows, columns = numbers.shape if numbers.dim() == 2 else (0, 0)
        self.check("weight", (rows, columns))
        if numbers.dtype == FP8:
            self.check("weight_scale_inv" if "weight_scale_inv" in self.parts else "weight_scale")
            return "fp8", rows, columns
        self._check_scales(rows)
        self.check_if_present("weight_zero_point", tuple(self.parts["weight_scale"].shape))
        return "int8", rows, columns

    def _check_scales(self, rows: int) -> int:
        """Return the number of groups."""
        self.check("weight_scale")
        scales = self.parts["weight_scale"]
        groups = scales.shape[1] if scales.dim() == 2 else 1
        self.check("weight_scale", (rows, groups), (1, 1), (1,), (), (rows,))
        return groups


def _matrix(settings: Settings, stem: str, parts: dict[str, Tensor]) -> QuantizedMatrix:
    checked = _Parts(settings, stem, parts)
    read = checked.gptq_or_awq if "qweight" in parts else checked.packed if "weight_packed" in parts else checked.plain
    kind, rows, columns = read()
    for suffix, tensor in parts.items():
        if tensor.dtype not in _dtypes(suffix, "weight_packed" in parts) or min(rows, columns) < 1:
            raise settings.refuse(f"`{stem}.{suffix}` holds {tensor.dtype} of shape {list(tensor.shape)}")
    return QuantizedMatrix(kind, (rows, columns), parts, settings, reorder="expert" not in stem)


def _dtypes(suffix: str, packed: bool) -> tuple[torch.dtype, ...]:
    """Return the dtypes that a tensor of a matrix may have."""
    if "scale" in suffix:
        return tuple(FLOAT_KINDS)
    if suffix == "weight" or (suffix == "weight_zero_point" and not packed):
        return torch.int8, FP8
    return (torch.int32,) if suffix in ("qweight", "qzeros", "weight_packed", "weight_zero_point") else INDICES


def _mxfp4_matrix(settings: Settings, name: str, blocks: Tensor, scales: Tensor) -> QuantizedMatrix:
    right = blocks.dim() >= 3 and blocks.shape[-1] == BLOCK // 2 and blocks.shape[:-1] == scales.shape
    if not right or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or not blocks.numel():
        raise settings.refuse(f"`{name}` has the shape {list(blocks.shape)} and scales {list(scales.shape)}")
    shape = (*blocks.shape[:-2], blocks.shape[-2] * BLOCK)
    return QuantizedMatrix("mxfp4", shape, {"blocks": blocks, "scales": scales}, settings)
