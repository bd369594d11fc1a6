"""Every operation that the engine asks of a device. A backend is a package that defines them all.

Letters in shapes: T tokens of a step, B rows (requests), R rows of logits, E model width, H query heads,
G key/value heads, D head width, N outputs, K inputs, V vocabulary, P pages in a table, S slots in a page.
Activations and logits are fp32 on the CPU; ids, positions and indices are int32 everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from .structures import (
    AttentionWeights,
    Batch,
    BlockInputs,
    ChildTokens,
    DraftInputs,
    LayerPages,
    LogitsProcessors,
    MlpWeights,
    NextTokens,
    SamplingMetadata,
    TopLogprobs,
    VerifyInputs,
    VerifyOutput,
    Weight,
)


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

    def layer_stack(self, layers: Sequence[tuple[Any, Any]], pages: Sequence[LayerPages]) -> Any:
        """Attention and MLP layers with their storage, for run_stack: one call where there would be three a layer."""
        ...

    def run_layers(self, x: Tensor, layer_stack: Any, batch: Batch) -> None:
        """x [T, E] through project_qkv, attend and mlp of each layer in turn."""
        ...

    def process_logits(self, logits: Tensor, processors: LogitsProcessors) -> None:
        """Penalties, biases, bans, in place on [R, V]."""
        ...

    def mask_logits(self, logits: Tensor, masks: Tensor, rows: Tensor) -> None:
        """Row rows[m] of logits [R, V] becomes -inf at tokens whose bit in masks [M, ceil(V / 32)] is 0, in place.

        rows [M] int32, each at most once. Token t is bit t % 32, from the lowest, of word t // 32, int32.
        """
        ...

    def sample(self, logits: Tensor, sampling: SamplingMetadata, out: Tensor | None = None) -> Tensor:
        """argmax of logits / temperature + Gumbel noise over the kept tokens: [R] int32, in `out` if that is given.

        Kept: the top_k largest, of these the fewest whose probability reaches top_p, of these all with at least
        min_p times the largest probability. Order: by logit, then by id. Noise: philox.gumbel, keyed by
        (seed, position, token).
        """
        ...

    def sample_children(self, logits: Tensor, sampling: SamplingMetadata, count: int) -> ChildTokens:
        """The `count` best tokens of each row where `sample` takes the best: with noise, draws without replacement.

        Probabilities are softmax(logits / temperature), with temperature 1 in place of 0; what truncation leaves out
        counts in them, and is not taken.
        """
        ...

    def top_logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> TopLogprobs:
        """Log-softmax of [R, V] at `tokens`, with the `count` likeliest."""
        ...

    def expand_sampling(self, sampling: SamplingMetadata, drafts: VerifyInputs) -> SamplingMetadata:
        """A choice for each request [B] becomes one for each logit row [R]; positions grow with the depth in it."""
        ...

    def verify_exact(self, sampled: Tensor, drafts: VerifyInputs) -> VerifyOutput:
        """Follow the drafted tokens that equal the target's own choice, sampled [R] int32, in the row before them."""
        ...

    def verify_synthetic(
        self, sampled: Tensor, drafts: VerifyInputs, rates: Tensor, sampling: SamplingMetadata
    ) -> VerifyOutput:
        """Keep drafted tokens by coin instead: at depth i with probability rates[i] [width] f32, given depth i - 1.

        Coins: philox stream ACCEPT. For measuring; the text is not the target's. The first child is the one followed.
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

    def next_tokens(
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

    def next_slots(
        self, positions: Tensor, page_tables: Tensor, page_size: int, limit: int, count: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Draft steps on: the `count` positions after positions [B], and their slots, both [B * count] row by row.

        Beyond `limit` positions, or beyond a row's page table: 0 and -1, nowhere.
        """
        ...

    def copy_kv(self, pages: Sequence[LayerPages], sources: Tensor, targets: Tensor) -> None:
        """Copy keys and values from slots to slots, in order, in every layer: the kept path of a tree closes up."""
        ...
