"""DFlash and DSpark: heads that fill a block of mask tokens in one pass (models/block_head.py). Their options differ.

Blocks start at random tokens of the answers, many in a row of text, and do not see each other. Shapes: B rows of L
tokens, A blocks of a row, K tokens of a block, S drafted tokens of a block, H the hidden size, G key/value heads, D the
size of a head, U tokens that can be drafted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import UserError
from ...kernels.structures import AttentionRanges, OwnKeys
from ...models.block_head import evenly_spaced_layers
from ..data.pack import Pack
from ..losses import Loss, block_weights, dpace, score
from ..target import TargetInfo, TargetOutputs
from .base import DraftHead, DraftVocabulary, StepResult, Targets, check_at_least
from .layers import DecoderLayer, HeadMatrix, Norm, Rotary, attend, causal_ranges, layer_keys, layer_shape, make_lm_head

Factors = list[tuple[Tensor, Tensor]]  # pairs of states [R, H_i] and matrices [U, H_i], whose products add up to logits


@dataclass(frozen=True)
class Options:
    """Options of DSpark."""

    block: int = 8  # tokens of a block: the newest of the text, then masks
    layers: int = 3
    aux_layers: tuple[int, ...] = ()  # hidden states to read, entering these layers; default: one for each own layer
    mlp_width: int = 0  # 0: the target's
    mask: int | None = None  # the mask token; default: one that the target never writes
    from_anchor: bool = True  # each token of a block predicts the next one; else each mask predicts its own position
    markov_rank: int = 64  # rank of the logit bias by the previous token; 0: none
    confidence: bool = True  # train a head that predicts the acceptance rate of each drafted token
    draft_vocabulary: int = 0  # tokens that can be drafted: the ones that the target writes most often; 0: all
    head: HeadMatrix = "target"
    anchors: int = 128  # blocks per 1024 tokens
    short: float = 0.1  # fraction of the blocks that are cut at random, as the engine does when long drafts do not pay
    loss: Loss = "kl"
    weighting: Literal["decay", "dpace"] = "decay"  # of the drafted tokens: falling with depth, or D-PACE
    gamma: float = 4.0  # for decay: exp(-k / gamma)


@dataclass(frozen=True)
class DFlashOptions(Options):
    from_anchor: bool = False
    markov_rank: int = 0
    confidence: bool = False


@dataclass(frozen=True)
class BlockContext:
    """The text that the blocks of a step attend to."""

    context: Tensor  # [B, L, H]: fused hidden states of the text
    context_positions: Tensor  # [B, L]
    positions: Tensor  # [B, A * K]: of the blocks
    begins: Tensor  # [B, A * K] int32: the range of the text that each token sees
    ends: Tensor  # [B, A * K] int32
    sizes: Tensor  # [B, A * K] int32: tokens of its block
    block: int  # K


class BlockLayer(DecoderLayer):
    def forward(self, x: Tensor, view: BlockContext, rotary: Rotary) -> Tensor:
        """Run the layer on x [B, A * K, H]. The context has its own norm and skips the one of the layer."""
        attention, normed = self.self_attn, self.input_layernorm(x)
        query = attention.queries(normed, view.positions, rotary)
        keys, values = attention.keys_values(view.context, view.context_positions, rotary)  # [B, L, G, D] each
        own = attention.keys_values(normed, view.positions, rotary)  # [B, A * K, G, D] each
        own_keys, own_values = (part.view(len(part), -1, view.block, *part.shape[2:]) for part in own)
        kv = AttentionRanges(keys, values, view.begins, view.ends, OwnKeys(own_keys, own_values, view.sizes))
        x = x + attention.o_proj(attend(query, kv))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MarkovHead(nn.Module):
    """A low-rank logit bias by the previous token, initially zero."""

    def __init__(self, vocabulary: int, draft_vocabulary: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        self.markov_w2 = nn.Linear(rank, draft_vocabulary, bias=False)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.proj = nn.Linear(columns, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logit of the acceptance rate: [..., columns] to [...] f32."""
        logits: Tensor = self.proj(x)[..., 0].float()
        return logits


@dataclass(frozen=True)
class SampledBlocks:
    """The blocks of a step, and which of their drafted tokens count."""

    anchors: Tensor  # [B, A] int64: index in the row of the first token of each
    sizes: Tensor  # [B, A] int64: tokens of each
    before: Tensor  # [B, A, S] int64: index in the row of the token before each drafted one
    counted: Tensor  # [B, A, S] bool


