"""The data that operations take and return: weights, batches, storage, sampling, drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

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
    query: Weight  # [H * D, E]; draft heads read two states side by side: [H * D, 2 * E], as do key and value
    key: Weight  # [G * D, E]
    value: Weight  # [G * D, E]
    output: Weight  # [E, H * D]
    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # applied to q . k
    eps: float
    window: int = 0  # keys that a query sees, itself included; 0: all
    skip: int = 0  # leading positions that no query sees: a head that joins two tokens has no entry for the first
    causal: bool = True  # else a token sees its row's keys up to the row's highest position; the window counts back
    anchored: bool = False  # the window counts back from before the row's first token, the same for all of the row
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
    """The tokens of one step. Row b owns tokens query_starts[b] .. query_starts[b + 1].

    A row's tokens stand one after the other, or form a tree when `parents` says so. A token of a tree sees the keys
    of its row at positions below the row's first token, then its ancestors' keys and its own, each at its position.
    """

    tokens: Tensor  # [T] int32
    positions: Tensor  # [T] int32; token t sees the keys at positions 0 .. positions[t] of its row
    slots: Tensor  # [T] int32, page * S + offset: where the token's key and value go; -1: nowhere
    query_starts: Tensor  # [B + 1] int32
    page_tables: Tensor  # [B, P] int32; position p of row b lies in page page_tables[b, p // S]
    parents: Tensor | None = None  # [T] int32: the token (of this step) before token t; -1: the row's cached text


@dataclass(frozen=True)
class LayerPages:
    """The key/value storage of one layer, f32, f16 or bf16."""

    keys: Tensor  # [pages, G, S, D]
    values: Tensor  # [pages, G, S, D]


@dataclass(frozen=True)
class LogitsProcessors:
    """Sparse changes to logits: l := (l / scale if l > 0 else l * scale) + bias, for the listed tokens."""

    starts: Tensor  # [R + 1] int32: row r owns entries starts[r] .. starts[r + 1]
    tokens: Tensor  # [entries] int32, each at most once in a row
    scale: Tensor  # [entries] f32, the repetition penalty or 1
    bias: Tensor  # [entries] f32; -inf bans
    only: Tensor  # [R] uint8: where 1, tokens that are not listed become -inf


@dataclass(frozen=True)
class SamplingMetadata:
    """How each row of logits becomes a token."""

    temperature: Tensor  # [R] f32; 0: argmax, the lowest id among equals
    top_k: Tensor  # [R] int32; 0: every token
    top_p: Tensor  # [R] f32
    min_p: Tensor  # [R] f32
    seeds: Tensor  # [R] int64
    positions: Tensor  # [R] int32, the position that is being predicted: draft and target roll the same dice
    stream: int = 0  # philox.TARGET, or DRAFT where a draft may not share the target's noise
    epochs: Tensor | None = None  # [R] int32, a further key of the noise; None: 0
    greedy: bool = False  # the host knows that all temperatures are 0

    def take(self, rows: Tensor | slice | list[int]) -> SamplingMetadata:
        """The choice for these rows."""
        taken: dict[str, Any] = {name: part[rows] for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **taken)


@dataclass(frozen=True)
class TopLogprobs:
    chosen: Tensor  # [R] f32, log-probability of the chosen tokens
    rank: Tensor  # [R] int32, 1 + the number of tokens that are likelier
    values: Tensor  # [R, count] f32, likeliest first, the lower id first among equals
    tokens: Tensor  # [R, count] int32


@dataclass(frozen=True)
class ChildTokens:
    """Several tokens for each row of logits, the best first."""

    tokens: Tensor  # [R, count] int32; -1 where fewer tokens were kept
    logprobs: Tensor  # [R, count] f32: log-probability of each under the row's temperature, all tokens counted; -inf


@dataclass(frozen=True)
class VerifyInputs:
    """The guesses that a step verifies. Row b owns logit rows starts[b] .. starts[b + 1]: that of its newest token,
    then those of its drafted tokens, each after its parent. A chain is a tree in which each follows the one before.
    """

    starts: Tensor  # [B + 1] int32
    tokens: Tensor  # [R] int32: the drafted token; -1 in the first row of each b
    parents: Tensor  # [R] int32: the row, counted from starts[b], that the token follows; -1 in the first row
    width: int  # the most tokens that any row has drafted
    logits: Tensor | None = None  # [R, V] f32, what tokens[r] was drawn from, before the temperature; None: not drawn
    drawn: Tensor | None = None  # [R] uint8: whether `logits` speaks of this row; absent with `logits`


@dataclass(frozen=True)
class VerifyOutput:
    """What verification leaves of the drafts, padded with -1 to width + 1."""

    tokens: Tensor  # [B, width + 1] int32: the tokens that the request goes on with
    rows: Tensor  # [B, width + 1] int32: the logit row, counted from starts[b], that each was chosen from
    counts: Tensor  # [B] int32: how many; at least 1, and all but the last were drafted


@dataclass(frozen=True)
class NextTokens:
    """Where each row of a step stands after verification."""

    tokens: Tensor  # [B] int32, the newest token
    counts: Tensor  # [B] int32, tokens that the step chose; 0 for a row that chose none
    rejected: Tensor  # [B] int32, drafted tokens that were not kept
    ends: Tensor  # [B] int32, the last token of the row, among those of the step, that stays


@dataclass(frozen=True)
class DraftInputs:
    """Tokens for a drafter's first pass over a step. Rejected tokens stay as padding, so that shapes do not depend
    on what was kept. Letter X: tokens of that pass.
    """

    tokens: Tensor  # [X] int32; 0 where rejected
    positions: Tensor  # [X] int32; 0 where rejected
    query_starts: Tensor  # [B + 1] int32
    samples: Tensor  # [B * extra] int32: places of the newest token and of the mask tokens after it
    sources: Tensor  # [T] int32: the place where the state of each token of the step goes; -1: nowhere
    rejected: Tensor  # [X] uint8


@dataclass(frozen=True)
class BlockInputs:
    """Tokens for the one pass of a drafter that fills a block of masks over the target's states. Letter W: masks."""

    context_slots: Tensor  # [T] int32: where the keys of each token of the step go; -1: nowhere, it was rejected
    tokens: Tensor  # [B * (W + 1)] int32: the row's newest token, then masks
    positions: Tensor  # [B * (W + 1)] int32; 0 beyond the limit
    slots: Tensor  # [B * (W + 1)] int32; -1 beyond the limit
    query_starts: Tensor  # [B + 1] int32
