"""Products of activations [T, K] with a matrix [N, K]: few rows by one fused kernel, many through cuBLAS.

A fixed matrix always goes through the fused kernel, sixteen rows at a time: its sums run in one order, whatever T is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import Activation
from .matrices import Matrix
from .overlap import LAUNCH
from .place import INTERPRETED
from .pointwise import gate, numbers, rms_norm
from .product_kernel import product_tile
from .tilings import ROWS, WIDE, WIDE_ROWS, Tiling, tiling

EXPANDED_ROWS = 256  # of activations, from where on a quantised matrix is expanded and multiplied by cuBLAS
EXPANDED = 1 << 26  # numbers of it at a time
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def product(
    x: Tensor,
    matrix: Matrix,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """linear(rms_norm(x)) + bias: [T, N] f32, in `out`, or on top of `add` [T, N] if that is given.

    x [T, K] is fp32, or of the dtype that the matrix is multiplied in.
    """
    target = add if add is not None else out
    if target is None:
        target = torch.empty(x.shape[0], matrix.shape[0], device=x.device)  # [T, N]
    shape = _shape(x.shape[0], matrix, False)
    if shape is not None:
        launch(x, matrix, norm, eps, bias, None, target, shape, None, add is not None)
        return target
    states = _states(x, norm, eps, matrix.compute)  # [T, K]
    found = torch.empty_like(target) if add is not None else target
    _multiply(states, matrix, found)
    if bias is not None:
        found += bias
    return target.add_(found) if add is not None else target


def gated(
    x: Tensor,
    gate_up: Matrix,
    *,
    norm: Tensor | None,
    eps: float,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: Activation,
) -> Tensor:
    """activation(gate) * up: [T, N], as the matrix [2 * N, K], gate above up, is multiplied."""
    outputs = gate_up.shape[0] // 2
    shape = _shape(x.shape[0], gate_up, True)
    if shape is not None:
        out = torch.empty(x.shape[0], outputs, dtype=gate_up.compute, device=x.device)  # [T, N]
        launch(x, gate_up, norm, eps, gate_bias, up_bias, out, shape, activation, False)
        return out
    both = torch.empty(x.shape[0], 2 * outputs, dtype=gate_up.compute, device=x.device)  # [T, 2 * N]
    _multiply(_states(x, norm, eps, gate_up.compute), gate_up, both)
    return gate(both, gate_bias, up_bias, activation)


def linear(x: Tensor, matrix: Matrix) -> Tensor:
    return product(x, matrix)


def norm_linear(x: Tensor, weight: Tensor, eps: float, matrix: Matrix, out: Tensor | None = None) -> Tensor:
    return product(x, matrix, norm=weight, eps=eps, out=out)


def _shape(tokens: int, matrix: Matrix, gated: bool) -> tuple[int, Tiling] | None:
    """Rows of a program and the tiling of the fused kernel; None: cuBLAS."""
    if tokens <= ROWS or matrix.fixed:
        tile = tiling(matrix, gated)
        return tile.rows, tile
    if matrix.kind != "float" and tokens <= EXPANDED_ROWS:
        return WIDE_ROWS, WIDE
    return None


def launch(
    x: Tensor,
    matrix: Matrix,
    norm: Tensor | None,
    eps: float,
    bias: Tensor | None,
    other_bias: Tensor | None,
    out: Tensor,
    shape: tuple[int, Tiling],
    activation: Activation | None,
    add: bool,
) -> None:
    """The fused kernel, with this many rows a program and this tiling."""
    rows, tile = shape
    tokens, outputs = out.shape
    if tokens == 0:
        return
    # Programs that share a part of the matrix follow one another, so that all but the first find it in the cache.
    blocks, tiles = triton.cdiv(tokens, rows), triton.cdiv(outputs, tile.outputs)
    scratch = arrivals = None
    if tile.parts > 1:
        scratch = torch.empty(blocks * tiles * tile.parts, (tile.outputs + 1) * rows, device=x.device)
        # Each call leaves them at 0; only where there are many rows they are not kept with the matrix.
        arrivals = matrix.arrivals if blocks == 1 else torch.zeros(blocks * tiles, dtype=torch.int32, device=x.device)
    product_tile[(blocks, tiles, tile.parts)](
        x.contiguous(),
        norm,
        matrix.data,
        matrix.scales,
        matrix.minima,
        bias,
        other_bias,
        out,
        scratch,
        arrivals,
        tokens,
        outputs,
        eps,
        columns=matrix.shape[1],
        kind=matrix.kind,
        group=matrix.group,
        compute=DTYPES[matrix.compute],
        activation=activation,
        add=add,
        row_block=rows,
        output_block=tile.outputs,
        column_block=tile.columns,
        parts=tile.parts,
        ahead=tile.ahead,
        slices=tile.slices,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **LAUNCH,
    )


def _states(x: Tensor, norm: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if norm is None else rms_norm(x, norm, eps, dtype)


def _multiply(x: Tensor, matrix: Matrix, out: Tensor) -> None:
    """out [T, N] = x [T, K] times the transposed matrix, a quantised one part by part."""
    outputs, columns = matrix.shape
    step = outputs if matrix.kind == "float" else max(EXPANDED // columns, 1)
    if step >= outputs:
        _cublas(x, numbers(matrix, 0, outputs), out)
        return
    for first in range(0, outputs, step):
        last = min(first + step, outputs)
        part = torch.empty(x.shape[0], last - first, dtype=out.dtype, device=x.device)  # [T, part of N]
        _cublas(x, numbers(matrix, first, last), part)
        out[:, first:last] = part


def _cublas(x: Tensor, weights: Tensor, out: Tensor) -> None:
    if INTERPRETED:  # on the CPU, torch has no products of halves with an fp32 result
        out.copy_(x.float() @ weights.T.float())
    elif x.dtype == out.dtype:
        torch.mm(x, weights.T, out=out)
    else:
        torch.mm(x, weights.T, out_dtype=out.dtype, out=out)
