"""Every operation that the engine asks of a device. A backend is a module that defines them all.

Letters in shapes: T tokens of a step, B rows (requests), R rows of logits, E model width, H query heads,
G key/value heads, D head width, N outputs, K inputs, V vocabulary, P pages in a table, S slots in a page.
Activations and logits are fp32 on the CPU; ids, positions and indices are int32 everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Weight:
    """A matrix as the checkpoint stores it: [N, K] floats, or rows of quantised blocks."""

    kind: str  # a key of blocks.FORMATS: f32, f16, bf16, q4_0, q4_1, q8_0, q4_k, ...
    shape: tuple[int, ...]  # logical shape: (N, K), or (N,) for vectors
    data: Tensor  # floats of `shape`, or uint8 [N, bytes per row]


@dataclass(frozen=True)
class AttentionWeights:
    query: Weight  # [H * D, E]
    key: Weight  # [G * D, E]
    value: Weight  # [G * D, E]
    output: Weight  # [E, H * D]
    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # applied to q . k
    eps: float
    window: int = 0  # keys that a query sees, itself included; 0: all
    norm: Tensor | None = None  # [E] f32, RMS norm before the projections
    post_norm: Tensor | None = None  # [E] f32, RMS norm after the output projection
    query_norm: Tensor | None = None  # [D] f32
    key_norm: Tensor | None = None  # [D] f32
    query_bias: Tensor | None = None  # [H * D] f32
    key_bias: Tensor | None = None  # [G * D] f32
    value_bias: Tensor | None = None  # [G * D] f32
    output_bias: Tensor | None = None  # [E] f32
    cos: Tensor | None = None  # [positions, D / 2] f32; None: no rotary embedding in this layer
    sin: Tensor | None = None


@dataclass(frozen=True)
class MlpWeights:
    gate: Weight  # [N, E]
    up: Weight  # [N, E]
    down: Weight  # [E, N]
    activation: Activation
    eps: float
    norm: Tensor | None = None  # [E] f32
    post_norm: Tensor | None = None  # [E] f32
    gate_bias: Tensor | None = None  # [N] f32
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None  # [E] f32


@dataclass(frozen=True)
class Batch:
    """The tokens of one step. Row b owns tokens query_starts[b] .. query_starts[b + 1]."""

    tokens: Tensor  # [T] int32
    positions: Tensor  # [T] int32; token t sees the keys at positions 0 .. positions[t] of its row
    slots: Tensor  # [T] int32, page * S + offset: where the token's key and value go
    query_starts: Tensor  # [B + 1] int32
    page_tables: Tensor  # [B, P] int32; position p of row b lies in page page_tables[b, p // S]


@dataclass(frozen=True)
class LayerPages:
    """The key/value storage of one layer, f32, f16 or bf16."""

    keys: Tensor  # [pages, G, S, D]
    values: Tensor  # [pages, G, S, D]


@dataclass(frozen=True)
class Edits:
    """Sparse changes to logits: l := (l / scale if l > 0 else l * scale) + bias, for the listed tokens."""

    starts: Tensor  # [R + 1] int32: row r owns entries starts[r] .. starts[r + 1]
    tokens: Tensor  # [entries] int32, each at most once in a row
    scale: Tensor  # [entries] f32, the repetition penalty or 1
    bias: Tensor  # [entries] f32; -inf bans
    only: Tensor  # [R] uint8: where 1, tokens that are not listed become -inf


@dataclass(frozen=True)
class Choice:
    """How each row of logits becomes a token."""

    temperature: Tensor  # [R] f32; 0: argmax, the lowest id among equals
    top_k: Tensor  # [R] int32; 0: every token
    top_p: Tensor  # [R] f32
    min_p: Tensor  # [R] f32
    seeds: Tensor  # [R] int64
    positions: Tensor  # [R] int32, the position that is being predicted: draft and target roll the same dice


@dataclass(frozen=True)
class TopLogprobs:
    chosen: Tensor  # [R] f32, log-probability of the chosen tokens
    rank: Tensor  # [R] int32, 1 + the number of tokens that are likelier
    values: Tensor  # [R, count] f32, likeliest first, the lower id first among equals
    tokens: Tensor  # [R, count] int32


class Kernels(Protocol):
    """What a backend defines. Matrix and layer handles are opaque: only their backend looks inside."""

    def matrix(self, weight: Weight) -> Any:
        """Repack a weight for this device."""
        ...

    def attention_layer(self, weights: AttentionWeights) -> Any:
        """Repack an attention block: what project_qkv and attend take."""
        ...

    def mlp_layer(self, weights: MlpWeights) -> Any:
        """Repack a gated MLP: what mlp takes."""
        ...

    def embed(self, table: Any, tokens: Tensor, scale: float) -> Tensor:
        """Rows of `table` [V, E] times `scale`: [T, E]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight: [T, E]."""
        ...

    def linear(self, x: Tensor, matrix: Any) -> Tensor:
        """x [T, K] times the transpose of `matrix` [N, K]: [T, N]."""
        ...

    def norm_linear(self, x: Tensor, weight: Tensor, eps: float, matrix: Any, out: Tensor | None = None) -> Tensor:
        """linear(rms_norm(x)): [T, N], in `out` if that is given. The head of a model."""
        ...

    def project_qkv(self, x: Tensor, layer: Any, batch: Batch, pages: LayerPages) -> Tensor:
        """Norm, project, bias, per-head norm, rotate; store keys and values; return queries [T, H * D]."""
        ...

    def attend(self, q: Tensor, layer: Any, batch: Batch, pages: LayerPages, x: Tensor) -> None:
        """x [T, E] += post_norm(output(attention of q over the pages))."""
        ...

    def mlp(self, x: Tensor, layer: Any) -> None:
        """x [T, E] += post_norm(down(activation(gate(norm(x))) * up(norm(x))))."""
        ...

    def stack(self, layers: Sequence[tuple[Any, Any]], pages: Sequence[LayerPages]) -> Any:
        """Attention and MLP layers with their storage, for run_stack: one call where there would be three a layer."""
        ...

    def run_stack(self, x: Tensor, stack: Any, batch: Batch) -> None:
        """x [T, E] through project_qkv, attend and mlp of each layer in turn."""
        ...

    def edit_logits(self, logits: Tensor, edits: Edits) -> None:
        """Penalties, biases, bans, in place on [R, V]."""
        ...

    def sample(self, logits: Tensor, choice: Choice, out: Tensor | None = None) -> Tensor:
        """argmax of logits / temperature + Gumbel noise over the kept tokens: [R] int32, in `out` if that is given.

        Kept: the top_k largest, of these the fewest whose probability reaches top_p, of these all with at least
        min_p times the largest probability. Order: by logit, then by id. Noise: philox.gumbel, keyed by
        (seed, position, token).
        """
        ...

    def top_logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> TopLogprobs:
        """Log-softmax of [R, V] at `tokens`, with the `count` likeliest."""
        ...


def load(backend: str, threads: int | None = None) -> Kernels:
    """Import the one backend of that name; `threads` None leaves its own choice."""
    if backend == "cpu":
        from . import cpu

        if threads is not None:
            cpu.set_threads(threads)
        return cpu
    if backend == "reference":
        from . import reference

        if threads is not None:
            torch.set_num_threads(threads)
        return reference
    raise ValueError(f"no kernels called `{backend}`: expected `cpu` or `reference`")


def float_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]
