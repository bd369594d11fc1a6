"""A small Llama that learns to write as the target does, and then drafts for it: a model of its own, tokens in, tokens
out. Letters: N places of a lesson that are learnt from, H the width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import UserError
from ..data.pack import Pack
from ..losses import Loss, score
from ..target import Lesson, Subject
from .autoregressive import Layer, Memory
from .base import Report, Student, Words, check_at_least, check_share
from .layers import LayerShape, Norm, Turning, causal, first_rope, layer_keys, layer_shape, narrow


@dataclass(frozen=True)
class Options:
    draft_vocabulary: int = 0  # tokens that it knows, those that the target writes most often; 0: all
    copied: tuple[int, ...] = ()  # its layers begin as these of the target, and have their shape
    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    mlp_width: int = 768
    share: float = 0.5  # of the places of a lesson that are learnt from
    loss: Loss = "kl"
    spread: float = 0.02  # the size of the first weights
    rows: int = 4_096  # logits that are there at a time
    seed: int = 0  # of the first weights; which places are drawn is up to torch's own


class DraftModelStudent(Student):
    method = "draft_model"
    taps = ()
    prefix = "model."
    read: Tensor | None  # [V]: what each of the target's tokens is among its own; None: the same

    def __init__(self, subject: Subject, options: Options, positions: int) -> None:
        super().__init__()
        check(options)
        self.subject, self.options = subject, options
        self.words = Words(subject, options.draft_vocabulary)
        self.register_buffer("read", known_as(self.words, subject.counts), False)
        self.shape = shape_of(subject, options)
        self.turning = Turning(self.shape.rope, self.shape.head_dim, positions)
        table = subject.embedding.detach() / subject.config.embedding_scale
        table = self.words.rows(table if options.copied else words_of(subject, options))
        self.embed_tokens = nn.Embedding(len(table), self.shape.width, _weight=table.clone())
        self.layers = nn.ModuleList(Layer(self.shape) for _ in range(len(options.copied) or options.layers))
        self.norm = Norm(self.shape.width, self.shape.eps)
        if options.copied:
            begin_as(self, subject, options.copied)
        else:
            begin(self.layers, options)
        self.to(subject.torch_device)

    @property
    def drafted(self) -> Tensor | None:
        return self.words.ids

    def forward(self, lesson: Lesson) -> Report:
        at, counted = self.sample_positions(lesson.pack)
        aims = self.words.aims(lesson, at)
        states = self.norm(self.states(lesson.pack).flatten(0, 1)[at])  # [N, H]
        parts, weights = [(states, self.embed_tokens.weight)], counted.float().flatten()
        scores = score(parts, aims.wanted, weights, self.options.loss, aims.whole, self.options.rows, aims.places)
        return self.words.report(scores.loss / weights.sum().clamp(min=1), scores, aims, counted)

    def sample_positions(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Draw places to learn from among all B * L [N], as many whatever the pack; which of them count [N, 1] bool."""
        after = functional.pad(pack.documents, (0, 1), value=-1)[:, 1:]
        guessed = (functional.pad(pack.answered, (0, 1))[:, 1:] & (after == pack.documents)).flatten()  # [B * L]
        count = max(round(self.options.share * len(guessed)), 1)
        at = torch.rand(len(guessed), device=guessed.device).masked_fill(~guessed, -1.0).topk(count).indices
        return at, guessed[at, None]

    def states(self, pack: Pack) -> Tensor:
        """[B, L, H], before the last norm."""
        seen = causal(pack.documents)
        x: Tensor = self.embed_tokens(pack.tokens if self.read is None else self.read[pack.tokens])
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x = layer(x, narrow(layer.input_layernorm(x)), pack.positions, self.turning, Memory(seen))
        return x

    def logits(self, pack: Pack) -> Tensor:
        """[B, L, U]."""
        return functional.linear(self.norm(self.states(pack)), self.embed_tokens.weight)

    def checkpoint_config(self) -> dict[str, Any]:
        subject, target = self.subject, self.subject.config
        ends = list(target.end_tokens if self.read is None else self.read[list(target.end_tokens)].tolist())
        unknown = {} if self.words.ids is None else {"unknown_token_id": least_written(self.words.ids, subject.counts)}
        return {
            "architectures": ["LlamaForCausalLM"],
            **layer_keys(self.shape, len(self.layers), target),
            "vocab_size": self.words.count,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            **unknown,
            **({"eos_token_id": ends} if ends else {}),
        }


