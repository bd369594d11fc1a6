"""Every operation that the engine asks of a device. A backend is a module that defines them all.

Letters in shapes: T tokens of a step, B rows (requests), R rows of logits, E model width, H query heads,
G key/value heads, D head width, N outputs, K inputs, V vocabulary, P pages in a table, S slots in a page.
Activations and logits are fp32 on the CPU; ids, positions and indices are int32 everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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


class Kernels(Protocol):
    """What a backend defines. Matrix and layer handles are opaque: only their backend looks inside."""

    def vector(self, values: Tensor) -> Tensor:
        """Norms, biases and tables where this device reads them."""
        ...

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

    def project_kv(self, x: Tensor, layer: Any, batch: Batch, pages: LayerPages) -> None:
        """As project_qkv, without the norm at its beginning and without queries: states from elsewhere as a context."""
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

    def edit_logits(self, logits: Tensor, edits: LogitsProcessors) -> None:
        """Penalties, biases, bans, in place on [R, V]."""
        ...

    def mask_logits(self, logits: Tensor, masks: Tensor, rows: Tensor) -> None:
        """Row rows[m] of logits [R, V] becomes -inf at tokens whose bit in masks [M, ceil(V / 32)] is 0, in place.

        rows [M] int32, each at most once. Token t is bit t % 32, from the lowest, of word t // 32, int32.
        """
        ...

    def sample(self, logits: Tensor, choice: SamplingMetadata, out: Tensor | None = None) -> Tensor:
        """argmax of logits / temperature + Gumbel noise over the kept tokens: [R] int32, in `out` if that is given.

        Kept: the top_k largest, of these the fewest whose probability reaches top_p, of these all with at least
        min_p times the largest probability. Order: by logit, then by id. Noise: philox.gumbel, keyed by
        (seed, position, token).
        """
        ...

    def branch(self, logits: Tensor, choice: SamplingMetadata, count: int) -> ChildTokens:
        """The `count` best tokens of each row where `sample` takes the best: with noise, draws without replacement.

        Probabilities are softmax(logits / temperature), with temperature 1 in place of 0; what truncation leaves out
        counts in them, and is not taken.
        """
        ...

    def top_logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> TopLogprobs:
        """Log-softmax of [R, V] at `tokens`, with the `count` likeliest."""
        ...

    def expand(self, choice: SamplingMetadata, drafts: VerifyInputs) -> SamplingMetadata:
        """A choice for each request [B] becomes one for each logit row [R]; positions grow with the depth in it."""
        ...

    def match(self, sampled: Tensor, drafts: VerifyInputs) -> VerifyOutput:
        """Follow the drafted tokens that equal the target's own choice, sampled [R] int32, in the row before them."""
        ...

    def force(self, sampled: Tensor, drafts: VerifyInputs, rates: Tensor, choice: SamplingMetadata) -> VerifyOutput:
        """Keep drafted tokens by coin instead: at depth i with probability rates[i] [width] f32, given depth i - 1.

        Coins: philox stream ACCEPT. For measuring; the text is not the target's. The first child is the one followed.
        """
        ...

    def reject(
        self, logits: Tensor, drafts: VerifyInputs, choice: SamplingMetadata, block: bool, again: bool = False
    ) -> VerifyOutput:
        """Rejection sampling, token by token or (`block`, chains alone) of the whole chain at once: the target's law.

        Of a tree the children of a node are tried in their order, each against what those before it left of p. They
        were drawn without replacement, or independently (`again`); one that was not drawn is certain (one-hot).

        logits [R, V] are edited; choice [R] says how they become the target's distribution p, its `epochs` are the
        lengths of the texts before the drafts. q is softmax(drafts.logits / temperature) where drawn, else one-hot.
        Rows at temperature 0 match. Coins: stream ACCEPT, child j of its node at token j; residuals: stream RESIDUAL,
        both keyed by epoch; the token after a wholly kept path, or without a draft: as in `sample`, on the target's
        own stream.
        """
        ...

    def settle(
        self, chosen: Tensor, drafted: Tensor, query_starts: Tensor, backup: Tensor, discard: Tensor, vocabulary: int
    ) -> NextTokens:
        """Newest tokens and counts of chosen [B, width + 1], a row of which ends at an id outside the vocabulary.

        drafted [B] int32: tokens that each row had drafted. backup [B] int32 stands in where a row chose nothing, or
        where discard [B] uint8 says to ignore its choice; such a row keeps all its tokens.
        """
        ...

    def draft_inputs(
        self,
        tokens: Tensor,
        positions: Tensor,
        query_starts: Tensor,
        ends: Tensor,
        newest: Tensor,
        extra: int,
        shift: bool,
        mask: int,
    ) -> DraftInputs:
        """A step's tokens [T] as a drafter reads them: each row up to ends[b], newest[b], then extra - 1 mask tokens.

        With `shift` the row's first token is left out, since its state is joined to the token after it.
        """
        ...

    def block_inputs(
        self,
        positions: Tensor,
        query_starts: Tensor,
        ends: Tensor,
        newest: Tensor,
        page_tables: Tensor,
        page_size: int,
        width: int,
        mask: int,
        limit: int,
    ) -> BlockInputs:
        """A step's tokens, at positions [T], as context up to ends[b] [B] of each row; then newest[b], `width` masks.

        The block stands right behind the row's context. Nothing is written at or beyond `limit` positions, nor beyond
        a row's page table.
        """
        ...

    def advance(
        self, positions: Tensor, page_tables: Tensor, page_size: int, limit: int, count: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Draft steps on: the `count` positions after positions [B], and their slots, both [B * count] row by row.

        Beyond `limit` positions, or beyond a row's page table: 0 and -1, nowhere.
        """
        ...

    def move(self, pages: Sequence[LayerPages], sources: Tensor, targets: Tensor) -> None:
        """Copy keys and values from slots to slots, in order, in every layer: the kept path of a tree closes up."""
        ...


def load(backend: str, threads: int | None = None, deterministic: bool = False) -> Kernels:
    """Import the one backend of that name. threads: of the host; None leaves them as they are. deterministic: a row's
    bits do not depend on its neighbours; only where that costs something there is a choice.
    """
    if backend == "cpu":
        from . import cpu

        if threads is not None:
            cpu.set_threads(threads)
        return cpu
    if threads is not None:
        torch.set_num_threads(threads)
    if backend == "reference":
        from . import reference

        return reference
    if backend == "cuda":
        from . import cuda
        from .cuda import fixed

        return fixed if deterministic else cuda
    raise ValueError(f"no kernels called `{backend}`: expected `cpu`, `cuda` or `reference`")
