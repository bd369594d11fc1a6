"""Every operation that the engine asks of a device. A backend is a package that defines them all; `load` imports one.

Letters in shapes: T tokens of a step, B rows (requests), R rows of logits, E model width, H query heads,
G key/value heads, D head width, N outputs, K inputs, V vocabulary, P pages in a table, S slots in a page.
Activations and logits are fp32 on the CPU; ids, positions and indices are int32 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .recurrence import LayerStates, RecurrentWeights
from .structures import (
    AttentionWeights,
    Batch,
    BlockInputs,
    ChildTokens,
    DecodeProcessors,
    DraftInputs,
    LayerPages,
    LogitsProcessors,
    MlpWeights,
    MoeWeights,
    NextTokens,
    NgramLookup,
    SamplingMetadata,
    TokenHistory,
    TopLogprobs,
    VerifyInputs,
    VerifyOutput,
    Weight,
)


class Kernels(Protocol):
    """The operations of a backend. Handles of matrices and layers are opaque outside their backend."""

    def vector(self, values: Tensor) -> Tensor:
        """Copy norm weights, biases or tables to this device."""
        ...

    def matrix(self, weight: Weight) -> Any:
        """Repack a weight for this device."""
        ...

    def attention_layer(self, weights: AttentionWeights) -> Any:
        """Repack an attention block for project_qkv, project_kv and attend."""
        ...

    def mlp_layer(self, weights: MlpWeights) -> Any:
        """Repack a gated MLP for mlp."""
        ...

    def moe_layer(self, weights: MoeWeights) -> Any:
        """Repack a mixture of experts for moe."""
        ...

    def recurrent_layer(self, weights: RecurrentWeights) -> Any:
        """Repack a recurrent layer for recurrent."""
        ...

    def lora_slots(self, slots: int, rank: int, shape: tuple[int, int]) -> Any:
        """Make room for `slots` adapters of at most `rank` over a matrix of this shape [N, K]. All slots are empty."""
        ...

    def set_lora(self, lora_slots: Any, slot: int, a: Tensor | None, b: Tensor | None) -> None:
        """Put an adapter a [R, K], b [N, R] f32 into a slot; None: empty it. Layers with these slots use it at once.

        Tokens with this slot in Batch.adapters get x * transpose(a) * transpose(b) added to their product with the
        matrix, before the bias.
        """
        ...

    def embed(self, table: Any, tokens: Tensor, scale: float) -> Tensor:
        """Return rows of `table` [V, E] times `scale`: [T, E]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight: [T, E]."""
        ...

    def linear(self, x: Tensor, matrix: Any) -> Tensor:
        """Return x [T, K] times the transpose of `matrix` [N, K]: [T, N]."""
        ...

    def norm_linear(self, x: Tensor, weight: Tensor, eps: float, matrix: Any, out: Tensor | None = None) -> Tensor:
        """Return linear(rms_norm(x)): [T, N], in `out` if given. The language-model head."""
        ...

    def soft_cap(self, x: Tensor, cap: float) -> None:
        """Replace x [R, V] by cap * tanh(x / cap), in place."""
        ...

    def project_qkv(self, x: Tensor, layer: Any, batch: Batch, pages: LayerPages) -> Tensor:
        """Apply norm, projections, bias, norms of heads, rope; store keys and values; return queries [T, H * D]."""
        ...

    def project_kv(self, x: Tensor, layer: Any, batch: Batch, pages: LayerPages) -> None:
        """Store keys and values of `x` as project_qkv does, without the input norm and without queries."""
        ...

    def attend(self, q: Tensor, layer: Any, batch: Batch, pages: LayerPages, x: Tensor) -> None:
        """Add post_norm(output(attention of q over the pages, gated by x if the layer has a gate)) to x [T, E]."""
        ...

    def mlp(self, x: Tensor, layer: Any, adapters: Tensor | None = None) -> None:
        """Add post_norm(down(activation(gate(norm(x))) * up(norm(x)))) to x [T, E]. adapters: as in Batch."""
        ...

    def moe(self, x: Tensor, layer: Any) -> None:
        """Add post_norm(sum of score * MLP of norm(x) over the chosen experts and the shared one) to x [T, E]."""
        ...

    def recurrent(self, x: Tensor, layer: Any, batch: Batch, states: LayerStates) -> None:
        """Add output(gated norm(recurrence over norm(x))) to x [T, E], and update the states of the rows.

        A row at position 0 begins with a state of zeros. Another reads the state of its first slot (batch.states), and
        brings it up to date with the inputs of the tokens between its length and the row's first position. Then it
        runs its own tokens, each after its parent. The state after the leading ones is written to the second slot; the
        inputs of the others are kept there. Repeating a step that writes no token of its own gives the same results.
        """
        ...

    def copy_inputs(self, layers: Sequence[LayerStates], sources: Tensor, targets: Tensor) -> None:
        """Copy kept inputs between lines (slot * R + position % R), in order: compacts the accepted path of a tree."""
        ...

    def layer_stack(self, layers: Sequence[tuple[Any, Any]], pages: Sequence[LayerPages | LayerStates]) -> Any:
        """Bind layers to their KV pages or states, for run_layers: one call for all of them.

        A layer is a pair: attention or a recurrent layer, and an MLP or a mixture of experts.
        """
        ...

    def run_layers(self, x: Tensor, layer_stack: Any, batch: Batch) -> None:
        """Apply project_qkv and attend (or recurrent), and mlp (or moe) of each layer to x [T, E], in place."""
        ...

    def process_logits(self, logits: Tensor, processors: LogitsProcessors) -> None:
        """Apply penalties, biases and bans to logits [R, V], in place."""
        ...

    def process_decode_logits(
        self, logits: Tensor, processors: DecodeProcessors, drafts: Tensor, positions: Tensor
    ) -> None:
        """Apply penalties, biases and bans to logits [B * (W + 1), V] of texts with drafts [B, W] int32, in place.

        Row w of a text follows its first w draft tokens, and predicts the token at positions[b] + 1 + w. positions [B]
        int32: of the newest tokens. The results are those of process_logits for the same text.
        """
        ...

    def count_tokens(self, processors: DecodeProcessors, tokens: Tensor) -> None:
        """Count tokens [B, N] int32 in the marks of the texts with COUNTED; -1: none."""
        ...

    def mask_logits(self, logits: Tensor, masks: Tensor, rows: Tensor) -> None:
        """Set row rows[m] of logits [R, V] to -inf at tokens whose bit in masks [M, ceil(V / 32)] is 0, in place.

        rows [M] int32, each at most once. Token t is bit t % 32 (0: the lowest) of the int32 word t // 32.
        """
        ...

    def sample(self, logits: Tensor, sampling: SamplingMetadata, out: Tensor | None = None) -> Tensor:
        """Return argmax of logits / temperature + Gumbel noise over the allowed tokens: [R] int32, in `out` if given.

        Allowed: the top_k largest; of these the fewest whose probability reaches top_p; of these all with at least
        min_p times the largest probability. Order: by logit, then by id. Noise: philox.gumbel, keyed by
        (seed, position, token).
        """
        ...

    def sample_children(self, logits: Tensor, sampling: SamplingMetadata, count: int) -> ChildTokens:
        """Return the `count` best tokens of each row by the scores of `sample`: draws without replacement.

        Log-probabilities are those of softmax(logits / temperature) over all tokens, also those that truncation
        excludes; temperature 0 counts as 1.
        """
        ...

    def top_logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> TopLogprobs:
        """Return log-softmax of logits [R, V] at `tokens`, and the top `count` of each row."""
        ...

    def expand_sampling(self, sampling: SamplingMetadata, drafts: VerifyInputs) -> SamplingMetadata:
        """Expand the sampling metadata of requests [B] to logit rows [R]; positions grow with the depth of the row."""
        ...

    def verify_exact(self, sampled: Tensor, drafts: VerifyInputs) -> VerifyOutput:
        """Accept drafted tokens that equal the target's token, sampled [R] int32, in the row of their parent."""
        ...

    def verify_synthetic(
        self, sampled: Tensor, drafts: VerifyInputs, rates: Tensor, sampling: SamplingMetadata
    ) -> VerifyOutput:
        """Accept drafted tokens at random: at depth i with probability rates[i] [width] f32, given depth i - 1.

        Coins: philox stream ACCEPT. For benchmarks: the text is not the target's. Only first children are tried.
        """
        ...

    def verify_rejection(
        self,
        logits: Tensor,
        drafts: VerifyInputs,
        sampling: SamplingMetadata,
        block: bool,
        with_replacement: bool = False,
    ) -> VerifyOutput:
        """Verify by rejection sampling, per token or (`block`, chains only) per chain: outputs follow the target.

        The children of a node are tried in order, each against the residual that those before it left of p. They
        were sampled without or with replacement; a token that was not sampled has a one-hot q.

        p: logits [R, V] after all processors, with sampling [R], whose `epochs` are the lengths of the texts before
        the drafts. q: softmax(drafts.logits / temperature) where `drawn`, else one-hot. Rows at temperature 0 are
        verified exactly. Coins: stream ACCEPT, with the child's index as token; residuals: stream RESIDUAL; both
        keyed by epoch. The token after a fully accepted path, or without a draft: as in `sample`, on stream TARGET.

        A sampled token whose drafts.logits are not finite (some NaN or +inf, or nothing but -inf) is ignored, as if it
        and the tokens after it had not been drafted. That depends on no sampled token, so it is lossless.
        """
        ...

    def next_tokens(
        self, chosen: Tensor, drafted: Tensor, query_starts: Tensor, backup: Tensor, discard: Tensor, vocabulary: int
    ) -> NextTokens:
        """Return newest tokens and counts of chosen [B, width + 1]; an id outside the vocabulary ends a row.

        drafted [B] int32: drafted tokens of each row. backup [B] int32: the newest token of rows that sampled none
        or whose discard [B] uint8 is 1; such rows reject nothing.
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
        """Build a drafter's inputs from a step's tokens [T]: row b up to ends[b], newest[b], extra - 1 mask tokens.

        With `shift` the row's first token is dropped: the drafter pairs each state with the token after it (EAGLE).
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
        """Build a block drafter's inputs: context slots of a step's tokens, then newest[b] and `width` mask tokens.

        Tokens of row b up to ends[b] are context; the block follows it. Positions at or beyond `limit`, or beyond a
        row's page table, get no slot.
        """
        ...

    def next_slots(
        self, positions: Tensor, page_tables: Tensor, page_size: int, limit: int, count: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Return the `count` positions after positions [B] and their slots, both [B * count], row by row.

        Beyond `limit` positions, or beyond a row's page table: position 0 and slot -1.
        """
        ...

    def ngram_drafts(
        self,
        history: TokenHistory,
        lookup: NgramLookup,
        newest: Tensor,
        positions: Tensor,
        max_lengths: Tensor,
        copies: Tensor,
        width: int,
    ) -> Tensor:
        """Return drafts [B, width] int32 that continue an earlier occurrence of the end of each text; -1: no token.

        newest [B] int32: the last token of each text, at positions [B] int32; max_lengths [B] int32: as of DecodeState.
        Rows without pages pad, and draft nothing.
        The longest n-gram wins. Among its occurrences it is the first in the window where the last accepted copy
        continues, else the latest. A copy that reaches the end of the text repeats itself.

        copies [B, 3] int32 is updated: the position that the draft was copied from, the length of the text, and the
        position where the last accepted copy continues; -1: none.
        """
        ...

    def record(self, run: Callable[[Any], None]) -> Any | None:
        """Run a function and record its operations, to run them again in one call; None: this cannot be recorded.

        The operations must read and write tensors that stay where they are. `run` gets a recorder, and calls its
        `end_depth(estimate, is_logprob)` after each token of a draft: [1] f32, its log-probability or the probability
        that it is accepted. The result is a function of `depths`, `least` and `shared_noise`. It runs all depths, or
        `depths` of them, up to the first after which the probability of all tokens so far is below `least`, and returns
        their number. shared_noise: tokens were sampled with the target's noise, which halves the probability that one
        is rejected. Its method `load(target, source, first)` fills a tensor with rows of another from `first` on.
        """
        ...

    def copy_kv(self, pages: Sequence[LayerPages], sources: Tensor, targets: Tensor) -> None:
        """Copy keys and values between slots, in order, in every layer: compacts the accepted path of a tree."""
        ...


def load(backend: str, threads: int | None = None, deterministic: bool = False, activations: str = "high") -> Kernels:
    """Import the backend `backend`.

    threads: of the host; None: unchanged.
    deterministic: batch-invariant kernels (`cpu` and `reference` always are).
    activations: beside quantized weights: high, fast, or auto (of `cpu`: by the instruction set; else high).
    """
    if backend == "cpu":
        from . import cpu
        from .cpu import fast_activations

        if threads is not None:
            cpu.set_threads(threads)
        fast = cpu.fast_by_default() if activations == "auto" else activations == "fast"
        return fast_activations if fast else cpu
    if threads is not None:
        torch.set_num_threads(threads)
    if backend == "reference":
        from . import reference

        return reference
    if backend == "cuda":
        from . import cuda
        from .cuda import batch_invariant, batch_invariant_fast
        from .cuda import fast_activations as cuda_fast

        if activations == "fast":
            return batch_invariant_fast if deterministic else cuda_fast
        return batch_invariant if deterministic else cuda
    raise ValueError(f"no kernels called `{backend}`: expected `cpu`, `cuda` or `reference`")
