"""The modules of students that fill a block of masks, under the names of their checkpoints.

Letters: A blocks of a row of text, K tokens of a block, H the width, G key/value heads, D.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..kernels.sight import Own, Sight
from .modules import DecoderLayer, Turning, attend


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
        sight = Sight(keys, values, view.begins, view.ends, Own(own_keys, own_values, view.sizes))
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
