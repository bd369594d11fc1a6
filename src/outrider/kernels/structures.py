"""The data that operations take and return: weights, batches, pages, sampling, drafts, and ranges of attention."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

# swiglu_oai, of gpt-oss: gate * sigmoid(1.702 * gate) * (up + 1), of a gate up to 7 and an up between -7 and 7.
Activation = Literal["silu", "gelu_tanh", "swiglu_oai"]


@dataclass(frozen=True)
class Weight:
    """A matrix as the checkpoint stores it: [N, K] floats, or rows of quantized blocks."""

    kind: str  # a key of quantization.FORMATS: f32, f16, bf16, q4_0, q4_1, q8_0, q4_k, ...
    shape: tuple[int, ...]  # logical shape: (N, K), or (N,) for vectors
    data: Tensor  # floats of `shape`, or uint8 [N, bytes per row]
    order: Tensor | None = None  # [K] int32: the input that each stored column multiplies; None: in order


@dataclass(frozen=True)
class AttentionLora:
    """Slots of adapters over the matrices of an attention block, as Kernels.lora_slots returns them."""

    query: Any
    key: Any
    value: Any
    output: Any


@dataclass(frozen=True)
class MlpLora:
    """Slots of adapters over the matrices of an MLP, as Kernels.lora_slots returns them."""

    gate: Any
    up: Any
    down: Any


@dataclass(frozen=True)
class AttentionWeights:
    query: Weight  # [H * D, E]; [H * D, 2 * E] in draft heads that read two states (key and value likewise)
    key: Weight  # [G * D, E]
    value: Weight  # [G * D, E]
    output: Weight  # [E, H * D]
    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # applied to q . k
    eps: float
    window: int = 0  # sliding window: keys that a query attends to, itself included; 0: no window
    skip: int = 0  # leading positions without KV: a head that joins two tokens has no entry for the first
    causal: bool = True  # False: a token attends to its row's keys up to the row's highest position
    anchored: bool = False  # the window of all tokens of a row counts back from the position before its first token
    soft_cap: float = 0.0  # scores s become soft_cap * tanh(s / soft_cap); 0: no cap
    norm: Tensor | None = None  # [E] f32, RMS norm before the projections
    post_norm: Tensor | None = None  # [E] f32, RMS norm after the output projection
    query_norm: Tensor | None = None  # [D] f32: of each head; [H * D]: of all heads together
    key_norm: Tensor | None = None  # [D], or [G * D]
    query_bias: Tensor | None = None  # [H * D] f32
    key_bias: Tensor | None = None  # [G * D] f32
    value_bias: Tensor | None = None  # [G * D] f32
    output_bias: Tensor | None = None  # [E] f32
    sinks: Tensor | None = None  # [H] f32: the score of one more key of each head, whose value is 0
    cos: Tensor | None = None  # [positions, D / 2] f32; None: no rotary embedding in this layer
    sin: Tensor | None = None
    lora: AttentionLora | None = None  # None: adapters are off
    gate: Weight | None = None  # [H * D, E]: what the heads return is multiplied by sigmoid(gate(norm(x)))

    @property
    def whole_norms(self) -> bool:
        """Return whether the norms of queries and keys are over all heads together."""
        return self.query_norm is not None and self.query_norm.shape[0] != self.head_dim


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
    lora: MlpLora | None = None  # None: adapters are off


@dataclass(frozen=True)
class MoeWeights:
    """A mixture of experts: a router picks `top_k` gated MLPs for each token. Letter X: experts.

    The scores of a token are the softmax of its router logits, in fp32. The experts with the largest ones are chosen;
    among equals that with the lower index. Their outputs are added in this order, each times its score.
    """

    router: Tensor  # [X, E] f32
    gate: tuple[Weight, ...]  # [N, E] of each expert
    up: tuple[Weight, ...]  # [N, E]
    down: tuple[Weight, ...]  # [E, N]
    top_k: int
    normalized: bool  # the scores of the chosen experts are divided by their sum
    activation: Activation
    eps: float
    norm: Tensor | None = None  # [E] f32
    post_norm: Tensor | None = None  # [E] f32
    router_bias: Tensor | None = None  # [X] f32
    gate_bias: Tensor | None = None  # [X, N] f32
    up_bias: Tensor | None = None  # [X, N] f32
    down_bias: Tensor | None = None  # [X, E] f32
    shared: MlpWeights | None = None  # of every token, added last; without norms and biases
    shared_gate: Tensor | None = None  # [E] f32, with `shared`: the score is the sigmoid of its product with the state

    def expert(self, index: int) -> MlpWeights:
        """Return the MLP of one expert, without norms."""
        return MlpWeights(
            self.gate[index],
            self.up[index],
            self.down[index],
            self.activation,
            self.eps,
            gate_bias=None if self.gate_bias is None else self.gate_bias[index],
            up_bias=None if self.up_bias is None else self.up_bias[index],
            down_bias=None if self.down_bias is None else self.down_bias[index],
        )


@dataclass(frozen=True)
class Batch:
    """The tokens of one step. Row b owns tokens query_starts[b] .. query_starts[b + 1].

    Without `parents` the tokens of a row are consecutive. With `parents` they form a tree: a token attends to the keys
    at positions below the row's first token, to those of its ancestors and to its own.
    """

    tokens: Tensor  # [T] int32
    positions: Tensor  # [T] int32; token t attends to positions 0 .. positions[t] of its row
    slots: Tensor  # [T] int32, page * S + offset: where the token's key and value are stored; -1: not stored
    query_starts: Tensor  # [B + 1] int32
    page_tables: Tensor  # [B, P] int32; position p of row b is in page page_tables[b, p // S]
    parents: Tensor | None = None  # [T] int32: the parent of token t among the tokens of this step; -1: the cached text
    adapters: Tensor | None = None  # [T] int32: the slot of the token's adapter; -1: none; None: no token has one
    # [B, 3] int32, for recurrent layers: the slot that row b reads its state from, the slot that it writes it to, and
    # the leading tokens of the row that the written state has read; those after it may still be rejected.
    states: Tensor | None = None
    prefix: int = 0  # positions before the first token of a batch of one row; 0: none, or not known on the host


@dataclass(frozen=True)
class WindowMap:
    """The window page of each page: where layers with a sliding window store its KV (cache/window_pages.py)."""

    pages: Tensor  # [1 + pages] int32: -1, then the window page of each page
    slots: Tensor  # [1 + slots] int32: -1, then the slot in its window page of each slot

    def translate(self, batch: Batch) -> Batch:
        """Return the batch as layers with a sliding window read it."""
        tables = self.pages.index_select(0, batch.page_tables.flatten() + 1).view(batch.page_tables.shape)
        return replace(batch, slots=self.translate_slots(batch.slots), page_tables=tables)

    def translate_slots(self, slots: Tensor) -> Tensor:
        """Return the slots [T] int32 of window pages for slots of pages; -1: none, for both."""
        return self.slots.index_select(0, slots + 1)

    def assign(self, pages: Tensor, window_pages: Tensor) -> None:
        """Store the window pages [N] int32 of these pages [N] int64."""
        page_size = (self.slots.shape[0] - 1) // (self.pages.shape[0] - 1)
        offsets = torch.arange(page_size, dtype=torch.int32, device=window_pages.device)
        self.pages[1:].index_copy_(0, pages, window_pages)
        self.slots[1:].view(-1, page_size).index_copy_(0, pages, window_pages[:, None] * page_size + offsets)


@dataclass(frozen=True)
class LayerPages:
    """The paged KV cache of one layer: f32, f16, bf16; or int8, e4m3, with scales (kv_quantization.py)."""

    keys: Tensor  # [pages, G, S, D]
    values: Tensor  # [pages, G, S, D]
    key_scales: Tensor | None = None  # [pages, G, S] f32, of int8 and e4m3 pages
    value_scales: Tensor | None = None
    # Of a layer with a sliding window, if its pages are window pages: a batch is translated before it runs the layer.
    window_map: WindowMap | None = field(default=None, kw_only=True)

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors. In each, slot page * S + offset is [page, :, offset]."""
        return [part for part in (self.keys, self.values, self.key_scales, self.value_scales) if part is not None]


