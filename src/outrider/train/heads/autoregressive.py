"""Heads that draft one token after the other: EAGLE-3 and multi-token prediction; EAGLE-1 and P-EAGLE extend them.

They are trained by unrolling: later steps read the head's own states.

Row t of a document reads token t + 1 beside a state, in step 0 the target's state at t, and predicts token t + 2. In
step s the row reads token t + 1 + s beside its own output of the step before, and predicts token t + 2 + s. A row
attends to the step-0 entries of its document up to its own, and to its own entries of all later steps. Shapes: S steps,
R answer tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import UserError
from ...kernels.structures import AttentionRanges, OwnKeys
from ..data.pack import Pack
from ..losses import Loss, score
from ..target import TargetInfo, TargetOutputs, vocab_key
from .base import DraftHead, StepResult, check_at_least, check_decay, most_frequent
from .layers import (
    DecoderLayer,
    HeadMatrix,
    LayerShape,
    Norm,
    Rotary,
    attend,
    causal_ranges,
    layer_keys,
    layer_shape,
    make_lm_head,
    to_autocast,
)


@dataclass(frozen=True)
class UnrollConfig:
    """The settings that all autoregressive heads share."""

    shape: LayerShape
    layers: int
    weights: tuple[float, ...]  # of the losses, by step
    loss: Loss
    rows: int  # rows of logits in memory at a time
    logit_weight: float = 1.0  # of the loss of the logits, beside that of the states


class UnrolledKV:
    """Keys and values of one layer: the step-0 entries, which later rows see, then each row's own."""

    def __init__(self, ranges: tuple[Tensor, Tensor]) -> None:
        self.ranges = ranges  # begins and ends (`causal_ranges`)
        self.first: tuple[Tensor, Tensor] | None = None  # [B, L, G, D] each
        self.own: list[tuple[Tensor, Tensor]] = []  # by step, from step 1

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Add the entries of the next step and attend: [B, L, H, D] and [B, L, G, D] twice to [B, L, H * D]."""
        if self.first is None:
            self.first = keys, values
            return attend(query, AttentionRanges(keys, values, *self.ranges))
        self.own.append((keys, values))
        own_keys, own_values = (torch.stack(parts, 2) for parts in zip(*self.own, strict=True))  # [B, L, s, G, D]
        return attend(query, AttentionRanges(*self.first, *self.ranges, OwnKeys(own_keys, own_values)))


class CausalLayer(DecoderLayer):
    def forward(self, x: Tensor, attention_input: Tensor, positions: Tensor, rotary: Rotary, kv: UnrolledKV) -> Tensor:
        """Run the layer. x [B, L, E] f32; attention_input [B, L, inputs], normed. Returns [B, L, E] f32."""
        query = self.self_attn.queries(attention_input, positions, rotary)
        mixed = kv.attend(query, *self.self_attn.keys_values(attention_input, positions, rotary))
        x = x + self.self_attn.o_proj(mixed)
        inner: Tensor = self.mlp(to_autocast(self.post_attention_layernorm(x)))
        return x + inner


class AutoregressiveHead(DraftHead):
    embedding: Tensor  # [V, E]
    ids: Tensor | None  # [U]: the tokens that it can draft, rising; None: all. A buffer of this name is in saved states

    def __init__(
        self, target_info: TargetInfo, unroll: UnrollConfig, first: CausalLayer, positions: int, ids: Tensor | None
    ) -> None:
        super().__init__()
        shape = unroll.shape
        self.unroll, self.target = unroll, target_info.config
        # Draft heads in the engine read the embedding as it is stored, without the model's scale.
        scale = target_info.config.embedding_scale
        embedding = target_info.embedding
        self.register_buffer("embedding", embedding / scale if scale != 1 else embedding, persistent=False)
        self.register_buffer("ids", ids)
        self.layers = nn.ModuleList([first, *(CausalLayer(shape) for _ in range(unroll.layers - 1))])
        self.norm: nn.Module = Norm(shape.width, shape.eps)  # before lm_head
        self.rotary = Rotary(shape, positions)

    @property
    def draft_ids(self) -> Tensor | None:
        return self.ids

    @cached_property
    def _vocab_key(self) -> bytes:
        """Read first in `forward`, when a saved state has been loaded into `ids`."""
        return vocab_key(self.ids)

    @property
    @abstractmethod
    def token_norm(self) -> nn.Module: ...

    @property
    @abstractmethod
    def matrix(self) -> Tensor: ...  # [U, E], to the logits

    @abstractmethod
    def states(self, target_outputs: TargetOutputs) -> Tensor:
        """Return the target states that step 0 reads: [B, L, E] f32."""

    @abstractmethod
    def enter(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Join normed tokens and states [B, L, E]: the first layer's residual [B, L, E] f32 and its attention input."""

    def later_inputs(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens and states that a step after the first reads, given the text's and its own output."""
        return tokens, states

    def state_loss(self, states: Tensor, target_states: Tensor, rows: Tensor, weights: Tensor) -> Tensor | None:
        """Return a loss of states [R, E] that predict rows [R] of target_states [B * L, E], summed by weights [R].

        None: the logits alone have a loss.
        """
        return None

    def outputs(self, target_outputs: TargetOutputs) -> Iterator[Tensor]:
        """Yield for each step the state for lm_head and for the next step: [B, L, E] f32."""
        pack, length = target_outputs.pack, target_outputs.pack.tokens.shape[1]
        padded = functional.pad(pack.tokens, (0, len(self.unroll.weights)))  # [B, L + S]
        tokens = to_autocast(self.token_norm(functional.embedding(padded, self.embedding)))  # [B, L + S, E]
        ranges, last = causal_ranges(pack.documents), len(self.rotary.cos) - 1
        kvs = [UnrolledKV(ranges) for _ in self.layers]
        state = self.states(target_outputs)
        for step in range(1, 1 + len(self.unroll.weights)):
            positions = (pack.positions + step).clamp(max=last)  # beyond the last one no loss is computed
            ahead = tokens[:, step : step + length]
            x, attention_input = self.enter(*((ahead, state) if step == 1 else self.later_inputs(ahead, state)))
            for number, (layer, kv) in enumerate(zip(self.layers, kvs, strict=True)):
                assert isinstance(layer, CausalLayer)
                if number:
                    attention_input = to_autocast(layer.input_layernorm(x))
                x = layer(x, attention_input, positions, self.rotary, kv)
            state = self.norm(x)
            yield state

    def forward(self, target_outputs: TargetOutputs) -> StepResult:
        answers = AnswerTargets.of(target_outputs, self.ids, self._vocab_key)
        losses, counts = [], []
        first = torch.ones((), device=target_outputs.logits.device)
        for step, states in enumerate(self.outputs(target_outputs)):
            rows, exists = answers.rows(step)  # [R] each
            weights = (exists & (answers.argmax >= 0)).float()
            first = first if step else weights.sum().clamp(min=1)
            weights = weights * self.unroll.weights[step]
            picked = states.flatten(0, 1).index_select(0, rows)  # [R, E]
            scores = score(
                [(picked, self.matrix)],
                answers.logits,
                weights * self.unroll.logit_weight,
                self.unroll.loss,
                answers.logsumexp,
                self.unroll.rows,
                answers.tokens - 1,
            )
            last_states = target_outputs.last_state.flatten(0, 1)
            of_states = self.state_loss(picked, last_states, answers.tokens - 1, weights)
            losses.append(scores.loss if of_states is None else scores.loss + of_states)
            correct = exists & (scores.argmax == answers.argmax)
            counts.append(torch.stack([exists.sum(), correct.sum(), (scores.overlap * exists).sum()]))
        counted, correct, overlap = torch.stack(counts, 1).float().detach()  # [S] each
        return StepResult(torch.stack(losses).sum() / first, counted, correct, overlap)


@dataclass(frozen=True)
class AnswerTargets:
    """The tokens that the target wrote, and its logits for them."""

    pack: Pack
    tokens: Tensor  # [R]: index of each token in the flattened pack
    logits: Tensor  # [B * L, U] f32: of the draft vocabulary; those of a token stand one position before it
    logsumexp: Tensor | None  # [R] f32: of all logits; None: U is the whole vocabulary
    argmax: Tensor  # [R]: a column of U; -1: the target's argmax is not in the draft vocabulary

    @staticmethod
    def of(target_outputs: TargetOutputs, ids: Tensor | None, key: bytes) -> AnswerTargets:
        written = target_outputs.pack.answered & (target_outputs.pack.documents >= 0)
        written[:, :2] = False  # no row predicts them
        tokens = written.flatten().nonzero().flatten()  # the only wait of the host for the device in a step
        vocab = target_outputs.logits_for(ids, key)
        logsumexp = None if vocab.logsumexp is None else vocab.logsumexp[tokens - 1]
        argmax = vocab.argmax[tokens - 1]
        if ids is not None:
            columns = ids.new_full((target_outputs.logits.shape[-1],), -1)  # [V]
            columns[ids] = torch.arange(len(ids), device=ids.device)
            argmax = columns[argmax]
        return AnswerTargets(target_outputs.pack, tokens, vocab.logits, logsumexp, argmax)

    def rows(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the rows that predict these tokens in a step [R], and whether each row exists in the document."""
        rows = self.tokens - 2 - step
        documents, column = self.pack.documents.flatten(), self.tokens % self.pack.tokens.shape[1]
        rows = rows.clamp(min=0)
        return rows, (column >= 2 + step) & (documents[rows] == documents[self.tokens])


# ---- EAGLE-3 ----


@dataclass(frozen=True)
class EagleOptions:
    draft_vocabulary: int = 16_384  # tokens that it can draft: the target's most frequent ones; 0: all
    length: int = 7  # tokens of a draft in training
    decay: float = 0.8  # weight of the loss of each drafted token, relative to the one before it
    loss: Loss = "kl"
    layers: int = 1
    mlp_width: int = 0  # 0: the target's
    aux_layers: tuple[int, ...] = ()  # hidden states to read, entering these layers; default: the model's
    head: HeadMatrix = "trained"
    head_norms: bool = False  # norms on queries and keys, as in Qwen3
    rows: int = 4_096  # rows of logits in memory at a time


class FirstLayer(CausalLayer):
    """A layer whose attention reads token and state side by side, each with its own norm."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape, 2 * shape.width)
        self.hidden_norm = Norm(shape.width, shape.eps)


class EagleDraftHead(AutoregressiveHead):
    """EAGLE-3: a layer over aux hidden states of the target, with its own draft vocabulary and lm_head.

    This is the variant called EAGLE-3.1: each aux hidden state has a norm, and so has the state that is fed back.
    """

    method = "eagle3"

    def __init__(self, target_info: TargetInfo, options: EagleOptions, positions: int) -> None:
        config = target_info.config
        check_eagle(options, config.layers)
        shape = layer_shape(config, options.mlp_width, options.head_norms)
        weights = tuple(options.decay**step for step in range(options.length))
        unroll = UnrollConfig(shape, options.layers, weights, options.loss, options.rows)
        ids = most_frequent(target_info.token_counts, options.draft_vocabulary, config.end_tokens)
        super().__init__(target_info, unroll, FirstLayer(shape), positions, ids)
        self.aux_layers = options.aux_layers or target_info.aux_layers
        self.fc_norm = nn.ModuleList(Norm(config.width, config.eps) for _ in self.aux_layers)
        self.fc = nn.Linear(len(self.aux_layers) * config.width, shape.width, bias=False)
        lm_head = target_info.lm_head.detach()
        self.target_rows = lm_head if ids is None else lm_head[ids.to(lm_head.device)]  # [U, E]
        self.lm_head = make_lm_head(options.head, self.target_rows)
        self.to(target_info.torch_device)

    @property
    def first(self) -> FirstLayer:
        return cast(FirstLayer, self.layers[0])

    @property
    def token_norm(self) -> Norm:
        return self.first.input_layernorm

    @property
    def matrix(self) -> Tensor:
        return self.target_rows if self.lm_head is None else self.lm_head.weight

    def states(self, target_outputs: TargetOutputs) -> Tensor:
        return self._fuse([target_outputs.aux_states[layer] for layer in self.aux_layers])

    def _fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Join the states of all aux layers, [B, L, E] each, to the state that an entry reads: [B, L, E] f32."""
        normed = [to_autocast(norm(state)) for norm, state in zip(self.fc_norm, states, strict=True)]
        fused: Tensor = self.fc(torch.cat(normed, -1))  # [B, L, aux layers * E] to [B, L, E]
        return fused.float()

    def enter(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return states, torch.cat([tokens, to_autocast(self.first.hidden_norm(states))], -1)

    def checkpoint_config(self) -> dict[str, Any]:
        return layer_keys(self.unroll.shape, self.unroll.layers, self.target) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self.matrix),
            "target_hidden_size": self.target.width,
            "num_target_layers": self.target.layers,
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
            "fc_norm": True,
            "norm_before_fc": False,
            "norm_before_residual": False,
            "norm_output": True,
        }


def check_eagle(options: EagleOptions, layers: int) -> None:
    check_at_least(1, length=options.length, layers=options.layers, rows=options.rows)
    check_at_least(0, draft_vocabulary=options.draft_vocabulary, mlp_width=options.mlp_width)
    check_decay(options.decay)
    beyond = [layer for layer in options.aux_layers if not 0 <= layer <= layers]
    if beyond:
        raise UserError(
            f"`aux_layers` names the state entering layer {beyond[0]}, but the target has {layers} layers: "
            f"pass numbers from 0 to {layers}"
        )


# ---- multi-token prediction ----


@dataclass(frozen=True)
class MtpOptions:
    length: int = 4  # tokens of a draft in training
    decay: float = 0.6  # weight of the loss of each drafted token, relative to the one before it
    loss: Loss = "kl"
    mlp_width: int = 0  # 0: the target's
    head_norms: bool = False  # norms on queries and keys, as in Qwen3
    rows: int = 2_048  # rows of logits in memory at a time


class MtpDraftHead(AutoregressiveHead):
    """One module over the target's last hidden state that drafts every token (FastMTP).

    It shares the target's embedding and lm_head. Its tensors are named as in Qwen3-Next.
    """

    method = "mtp"
    aux_layers = ()
    prefix = "mtp."
    head: Tensor  # [V, E]

    def __init__(self, target_info: TargetInfo, options: MtpOptions, positions: int) -> None:
        check_at_least(1, length=options.length, rows=options.rows)
        check_at_least(0, mlp_width=options.mlp_width)
        check_decay(options.decay)
        shape = layer_shape(target_info.config, options.mlp_width, options.head_norms)
        decays = [options.decay**step for step in range(options.length)]
        weights = tuple(decay / sum(decays) for decay in decays)
        unroll = UnrollConfig(shape, 1, weights, options.loss, options.rows)
        super().__init__(target_info, unroll, CausalLayer(shape), positions, None)
        self.pre_fc_norm_embedding = Norm(shape.width, shape.eps)
        self.pre_fc_norm_hidden = Norm(shape.width, shape.eps)
        self.fc = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.register_buffer("head", target_info.lm_head.detach(), persistent=False)
        self.to(target_info.torch_device)

    @property
    def token_norm(self) -> Norm:
        return self.pre_fc_norm_embedding

    @property
    def matrix(self) -> Tensor:
        return self.head

    def states(self, target_outputs: TargetOutputs) -> Tensor:
        return target_outputs.last_state

    def enter(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        joined: Tensor = self.fc(torch.cat([tokens, to_autocast(self.pre_fc_norm_hidden(states))], -1))
        joined = joined.float()
        return joined, to_autocast(cast(CausalLayer, self.layers[0]).input_layernorm(joined))

    def checkpoint_config(self) -> dict[str, Any]:
        return layer_keys(self.unroll.shape, 1, self.target) | {
            "architectures": ["Qwen3NextMTP"],
            "num_nextn_predict_layers": 1,
            "num_target_layers": self.target.layers,
        }
