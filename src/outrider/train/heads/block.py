"""Students that fill a block of masks in one pass, DFlash and DSpark (models/blocks.py): they differ in their options.

Blocks begin at random tokens of the answers, many in a row of text, and do not see each other. Letters: A blocks of a
row, K tokens of a block, S guesses of a block, H the width, U tokens that can be drafted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import UserError
from ...kernels.attention_ranges import AttentionRanges, OwnKeys
from ...models.block_head import evenly_spaced_layers
from ..data.pack import Pack
from ..losses import Loss, block_weights, dpace, score
from ..target import Lesson, Subject
from .base import Aims, Report, Student, Words, check_at_least
from .layers import DecoderLayer, HeadMatrix, Norm, Turning, attend, causal, layer_keys, layer_shape, own_head


@dataclass(frozen=True)
class View:
    """What the blocks of a lesson see."""

    context: Tensor  # [B, L, H]: the text
    context_places: Tensor  # [B, L]
    places: Tensor  # [B, A * K]: of the blocks
    begins: Tensor  # [B, A * K] int32: the text that each token sees
    ends: Tensor  # [B, A * K] int32
    sizes: Tensor  # [B, A * K] int32: tokens of its block
    block: int  # K


class Layer(DecoderLayer):
    def forward(self, x: Tensor, view: View, turning: Turning) -> Tensor:
        """x [B, A * K, H]. The text passes no norm of the layer: it has one of its own."""
        attention, normed = self.self_attn, self.input_layernorm(x)
        query = attention.queries(normed, view.places, turning)
        keys, values = attention.entries(view.context, view.context_places, turning)  # [B, L, G, D] each
        own = attention.entries(normed, view.places, turning)  # [B, A * K, G, D] each
        own_keys, own_values = (each.view(len(each), -1, view.block, *each.shape[2:]) for each in own)
        sight = AttentionRanges(keys, values, view.begins, view.ends, OwnKeys(own_keys, own_values, view.sizes))
        mixed = attend(query, sight)
        x = x + attention.o_proj(mixed)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MarkovHead(nn.Module):
    """What the token before adds to the logits. It begins with nothing."""

    def __init__(self, vocabulary: int, drafted: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.proj = nn.Linear(columns, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., columns] to [...] f32: log odds."""
        found: Tensor = self.proj(x)[..., 0].float()
        return found


@dataclass(frozen=True)
class Options:
    """Of DSpark."""

    block: int = 8  # tokens of a block: the newest of the text, then masks
    layers: int = 3
    taps: tuple[int, ...] = ()  # states to read, entering these layers of the target; default: one for each layer
    mlp_width: int = 0  # 0: the target's
    mask: int | None = None  # the mask token; default: one that the target never writes
    from_anchor: bool = True  # each token of a block guesses the one after it; else each mask the one in its place
    markov_rank: int = 64  # of the bias by the token before; 0: none
    confidence: bool = True  # learn how likely each guess is kept
    draft_vocabulary: int = 0  # tokens that can be drafted, those that the target writes most often; 0: all
    head: HeadMatrix = "target"
    anchors: int = 128  # blocks in 1024 tokens
    short: float = 0.1  # share of the blocks that are cut at random, as the engine does when long drafts do not pay
    loss: Loss = "kl"
    weighting: Literal["decay", "dpace"] = "decay"  # of the guesses of a block: less and less, or what hangs on each
    gamma: float = 4.0  # for decay: exp(-k / gamma)


@dataclass(frozen=True)
class DFlashOptions(Options):
    from_anchor: bool = False
    markov_rank: int = 0
    confidence: bool = False


@dataclass(frozen=True)
class Blocks:
    """Where blocks stand in their rows, and which of their guesses count."""

    anchors: Tensor  # [B, A] int64: the token that begins each
    sizes: Tensor  # [B, A] int64: its tokens
    before: Tensor  # [B, A, S] int64: the token before each guess
    counted: Tensor  # [B, A, S] bool