@dataclass(frozen=True)
class LogitsProcessors:
    """Sparse changes to logits: l = (l / scale if l > 0 else l * scale) + bias, for the listed tokens."""

    starts: Tensor  # [R + 1] int32: row r owns entries starts[r] .. starts[r + 1]
    tokens: Tensor  # [entries] int32, each at most once in a row
    scale: Tensor  # [entries] f32: the repetition penalty, or 1
    bias: Tensor  # [entries] f32; -inf bans
    only: Tensor  # [R] uint8; 1: tokens that are not listed become -inf


# Bits of DecodeProcessors.marks above the count of a token.
MARK_COUNT = (1 << 24) - 1
MARK_PROMPT = 1 << 24  # in the prompt, of a text with a repetition penalty
MARK_BIAS = 1 << 25
MARK_BANNED = 1 << 26
MARK_END = 1 << 27  # banned before `min_lengths`
MARK_ALLOWED = 1 << 28
# Bits of DecodeProcessors.kinds.
PROCESSED = 1  # the logits of the text change
COUNTED = 2  # it has penalties: its tokens are counted
ONLY_ALLOWED = 4  # tokens without MARK_ALLOWED become -inf


@dataclass(frozen=True)
class DecodeProcessors:
    """Logits processors of texts that grow on the device. Letters: B texts, V vocabulary."""

    marks: Tensor  # [B, V] int32: how often the output contains the token, and MARK bits
    bias: Tensor  # [B, V] f64: the bias of tokens with MARK_BIAS; of any shape if there is none
    penalties: Tensor  # [B, 3] f64: repetition, presence, frequency
    min_lengths: Tensor  # [B] int32: tokens with MARK_END are banned at lower positions
    kinds: Tensor  # [B] int32: 0, or bits


