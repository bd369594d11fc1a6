"""A small Llama that learns to write as the target does, and then drafts for it: a model of its own, tokens in, tokens
out. Letters: N places of a lesson that are learnt from, H the width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..models.rope import Rope
from ..types import UserError
from .aims import Words
from .lesson import Exported, Lesson, Pack, Report, Student, Subject
from .losses import Loss, score
from .modules import LayerShape, Norm, Turning, causal
from .unroll import Layer, Memory, check_at_least, layer_keys, narrow


@dataclass(frozen=True)
class Options:
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


class Fused(Memory):
    """Keys and values of one pass, which torch's own attention reads without writing down who looks at whom."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        each = query.shape[2] // keys.shape[2]
        keys, values = (x.repeat_interleave(each, 2).transpose(1, 2) for x in (keys, values))  # [B, heads, L, D]
        mixed = functional.scaled_dot_product_attention(query.transpose(1, 2), keys, values, self.seen[:, None])
        return mixed.transpose(1, 2).flatten(2)


class DraftModelStudent(Student):
    method = "draft_model"
    taps = ()

    def __init__(self, subject: Subject, options: Options, positions: int) -> None:
        super().__init__()
        check(options)
        self.subject, self.options = subject, options
        self.words = Words(subject, 0)
        self.shape = layer_shape(subject, options)
        self.turning = Turning(self.shape.rope, self.shape.head_dim, positions)
        self.embed_tokens = nn.Embedding(subject.config.vocabulary, options.width, _weight=words_of(subject, options))
        self.layers = nn.ModuleList(Layer(self.shape) for _ in range(options.layers))
        self.norm = Norm(options.width, self.shape.eps)
        begin(self.layers, options)
        self.to(subject.place)

    def forward(self, lesson: Lesson) -> Report:
        at, counted = self.place(lesson.pack)
        aims = self.words.aims(lesson.logits, at)
        states = self.norm(self.states(lesson.pack).flatten(0, 1)[at])  # [N, H]
        parts, weights = [(states, self.embed_tokens.weight)], counted.float().flatten()
        scores = score(parts, aims.wanted, weights, self.options.loss, aims.whole, self.options.rows)
        return self.words.report(scores.loss / weights.sum().clamp(min=1), scores, aims, counted)

    def place(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Draw places to learn from among all B * L [N], as many whatever the pack; which of them count [N, 1] bool."""
        after = functional.pad(pack.documents, (0, 1), value=-1)[:, 1:]
        guessed = (functional.pad(pack.answered, (0, 1))[:, 1:] & (after == pack.documents)).flatten()  # [B * L]
        count = max(round(self.options.share * len(guessed)), 1)
        at = torch.rand(len(guessed), device=guessed.device).masked_fill(~guessed, -1.0).topk(count).indices
        return at, guessed[at, None]

    def states(self, pack: Pack) -> Tensor:
        """[B, L, H], before the last norm."""
        itself = torch.eye(pack.tokens.shape[1], dtype=torch.bool, device=pack.tokens.device)
        seen = causal(pack.documents) | itself  # padding, too, must look at something
        x: Tensor = self.embed_tokens(pack.tokens)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x = layer(x, narrow(layer.input_layernorm(x)), pack.positions, self.turning, Fused(seen))
        return x

    def logits(self, pack: Pack) -> Tensor:
        """[B, L, V]."""
        return functional.linear(self.norm(self.states(pack)), self.embed_tokens.weight)

    def exported(self) -> Exported:
        tensors = {f"model.{name}": each.detach().float().cpu().clone() for name, each in self.named_parameters()}
        return Exported(self._config(), tensors)

    def _config(self) -> dict[str, Any]:
        target = self.subject.config
        ends = {"eos_token_id": list(target.end_tokens)} if target.end_tokens else {}
        return {
            "architectures": ["LlamaForCausalLM"],
            **layer_keys(self.shape, self.options.layers, target),
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            **ends,
        }


def layer_shape(subject: Subject, options: Options) -> LayerShape:
    """A layer that turns as the target's first that turns."""
    return LayerShape(
        width=options.width,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.width // options.heads,
        mlp_width=options.mlp_width,
        eps=subject.config.eps,
        rope=next((rope for rope in subject.config.ropes if rope is not None), Rope(10_000.0)),
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
    if not 0 < options.share <= 1:
        raise UserError(f"`share` is {options.share}: it is a share of the places of a lesson, pass a number up to 1")
    if options.spread <= 0:
        raise UserError(f"`spread` is {options.spread}: pass a number above 0")