class BlockStudent(Student):
    prefix = "model."
    tap_scales: Tensor  # [taps]: how large each of the tapped states usually is; 0: nobody looked yet
    fused = False  # `fc` comes from a checkpoint: it reads states as they are until somebody looks

    def __init__(self, subject: Subject, options: Options, positions: int) -> None:
        super().__init__()
        check(subject, options)
        self.subject, self.options = subject, options
        self.taps = options.taps or usual_taps(subject, options.layers)
        self.mask = rarest(subject) if options.mask is None else options.mask
        self.unsaid = 0 if options.from_anchor else 1  # tokens at the beginning of a block that guess nothing
        self.guesses = options.block - self.unsaid  # S
        self.words = Words(subject, options.draft_vocabulary)
        self.shape = layer_shape(subject.config, options.mlp_width, head_norms=True)
        self._build(positions)
        self.to(subject.torch_device)

    def _build(self, positions: int) -> None:
        options, shape = self.options, self.shape
        width, rank = shape.width, options.markov_rank
        self.turning = Turning(shape.rope, shape.head_dim, positions + options.block)  # blocks may pass the end
        self.register_buffer("tap_scales", torch.zeros(len(self.taps)))
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        self.hidden_norm = Norm(width, shape.eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(options.layers))
        self.norm = Norm(width, shape.eps)
        # The middle of all tokens says nothing of any: where embedding and head are one, a row of it would say itself.
        self.mask_embedding = nn.Parameter(self.subject.embedding.detach().float().mean(0).cpu())
        vocabulary, drafted = self.subject.config.vocabulary, self.words.count
        self.markov_head = MarkovHead(vocabulary, drafted, rank) if rank else None
        self.confidence_head = ConfidenceHead(width + rank) if options.confidence else None
        self.target_rows = self.words.rows(self.subject.head).detach()  # [U, H]
        self.lm_head = own_head(options.head, self.target_rows)

    @property
    def drafted(self) -> Tensor | None:
        return self.words.ids

    def forward(self, lesson: Lesson) -> Report:
        blocks = self.sample_positions(lesson.pack)
        states = self.states(lesson, blocks)[:, :, self.unsaid :].flatten(0, 2)  # [B * A * S, H]
        parts = self.parts(states, picked(lesson.pack.tokens, blocks.before).flatten())
        counted = blocks.counted.flatten(0, 1)  # [B * A, S]
        aims = self.words.aims(lesson, in_lesson(blocks.before, lesson.pack.tokens.shape[1]))
        weights = self.weights(parts, aims, counted)
        scores = score(parts, aims.wanted, weights.flatten(), self.options.loss, aims.whole, places=aims.places)
        loss = scores.loss / weights.sum().clamp(min=1e-6)
        if self.confidence_head is not None:
            sure = self.sure(parts)
            missed = functional.binary_cross_entropy_with_logits(sure, scores.overlap.clamp(0, 1), reduction="none")
            loss = loss + (missed * counted.flatten()).sum() / counted.sum().clamp(min=1)
        return self.words.report(loss, scores, aims, counted)

    def sample_positions(self, pack: Pack) -> Blocks:
        """Draw where blocks begin: before a token that the target wrote. Rows with few of those have idle blocks."""
        options, (rows, length) = self.options, pack.tokens.shape
        count = min(max(length * options.anchors // 1024, 1), length)
        follows = (pack.documents[:, 1:] == pack.documents[:, :-1]) & pack.answered[:, 1:]
        fits = functional.pad(follows, (0, 1))  # [B, L]: the token after it is there to be guessed
        drawn = torch.rand(rows, length + 2 * count, device=pack.tokens.device)
        order, cut, part = torch.split(drawn, [length, count, count], 1)
        # Neighbours see nearly the same text, which is then read once for all of them.
        anchors = order.masked_fill(~fits, -1.0).topk(count).indices.sort(1).values  # [B, A]
        least = 1 + self.unsaid
        shorter = least + (part * (options.block - least)).long()
        sizes = torch.where(cut < options.short, shorter, options.block)  # [B, A]
        ahead = torch.arange(self.guesses, device=anchors.device)  # [S]
        guessed = anchors[..., None] + 1 + ahead  # [B, A, S]
        counted = (guessed < length) & (ahead < sizes[..., None] - self.unsaid) & fits.gather(1, anchors)[..., None]
        guessed = guessed.clamp(max=length - 1)
        counted &= picked(pack.answered, guessed)
        counted &= picked(pack.documents, guessed) == pack.documents.gather(1, anchors)[..., None]
        return Blocks(anchors, sizes, guessed - 1, counted)

    def states(self, lesson: Lesson, blocks: Blocks) -> Tensor:
        """[B, A, K, H], after the last norm."""
        pack, size = lesson.pack, self.options.block
        tokens = functional.pad(pack.tokens.gather(1, blocks.anchors)[..., None], (0, size - 1), value=self.mask)
        tokens = tokens.flatten(1)  # [B, A * K]
        embedded = functional.embedding(tokens, self.subject.embedding)
        # A text may hold the mask token: the engine takes it for a mask.
        x = torch.where((tokens == self.mask)[..., None], self.mask_embedding, embedded)  # [B, A * K, H]
        view = self.view(lesson, blocks)
        for layer in self.layers:
            x = layer(x, view, self.turning)
        states: Tensor = self.norm(x)
        return states.view(*blocks.anchors.shape, size, -1)

    def view(self, lesson: Lesson, blocks: Blocks) -> View:
        pack, size = lesson.pack, self.options.block
        features = torch.cat([lesson.states[tap] for tap in self.taps], -1)  # [B, L, taps * E]
        self._look(features, pack)
        context = self.hidden_norm(functional.linear(features, self.fusing()))  # [B, L, H]
        within = torch.arange(size, device=features.device)
        begins, ends = (each.gather(1, blocks.anchors) for each in causal(pack.documents))  # [B, A] each
        places = pack.positions.gather(1, blocks.anchors)[..., None] + within  # [B, A, K]
        return View(
            context=context,
            context_places=pack.positions,
            places=places.flatten(1),
            begins=begins.repeat_interleave(size, 1),
            ends=(ends - 1).clamp(min=0).repeat_interleave(size, 1),  # an anchor is in its block
            sizes=blocks.sizes.int().repeat_interleave(size, 1),
            block=size,
        )

    def _look(self, features: Tensor, pack: Pack) -> None:
        """Settle the scales by the first lesson. The middle: the first token of a text has states beyond all others."""
        apart = features.detach().float().view(*pack.tokens.shape, len(self.taps), -1)
        sizes = apart.square().mean(-1).sqrt()  # [B, L, taps]
        known = sizes.masked_fill((pack.documents < 0)[..., None], torch.nan)
        found = torch.stack([each.nanmedian() for each in known.unbind(-1)]).nan_to_num(1.0).clamp(min=1e-6)
        self.tap_scales.copy_(torch.where(self.tap_scales > 0, self.tap_scales, found))
        if self.fused:
            with torch.no_grad():
                self.fc.weight.mul_(self.tap_scales.repeat_interleave(self.shape.width))
            self.fused = False

    def fusing(self) -> Tensor:
        """The matrix over the tapped states [H, taps * E]: what is learnt reads states of one size."""
        scales = torch.where(self.tap_scales > 0, self.tap_scales, 1.0)
        return self.fc.weight / scales.repeat_interleave(self.shape.width)

    def parts(self, states: Tensor, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        """States [R, H] and the tokens before their guesses [R] as pairs whose products add up to the logits."""
        parts = [(states, self.target_rows if self.lm_head is None else self.lm_head.weight)]
        if self.markov_head is not None:
            parts.append((self.markov_head.markov_w1(tokens), self.markov_head.markov_w2.weight))
        return parts

    def weights(self, parts: list[tuple[Tensor, Tensor]], aims: Aims, counted: Tensor) -> Tensor:
        """How much each guess matters [B * A, S]."""
        if self.options.weighting == "decay":
            return counted * block_weights(self.guesses, self.options.gamma, counted.device)
        with torch.no_grad():
            once = counted.flatten().float()
            kept = score(parts, aims.wanted, once, "tv", aims.whole, places=aims.places).overlap
        return counted * dpace(kept.view_as(counted) * counted)

    def sure(self, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Log odds that each guess is kept [R]. What a student says of its guesses must not change them."""
        assert self.confidence_head is not None
        odds: Tensor = self.confidence_head(torch.cat([states.detach() for states, _ in parts], -1))
        return odds

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        return super().checkpoint_tensors() | {self.checkpoint_name("fc.weight"): self.fusing().detach().cpu()}

    def checkpoint_name(self, parameter: str) -> str:
        return parameter if parameter.startswith("lm_head.") else super().checkpoint_name(parameter)

    def taken(self) -> None:
        self.fused = True

    def checkpoint_config(self) -> dict[str, Any]:
        options, shape, target = self.options, self.shape, self.subject.config
        config: dict[str, Any] = {
            "architectures": ["DSparkDraftModel" if self.method == "dspark" else "DFlashDraftModel"],
            **layer_keys(shape, options.layers, target),
            "model_type": "qwen3",
            "draft_vocab_size": self.words.count,
            "layer_types": ["full_attention"] * options.layers,
            "block_size": options.block,
            "mask_token_id": self.mask,
            "sample_from_anchor": options.from_anchor,
            "aux_hidden_state_layer_ids": list(self.taps),
            "num_target_layers": target.layers,
        }
        if self.method == "dspark":
            config |= {"markov_rank": options.markov_rank, "markov_head_type": "vanilla"}
            config |= {"enable_confidence_head": options.confidence}
            config |= {"confidence_head_with_markov": options.confidence and options.markov_rank > 0}
        return config


class DSparkStudent(BlockStudent):
    method = "dspark"


class DFlashStudent(BlockStudent):
    method = "dflash"

    def __init__(self, subject: Subject, options: Options, positions: int) -> None:
        if options.markov_rank or options.confidence:
            name = "markov_rank" if options.markov_rank else "confidence"
            raise UserError(f"`{name}` is of DSpark, and DFlash has none: train `dspark`, or leave it out")
        super().__init__(subject, options, positions)


def picked(values: Tensor, at: Tensor) -> Tensor:
    """Of values [B, L] those at [B, A, S]."""
    return values.gather(1, at.flatten(1)).view_as(at)


def in_lesson(at: Tensor, length: int) -> Tensor:
    """Places in rows [B, ...] as places among all tokens of a lesson [B * ...]."""
    rows = torch.arange(len(at), device=at.device).view(-1, *[1] * (at.dim() - 1))
    return (rows * length + at).flatten()


def usual_taps(subject: Subject, count: int) -> tuple[int, ...]:
    """One state for each layer of the student, as z-lab chooses them; the model's own where it has too few layers."""
    taps = evenly_spaced_layers(count, subject.config.layers)
    rising = all(before < after for before, after in pairwise(taps))
    return taps if rising and taps[0] >= 0 and taps[-1] <= subject.config.layers else subject.taps


def rarest(subject: Subject) -> int:
    """The token that the target writes least often, the last of those; it does not end texts."""
    counts = subject.counts.tolist()
    tokens = [token for token in range(len(counts)) if token not in subject.config.end_tokens]
    return min(tokens, key=lambda token: (counts[token], -token))


def check(subject: Subject, options: Options) -> None:
    least = 1 if options.from_anchor else 2
    if options.block < least:
        raise UserError(f"`block` is {options.block}, which leaves nothing to guess: pass {least} or more")
    check_at_least(1, layers=options.layers, anchors=options.anchors)
    check_at_least(0, mlp_width=options.mlp_width, markov_rank=options.markov_rank)
    if not 0 <= options.short <= 1:
        raise UserError(f"`short` is {options.short}: it is a share of the blocks, pass a number from 0 to 1")
    if options.gamma <= 0:
        raise UserError(f"`gamma` is {options.gamma}: pass a number above 0")
    beyond = [tap for tap in options.taps if not 0 <= tap <= subject.config.layers]
    if beyond:
        raise UserError(
            f"`taps` names the state entering layer {beyond[0]}, but the target has {subject.config.layers} layers: "
            "pass numbers from 0 to that"
        )
    if options.mask is not None and not 0 <= options.mask < subject.config.vocabulary:
        raise UserError(
            f"`mask` is {options.mask}, but the target has {subject.config.vocabulary} tokens: pass one of them"
        )