@dataclass(frozen=True)
class SamplingMetadata:
    """Sampling parameters of each row of logits."""

    temperature: Tensor  # [R] f32; 0: argmax, ties go to the lowest id
    top_k: Tensor  # [R] int32; 0: all tokens
    top_p: Tensor  # [R] f32
    min_p: Tensor  # [R] f32
    seeds: Tensor  # [R] int64
    positions: Tensor  # [R] int32: the predicted position, a key of the noise, so that draft and target share it
    stream: int = 0  # philox.TARGET, or philox.DRAFT if the draft must not share the target's noise
    epochs: Tensor | None = None  # [R] int32: a further key of the noise; None: 0
    greedy: bool = False  # True: all temperatures are 0, as the host knows

    def take(self, rows: Tensor | slice | list[int]) -> SamplingMetadata:
        """Return the parameters of these rows."""
        taken: dict[str, Any] = {name: part[rows] for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **taken)


@dataclass(frozen=True)
class TopLogprobs:
    chosen: Tensor  # [R] f32, log-probability of the chosen tokens
    rank: Tensor  # [R] int32: 1 + the number of tokens with a larger logit
    values: Tensor  # [R, count] f32, descending; ties: the lower id first
    tokens: Tensor  # [R, count] int32


@dataclass(frozen=True)
class ChildTokens:
    """Several tokens for each row of logits, the best first: children of one node of a draft tree."""

    tokens: Tensor  # [R, count] int32; -1 where truncation left fewer tokens
    logprobs: Tensor  # [R, count] f32: log-softmax over all tokens at the row's temperature; -inf if there is none


@dataclass(frozen=True)
class VerifyInputs:
    """The drafts that a step verifies. Request b owns logit rows starts[b] .. starts[b + 1]: the row of its newest
    token, then those of its drafted tokens, parents before children. A chain is a tree with one child per node.
    """

    starts: Tensor  # [B + 1] int32
    tokens: Tensor  # [R] int32: the drafted token; -1 in the first row of each b
    parents: Tensor  # [R] int32: the parent's row, counted from starts[b]; -1 in the first row
    width: int  # the largest number of drafted tokens of a request
    logits: Tensor | None = None  # [R, V] f32: the logits that tokens[r] was sampled from; None: none was sampled
    drawn: Tensor | None = None  # [R] uint8: whether tokens[r] was sampled from logits[r]; None with `logits`


