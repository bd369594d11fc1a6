"""The modules of students that fill a block of masks, under the names of their checkpoints.

Letters: A blocks of a row of text, K tokens of a block, H the width, G key/value heads, D.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .modules import Attention, LayerShape, Mlp, Norm, Turning, attend


@dataclass(frozen=True)
class View:
    """What the blocks of a lesson see."""

    context: Tensor  # [B, L, H]: the text
    context_places: Tensor  # [B, L]
    places: Tensor  # [B, A * K]: of the blocks
    seen: Tensor  # [B, A * K, L] bool
    own_seen: Tensor  # [B, A * K, K] bool
    size: int  # K

    def own(self, entries: Tensor) -> Tensor:
        """The keys or values of all blocks [B, A * K, G, D] as each token sees its own: [B, A * K, K, G, D]."""
        rows, count, *rest = entries.shape
        apart = entries.view(rows, count // self.size, 1, self.size, *rest)
        return apart.expand(-1, -1, self.size, -1, -1, -1).flatten(1, 2)


class Layer(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.width, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.width, shape.eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, view: View, turning: Turning) -> Tensor:
        """x [B, A * K, H]. The text passes no norm of the layer: it has one of its own."""
        attention, normed = self.self_attn, self.input_layernorm(x)
        query = attention.queries(normed, view.places, turning)
        keys, values = attention.entries(view.context, view.context_places, turning)  # [B, L, G, D] each
        own = [view.own(each) for each in attention.entries(normed, view.places, turning)]
        x = x + attention.o_proj(attend(query, keys, values, view.seen, own[0], own[1], view.own_seen))
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
