"""The data of recurrent layers: linear attention (Gated DeltaNet) and state-space layers (Mamba-2).

Letters: H heads, P values of a head, G key heads, N keys of a head, C = 2 * G * N + H * P channels, W positions of the
convolution, X control values of a token (H, or 2 * H with the delta rule), R recent tokens of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .structures import Weight

UNIT_EPS = 1e-6  # added to the squared length of queries and keys that are scaled to unit length


@dataclass(frozen=True)
class RecurrentWeights:
    """A layer whose state is one matrix [P, N] per head. Head h has the query and the key of key head h * G // H.

    A token's channels pass a causal convolution and silu, and become queries, keys and values. With the time step
    t = softplus(control + step_bias) and the decay a = exp(decay * t), the state becomes

    - without the delta rule (Mamba-2): S = a * S + t * v * transpose(k); the output is S * q + skip * v;
    - with it (Gated DeltaNet): S = a * S, then S += r * (v - S * k) * transpose(k) with r = sigmoid(second control);
      the output is S * q. Keys and queries have unit length, and queries are divided by sqrt(N).

    Outputs are gated by silu(gate(x)): after an RMS norm of each head with the delta rule, else before an RMS norm of
    the heads that share a key head.
    """

    channels: Weight  # [C, E]: queries [G * N], keys [G * N], values [H * P]
    controls: Weight  # [X, E]: a time step for each head, then, with the delta rule, a rate for each head
    gate: Weight  # [H * P, E]
    output: Weight  # [E, H * P]
    conv: Tensor  # [C, W] f32; the last position is the token itself
    decay: Tensor  # [H] f32, below 0
    step_bias: Tensor  # [H] f32
    out_norm: Tensor  # [P] f32 with the delta rule, else [H * P]
    heads: int
    key_heads: int
    head_dim: int  # P
    state_dim: int  # N
    delta: bool  # the delta rule
    eps: float  # of `norm`
    out_eps: float  # of `out_norm`
    norm: Tensor | None = None  # [E] f32
    conv_bias: Tensor | None = None  # [C] f32
    skip: Tensor | None = None  # [H] f32; None with the delta rule

    @property
    def num_channels(self) -> int:
        return 2 * self.key_heads * self.state_dim + self.heads * self.head_dim

    @property
    def num_controls(self) -> int:
        return self.heads * (2 if self.delta else 1)


@dataclass(frozen=True)
class LayerStates:
    """The states of one recurrent layer, by slot, and the inputs of the tokens that a state has not read yet.

    A state is updated token by token, in fp32. Drafted tokens are not read into it, since they may be rejected: their
    inputs are kept, and the next step reads those that were accepted. So a token changes the state by the same
    operations, whether it was drafted or not.
    """

    states: Tensor  # [slots, H, P, N] f32
    inputs: Tensor  # [slots, R, C + X] f32: channels before the convolution, and controls; position p is in line p % R
    lengths: Tensor  # [slots] int32: tokens that the state has read