@dataclass(frozen=True)
class VerifyOutput:
    """The accepted tokens and the one after them, padded with -1 to width + 1."""

    tokens: Tensor  # [B, width + 1] int32: accepted drafted tokens, then one token of the target
    rows: Tensor  # [B, width + 1] int32: the logit row, counted from starts[b], that each was sampled from
    counts: Tensor  # [B] int32: tokens of each request, at least 1; all but the last were drafted
    nonfinite: Tensor | None = None  # [B] int32, of `verify_rejection`: tokens ignored since their q is not finite


@dataclass(frozen=True)
class NextTokens:
    """The state of each row of a step after verification."""

    tokens: Tensor  # [B] int32: the newest token
    counts: Tensor  # [B] int32: new tokens; 0 for a row that sampled none
    rejected: Tensor  # [B] int32: drafted tokens that were rejected
    ends: Tensor  # [B] int32: index, among the tokens of the step, of the row's last accepted one


@dataclass(frozen=True)
class DraftInputs:
    """Inputs of a drafter's first pass after a step. Rejected tokens become padding, so that shapes do not depend on
    the number of accepted tokens. Letter X: tokens of that pass.
    """

    tokens: Tensor  # [X] int32; 0 where rejected
    positions: Tensor  # [X] int32; 0 where rejected
    query_starts: Tensor  # [B + 1] int32
    samples: Tensor  # [B * extra] int32: indices of the newest token and of the mask tokens after it
    sources: Tensor  # [T] int32: index in the pass of the state of each token of the step; -1: none
    rejected: Tensor  # [X] uint8


@dataclass(frozen=True)
class BlockInputs:
    """Inputs of a drafter that predicts a block of mask tokens in one pass (DFlash). Letter W: masks."""

    context_slots: Tensor  # [T] int32: the KV slot of each token of the step; -1: the token was rejected
    tokens: Tensor  # [B * (W + 1)] int32: the row's newest token, then masks
    positions: Tensor  # [B * (W + 1)] int32; 0 beyond the limit
    slots: Tensor  # [B * (W + 1)] int32; -1 beyond the limit
    query_starts: Tensor  # [B + 1] int32


@dataclass(frozen=True)
class TokenHistory:
    """The tokens of all texts, stored as KV is. The newest token of a text has no entry."""

    tokens: Tensor  # [slots] int32
    page_tables: Tensor  # [B, P] int32
    page_size: int


@dataclass(frozen=True)
class NgramLookup:
    """How drafts are copied from earlier occurrences of the last tokens of a text. Letter W: tokens of a draft."""

    shortest: int  # tokens of the shortest n-gram that is looked up
    longest: int  # tokens of the longest, at most M
    window: int  # tokens after the end of the last accepted copy in which an occurrence is preferred
    kept: Tensor  # [M + 1] int32: tokens of a draft that are worth verifying, by the length of the match, at most W


@dataclass(frozen=True)
class OwnKeys:
    """Keys that one group of queries attends to. Letters: A groups of N / A consecutive queries, S keys of each."""

    keys: Tensor  # [B, A, S, G, D]
    values: Tensor  # [B, A, S, G, D]
    counts: Tensor | None = None  # [B, N] int32: keys of its group that each query attends to; None: all


@dataclass(frozen=True)
class AttentionRanges:
    """Attention of training: each query attends to keys begins .. ends - 1 of its row, and to those of its group.

    Letters: B rows, N queries of a row, M keys of a row.
    """

    keys: Tensor  # [B, M, G, D]
    values: Tensor  # [B, M, G, D]
    begins: Tensor  # [B, N] int32
    ends: Tensor  # [B, N] int32
    own: OwnKeys | None = None