class BlockDraftHead(DraftHead):
    prefix = "model."
    tap_scales: Tensor  # deprecated alias of aux_scales: saved states have this name
    unscaled_fc = False  # `fc` comes from a checkpoint and reads states as they are, until the scales are measured

    def __init__(self, target_info: TargetInfo, options: Options, positions: int) -> None:
        super().__init__()
        check(target_info, options)
        self.target_info, self.options = target_info, options
        self.aux_layers = options.aux_layers or default_aux_layers(target_info, options.layers)
        self.mask = rarest_token(target_info) if options.mask is None else options.mask
        self.undrafted = 0 if options.from_anchor else 1  # tokens at the start of a block that draft nothing
        self.drafts_per_block = options.block - self.undrafted  # S
        self.vocab = DraftVocabulary(target_info, options.draft_vocabulary)
        self.shape = layer_shape(target_info.config, options.mlp_width, head_norms=True)
        self._build(positions)
        self.to(target_info.torch_device)

    def _build(self, positions: int) -> None:
        options, shape = self.options, self.shape
        width, rank = shape.width, options.markov_rank
        self.rotary = Rotary(shape, positions + options.block)  # blocks may pass the end
        self.register_buffer("tap_scales", torch.zeros(len(self.aux_layers)))  # deprecated alias of aux_scales
        self.fc = nn.Linear(len(self.aux_layers) * width, width, bias=False)
        self.hidden_norm = Norm(width, shape.eps)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(options.layers))
        self.norm = Norm(width, shape.eps)
        # Initialised with the mean embedding: with tied embeddings, a row of the table would predict its own token.
        self.mask_embedding = nn.Parameter(self.target_info.embedding.detach().float().mean(0).cpu())
        vocabulary, draft_vocabulary = self.target_info.config.vocabulary, self.vocab.size
        self.markov_head = MarkovHead(vocabulary, draft_vocabulary, rank) if rank else None
        self.confidence_head = ConfidenceHead(width + rank) if options.confidence else None
        self.target_rows = self.vocab.select(self.target_info.lm_head).detach()  # [U, H]
        self.lm_head = make_lm_head(options.head, self.target_rows)

    @property
    def draft_ids(self) -> Tensor | None:
        return self.vocab.ids

    def forward(self, target_outputs: TargetOutputs) -> StepResult:
        pack = target_outputs.pack
        blocks = self.sample_positions(pack)
        states = self.states(target_outputs, blocks)[:, :, self.undrafted :].flatten(0, 2)  # [B * A * S, H]
        factors = self.factors(states, select_positions(pack.tokens, blocks.before).flatten())
        counted = blocks.counted.flatten(0, 1)  # [B * A, S]
        targets = self.vocab.targets(target_outputs, flat_index(blocks.before, pack.tokens.shape[1]))
        weights = self.weights(factors, targets, counted)
        scores = score(
            factors,
            targets.logits,
            weights.flatten(),
            self.options.loss,
            targets.logsumexp,
            target_rows=targets.rows,
        )
        loss = scores.loss / weights.sum().clamp(min=1e-6)
        if self.confidence_head is not None:
            confidence, overlap = self.confidence_logits(factors), scores.overlap.clamp(0, 1)
            errors = functional.binary_cross_entropy_with_logits(confidence, overlap, reduction="none")
            loss = loss + (errors * counted.flatten()).sum() / counted.sum().clamp(min=1)
        return self.vocab.result(loss, scores, targets, counted)

    def sample_positions(self, pack: Pack) -> SampledBlocks:
        """Sample where blocks start: before a token of an answer. Rows with few such tokens have idle blocks."""
        options, (rows, length) = self.options, pack.tokens.shape
        count = min(max(length * options.anchors // 1024, 1), length)
        next_is_answer = (pack.documents[:, 1:] == pack.documents[:, :-1]) & pack.answered[:, 1:]
        usable = functional.pad(next_is_answer, (0, 1))  # [B, L]: the next token is there to be drafted
        random = torch.rand(rows, length + 2 * count, device=pack.tokens.device)
        order, cut, part = torch.split(random, [length, count, count], 1)
        # Sorted: neighbouring blocks read nearly the same text, which the kernel then loads once.
        anchors = order.masked_fill(~usable, -1.0).topk(count).indices.sort(1).values  # [B, A]
        least = 1 + self.undrafted
        shorter = least + (part * (options.block - least)).long()
        sizes = torch.where(cut < options.short, shorter, options.block)  # [B, A]
        depth = torch.arange(self.drafts_per_block, device=anchors.device)  # [S]
        drafted = anchors[..., None] + 1 + depth  # [B, A, S]
        counted = (drafted < length) & (depth < sizes[..., None] - self.undrafted)
        counted &= usable.gather(1, anchors)[..., None]
        drafted = drafted.clamp(max=length - 1)
        counted &= select_positions(pack.answered, drafted)
        counted &= select_positions(pack.documents, drafted) == pack.documents.gather(1, anchors)[..., None]
        return SampledBlocks(anchors, sizes, drafted - 1, counted)

    def states(self, target_outputs: TargetOutputs, blocks: SampledBlocks) -> Tensor:
        """Run the layers on all blocks: [B, A, K, H], after the final norm."""
        pack, size = target_outputs.pack, self.options.block
        tokens = functional.pad(pack.tokens.gather(1, blocks.anchors)[..., None], (0, size - 1), value=self.mask)
        tokens = tokens.flatten(1)  # [B, A * K]
        embedded = functional.embedding(tokens, self.target_info.embedding)
        # A mask token in the text gets the mask embedding too, as in the engine.
        x = torch.where((tokens == self.mask)[..., None], self.mask_embedding, embedded)  # [B, A * K, H]
        view = self.view(target_outputs, blocks)
        for layer in self.layers:
            x = layer(x, view, self.rotary)
        states: Tensor = self.norm(x)
        return states.view(*blocks.anchors.shape, size, -1)

    def view(self, target_outputs: TargetOutputs, blocks: SampledBlocks) -> BlockContext:
        pack, size = target_outputs.pack, self.options.block
        features = torch.cat([target_outputs.aux_states[layer] for layer in self.aux_layers], -1)
        self._measure_scales(features, pack)
        context = self.hidden_norm(functional.linear(features, self.scaled_fc()))  # [B, L, H]
        within = torch.arange(size, device=features.device)
        begins, ends = (bound.gather(1, blocks.anchors) for bound in causal_ranges(pack.documents))  # [B, A] each
        positions = pack.positions.gather(1, blocks.anchors)[..., None] + within  # [B, A, K]
        return BlockContext(
            context=context,
            context_positions=pack.positions,
            positions=positions.flatten(1),
            begins=begins.repeat_interleave(size, 1),
            ends=(ends - 1).clamp(min=0).repeat_interleave(size, 1),  # the anchor is part of the block
            sizes=blocks.sizes.int().repeat_interleave(size, 1),
            block=size,
        )

    @property
    def aux_scales(self) -> Tensor:
        """Return the RMS of each aux hidden state [aux layers]; 0: not measured yet."""
        return self.tap_scales  # deprecated alias

    def _measure_scales(self, features: Tensor, pack: Pack) -> None:
        """Set the scales in the first step, by the median: the first token of a text has far larger states."""
        by_layer = features.detach().float().view(*pack.tokens.shape, len(self.aux_layers), -1)
        rms = by_layer.square().mean(-1).sqrt()  # [B, L, aux layers]
        rms = rms.masked_fill((pack.documents < 0)[..., None], torch.nan)
        medians = torch.stack([layer.nanmedian() for layer in rms.unbind(-1)]).nan_to_num(1.0).clamp(min=1e-6)
        self.aux_scales.copy_(torch.where(self.aux_scales > 0, self.aux_scales, medians))
        if self.unscaled_fc:
            with torch.no_grad():
                self.fc.weight.mul_(self.aux_scales.repeat_interleave(self.shape.width))
            self.unscaled_fc = False

    def scaled_fc(self) -> Tensor:
        """Return the matrix over the aux hidden states [H, aux layers * E]; the parameter reads states of RMS 1."""
        scales = torch.where(self.aux_scales > 0, self.aux_scales, 1.0)
        return self.fc.weight / scales.repeat_interleave(self.shape.width)

    def factors(self, states: Tensor, tokens: Tensor) -> Factors:
        """Return the factors of the logits for states [R, H] and the tokens before the drafted ones [R]."""
        factors = [(states, self.target_rows if self.lm_head is None else self.lm_head.weight)]
        if self.markov_head is not None:
            factors.append((self.markov_head.markov_w1(tokens), self.markov_head.markov_w2.weight))
        return factors

    def weights(self, factors: Factors, targets: Targets, counted: Tensor) -> Tensor:
        """Return the weight of each drafted token in the loss [B * A, S]."""
        if self.options.weighting == "decay":
            return counted * block_weights(self.drafts_per_block, self.options.gamma, counted.device)
        with torch.no_grad():
            ones = counted.flatten().float()
            scores = score(factors, targets.logits, ones, "tv", targets.logsumexp, target_rows=targets.rows)
        return counted * dpace(scores.overlap.view_as(counted) * counted)

    def confidence_logits(self, factors: Factors) -> Tensor:
        """Predict the acceptance rates [R] as logits. Detached: the confidence loss must not change the drafts."""
        assert self.confidence_head is not None
        logits: Tensor = self.confidence_head(torch.cat([states.detach() for states, _ in factors], -1))
        return logits

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        return super().checkpoint_tensors() | {self.checkpoint_name("fc.weight"): self.scaled_fc().detach().cpu()}

    def checkpoint_name(self, parameter: str) -> str:
        return parameter if parameter.startswith("lm_head.") else super().checkpoint_name(parameter)

    def on_loaded(self) -> None:
        self.unscaled_fc = True

    def checkpoint_config(self) -> dict[str, Any]:
        options, shape, target = self.options, self.shape, self.target_info.config
        config: dict[str, Any] = {
            "architectures": ["DSparkDraftModel" if self.method == "dspark" else "DFlashDraftModel"],
            **layer_keys(shape, options.layers, target),
            "model_type": "qwen3",
            "draft_vocab_size": self.vocab.size,
            "layer_types": ["full_attention"] * options.layers,
            "block_size": options.block,
            "mask_token_id": self.mask,
            "sample_from_anchor": options.from_anchor,
            "aux_hidden_state_layer_ids": list(self.aux_layers),
            "num_target_layers": target.layers,
        }
        if self.method == "dspark":
            config |= {"markov_rank": options.markov_rank, "markov_head_type": "vanilla"}
            config |= {"enable_confidence_head": options.confidence}
            config |= {"confidence_head_with_markov": options.confidence and options.markov_rank > 0}
        return config


class DSparkDraftHead(BlockDraftHead):
    method = "dspark"


class DFlashDraftHead(BlockDraftHead):
    method = "dflash"

    def __init__(self, target_info: TargetInfo, options: Options, positions: int) -> None:
        if options.markov_rank or options.confidence:
            name = "markov_rank" if options.markov_rank else "confidence"
            raise UserError(
                f"`{name}` is an option of DSpark, which DFlash does not have: train `dspark`, or leave it out"
            )
        super().__init__(target_info, options, positions)


def select_positions(values: Tensor, index: Tensor) -> Tensor:
    """Select values [B, L] at index [B, A, S]."""
    return values.gather(1, index.flatten(1)).view_as(index)


def flat_index(index: Tensor, length: int) -> Tensor:
    """Turn an index in rows [B, ...] into an index in the flattened pack [B * ...]."""
    rows = torch.arange(len(index), device=index.device).view(-1, *[1] * (index.dim() - 1))
    return (rows * length + index).flatten()


def default_aux_layers(target_info: TargetInfo, count: int) -> tuple[int, ...]:
    """Return one aux layer for each layer of the head, as z-lab chooses them; the model's if it has too few layers."""
    layers = evenly_spaced_layers(count, target_info.config.layers)
    rising = all(before < after for before, after in pairwise(layers))
    valid = rising and layers[0] >= 0 and layers[-1] <= target_info.config.layers
    return layers if valid else target_info.aux_layers


def rarest_token(target_info: TargetInfo) -> int:
    """Return the token that the target writes least often, the last of those; never an end token."""
    counts = target_info.token_counts.tolist()
    tokens = [token for token in range(len(counts)) if token not in target_info.config.end_tokens]
    return min(tokens, key=lambda token: (counts[token], -token))


def check(target_info: TargetInfo, options: Options) -> None:
    least = 1 if options.from_anchor else 2
    if options.block < least:
        raise UserError(f"`block` is {options.block}, which leaves no token to draft: pass {least} or more")
    check_at_least(1, layers=options.layers, anchors=options.anchors)
    check_at_least(0, mlp_width=options.mlp_width, markov_rank=options.markov_rank)
    if not 0 <= options.short <= 1:
        raise UserError(f"`short` is {options.short}, but it is a fraction of the blocks: pass a number from 0 to 1")
    if options.gamma <= 0:
        raise UserError(f"`gamma` is {options.gamma}: pass a number above 0")
    layers = target_info.config.layers
    beyond = [layer for layer in options.aux_layers if not 0 <= layer <= layers]
    if beyond:
        raise UserError(
            f"`aux_layers` names the state entering layer {beyond[0]}, but the target has {layers} layers: "
            f"pass numbers from 0 to {layers}"
        )
    if options.mask is not None and not 0 <= options.mask < target_info.config.vocabulary:
        raise UserError(
            f"`mask` is {options.mask}, but the target has {target_info.config.vocabulary} tokens: pass one of them"
        )
