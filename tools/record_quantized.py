"""Record tests/vectors/quantized: matrices of AutoAWQ, GPTQModel and compressed-tensors, dequantised by each library.

Run it with the three packages installed; the tests need none of them. Each file has the tensors of one matrix as a
checkpoint stores them, the `quantization_config` as metadata, and `expected`: the library's own dequantisation [N, K].
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "tests" / "vectors" / "quantized"
ROWS, COLUMNS = 32, 128

Vector = tuple[str, dict[str, Any], dict[str, Tensor], Tensor]


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape) * 0.01 + 0.001).to(dtype)


def awq() -> Iterator[Vector]:
    from awq.utils.packing_utils import dequantize_gemm

    for size in (32, 128):
        groups = COLUMNS // size
        parts = {
            "qweight": words(COLUMNS, ROWS // 8),
            "qzeros": words(groups, ROWS // 8),
            "scales": scales(groups, ROWS),
        }
        expected = dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], 4, size)  # [K, N]
        config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
        yield f"awq-{size}", config, parts, expected.T


def gptq() -> Iterator[Vector]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.backend import BACKEND
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    for bits, size, symmetric, ordered, form in (
        (4, 32, True, False, "gptq"),
        (4, 128, False, False, "gptq_v2"),
        (4, 32, False, False, "gptq"),
        (4, 32, True, True, "gptq"),
        (4, 32, False, True, "gptq_v2"),
        (4, -1, True, False, "gptq"),
        (8, 32, True, False, "gptq"),
        (8, 64, False, False, "gptq_v2"),
        (8, 32, True, True, "gptq"),
    ):
        groups, per_word, middle = (1 if size < 0 else COLUMNS // size), 32 // bits, 1 << (bits - 1)
        layer = TorchLinear(
            bits=bits,
            group_size=size,
            desc_act=ordered,
            sym=symmetric,
            in_features=COLUMNS,
            out_features=ROWS,
            bias=False,
            pack_dtype=torch.int32,
            backend=BACKEND.TORCH,
            adapter=None,
            register_buffers=True,
        )
        zeros = torch.randint(0, 2 * middle - 1, (groups, ROWS // per_word, per_word))
        if symmetric:
            zeros = torch.full_like(zeros, middle)
        if form == "gptq":
            zeros = (zeros - 1).clamp(min=0)  # v1 stores them minus 1
        packed = (zeros << (bits * torch.arange(per_word))).sum(-1)
        index = torch.arange(COLUMNS) // (size if size > 0 else COLUMNS)
        parts = {
            "qweight": words(COLUMNS // per_word, ROWS),
            "qzeros": torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32),
            "scales": scales(groups, ROWS),
            "g_idx": (index[torch.randperm(COLUMNS)] if ordered else index).to(torch.int32),
        }
        for name, part in parts.items():
            getattr(layer, name).data = part.clone()
        if form == "gptq":
            convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
        layer.post_init()
        config = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": size,
            "desc_act": ordered,
            "sym": symmetric,
            "checkpoint_format": form,
        }
        name = f"gptq-{bits}-{'sym' if symmetric else 'asym'}-{'row' if size < 0 else size}"
        yield (
            name + ("-act-order" if ordered else "") + form.removeprefix("gptq"),
            config,
            parts,
            layer.dequantize_weight().T,
        )


def compressed_tensors() -> Iterator[Vector]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    bf16, f16 = torch.bfloat16, torch.float16
    for form, bits, kind, strategy, symmetric, dtype in (
        ("pack-quantized", 4, "int", "group", True, bf16),
        ("pack-quantized", 4, "int", "group", False, f16),
        ("pack-quantized", 4, "int", "channel", True, f16),
        ("pack-quantized", 8, "int", "group", True, bf16),
        ("int-quantized", 8, "int", "channel", True, bf16),
        ("int-quantized", 8, "int", "channel", False, f16),
        ("int-quantized", 8, "int", "tensor", True, bf16),
        ("float-quantized", 8, "float", "tensor", True, bf16),
        ("float-quantized", 8, "float", "channel", True, bf16),
        ("float-quantized", 8, "float", "block", True, torch.float32),
    ):
        options: dict[str, dict[str, Any]] = {"group": {"group_size": 32}, "block": {"block_structure": [16, 64]}}
        grouped = options.get(strategy, {})
        args = QuantizationArgs(num_bits=bits, type=kind, strategy=strategy, symmetric=symmetric, **grouped)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        shapes: dict[str, tuple[int, ...]] = {
            "group": (ROWS, COLUMNS // 32),
            "channel": (ROWS, 1),
            "tensor": (1,),
            "block": (ROWS // 16, COLUMNS // 64),
        }
        shape = shapes[strategy]
        spread = {"int": 1 << (bits - 1), "float": 400}[kind] * 0.005
        state: dict[str, Tensor] = {
            "weight": (torch.rand(ROWS, COLUMNS, dtype=torch.float32) * 2 - 1).mul(spread).to(dtype),
            "weight_scale": scales(*shape, dtype=dtype),
        }
        if not symmetric:
            state["weight_zero_point"] = torch.randint(-8, 8, shape, dtype=torch.int8)
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(dict(state), scheme)
        expected = compressor.decompress(dict(stored), scheme)["weight"]
        weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, **grouped}
        config = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }
        name = f"{kind}{bits}-{strategy}-{'sym' if symmetric else 'asym'}-{form}"
        yield name, config, {key: tensor for key, tensor in stored.items() if tensor is not None}, expected


def main() -> None:
    torch.manual_seed(0)
    for record in (awq, gptq, compressed_tensors):
        for name, config, parts, expected in record():
            tensors = {key: part.detach().contiguous() for key, part in parts.items()} | {
                "expected": expected.contiguous()
            }
            save_file(tensors, FOLDER / f"{name}.safetensors", {"quantization_config": json.dumps(config)})


if __name__ == "__main__":
    main()