def known_as(words: Words, counts: Tensor) -> Tensor | None:
    """What it reads for each of the target's tokens: [V]; None: just that."""
    if words.ids is None:
        return None
    known = torch.full(counts.shape, least_written(words.ids, counts), device=words.ids.device)
    known[words.ids] = torch.arange(words.count, device=words.ids.device)
    return known


def least_written(ids: Tensor, counts: Tensor) -> int:
    """Which of its words stands for all that it does not know, too: the one that it will miss least."""
    return int(counts.to(ids.device)[ids].argmin())


def shape_of(subject: Subject, options: Options) -> LayerShape:
    """A layer that turns as the target's first that turns."""
    if options.copied:
        return layer_shape(subject.config, 0, head_norms=False)
    return LayerShape(
        width=options.width,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.width // options.heads,
        mlp_width=options.mlp_width,
        eps=subject.config.eps,
        rope=first_rope(subject.config),
    )


def words_of(subject: Subject, options: Options) -> Tensor:
    """The target's embedding in fewer dimensions, those in which its words differ most: [V, H].

    What all words have in common is left out: it moves all logits alike. Words count by the root of how often they are
    written, so that those that nobody writes do not decide.
    """
    table = subject.embedding.detach().float()
    often = (subject.counts.to(table.device).float() + 1).sqrt()[:, None]  # [V, 1]
    table = table - (often * table).sum(0) / often.sum()
    spread = (often * table).t() @ table  # [E, E]
    _, directions = torch.linalg.eigh(spread.double().cpu())  # rising
    kept = directions.flip(-1)[:, : options.width].to(table)  # [E, H or E]
    found = table @ (kept * kept.gather(0, kept.abs().argmax(0, keepdim=True)).sign())  # one sign on every machine
    found = found * (options.spread / found.square().mean().sqrt().clamp(min=1e-12))
    missing = options.width - found.shape[1]
    generator = torch.Generator().manual_seed(options.seed)
    drawn = options.spread * torch.randn(len(found), missing, generator=generator)
    return torch.cat([found, drawn.to(found.device)], -1)


@torch.no_grad()
def begin_as(student: DraftModelStudent, subject: Subject, copied: tuple[int, ...]) -> None:
    """The target's layers of these numbers, one after the other, and its last norm."""
    target = subject.config
    beyond = [number for number in copied if not 0 <= number < target.layers]
    if beyond:
        raise UserError(f"`copied` names layer {beyond[0]}, but the target has {target.layers}, counted from 0")
    if target.head_norms or target.qkv_bias or target.output_bias or target.mlp_bias or target.sandwich_norms:
        raise UserError(f"`copied` needs a target with layers as Llama has them, `{subject.model}` has more in them")
    student.norm.weight.copy_(subject.weights("model.norm.weight"))
    for layer, number in zip(student.layers, copied, strict=True):
        for name, parameter in layer.named_parameters():
            parameter.copy_(subject.weights(f"model.layers.{number}.{name}"))


@torch.no_grad()
def begin(layers: nn.ModuleList, options: Options) -> None:
    """Random matrices; those that add to the states are the smaller the more layers do so."""
    generator = torch.Generator().manual_seed(options.seed)
    for name, parameter in layers.named_parameters():
        if parameter.dim() == 2:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            parameter.normal_(0, options.spread / (2 * options.layers) ** (adds / 2), generator=generator)


def check(options: Options) -> None:
    check_at_least(
        1,
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        mlp_width=options.mlp_width,
        rows=options.rows,
    )
    if options.width % (2 * options.heads):
        raise UserError(
            f"`width` is {options.width} and `heads` {options.heads}: "
            "each head takes an even share, pass a width that is a multiple of twice the heads"
        )
    if options.heads % options.kv_heads:
        raise UserError(
            f"`heads` is {options.heads} and `kv_heads` {options.kv_heads}: the first must be a multiple of the second"
        )
    check_share(options.share)
    if options.spread <= 0:
        raise UserError(f"`spread` is {options.spread}: pass a number above 0")
