"""The shapes and networks of draft heads: EAGLE heads, chains of MTP modules, Medusa heads. Block heads: block_head.py.

An EAGLE head or MTP module is a layer or two that read tokens and hidden states of the target. The entry at position q
joins token q with the target's hidden state at position q - 1, and predicts token q + 1. There is no entry at
position 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from ..errors import UserError
from ..kernels import AttentionWeights, Batch, Kernels, LayerPages
from . import layers
from .config import ModelConfig
from .decoder import Model
from .experts import moe
from .layers import ModelCheckpoint, RopeTables, WeightReader

FIRST = "model.layers.0."


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Properties of a head of any kind, as data. E: the target's width. H: the head's width."""

    kind: str  # the speculation method
    layout: str  # the software whose checkpoint layout it has
    width: int  # H
    target_width: int  # E
    aux_layers: tuple[int, ...] | None  # target layers whose input states it reads; None: not in the checkpoint
    num_aux_layers: int
    target_norm: bool  # it reads the target's last states, after the last norm
    own_embedding: int  # rows of its own embedding; 0: it shares the target's
    own_head: bool  # False: it shares the target's LM head
    logit_scale: float
    draft_vocabulary: int | None = None  # tokens that it can draft; None: all of the target's vocabulary
    target_layers: int | None = None  # layers of the target that it was trained for; None: not in the checkpoint

    def default_aux_layers(self, layers: int) -> tuple[int, ...] | None:
        """Return the aux layers, for a target of `layers` layers, if the checkpoint names none; None: the model's."""
        return None


@dataclass(frozen=True, kw_only=True)
class EagleShape(HeadShape):
    """Differences between heads that read token and state and draft one token after the other."""

    layers: ModelConfig  # its own layers
    joins: Literal["before", "inside"]  # token and state are joined before the layers, or in the first attention
    fc: bool  # has an input matrix: over [token, state] if it joins before, else over the aux states
    fc_bias: bool
    norm_before_fc: bool = False  # one norm over all aux states
    fc_norm: bool = False  # one norm per aux layer
    norm_before_residual: bool = False  # the residual stream starts with the normed state
    norm_first: bool = False  # joins before: the first layer has an input norm
    norm_last: bool = False  # has a norm before the logits
    norm_output: bool = False  # that norm also applies to the state that is fed back
    norm_inputs: bool = False  # joins before: token and state have a norm each
    state_first: bool = False  # joins before: [state, token] instead of [token, state]
    blank_first: bool = False  # the first entry reads zeros instead of its token
    mask: int | None = None  # mask token, if all tokens are drafted in one pass; None: one after the other


@dataclass(frozen=True, kw_only=True)
class ModuleShape(EagleShape):
    """MTP modules, all of the same shape, which the inherited fields describe."""

    modules: int  # 1: it drafts every token; more: one per drafted token
    offset_norms: bool = False  # norm weights are stored minus 1


@dataclass(frozen=True, kw_only=True)
class MedusaShape(HeadShape):
    """Differences between Medusa heads."""

    heads: int
    blocks: int  # residual blocks per head: x + SiLU(W x + b)
    block_bias: bool
    lm_heads: tuple[str, ...]  # names of the LM heads: one per head, or one for all; empty: the target's


class HeadCheckpoint(ModelCheckpoint, Protocol):
    """The checkpoint interface of a head: tensors under normalized names, those of a decoder where possible."""

    @property
    def shape(self) -> Any: ...  # the HeadShape of its kind

    @property
    def draft_ids(self) -> Tensor | None: ...  # [draft vocabulary] int64, target ids; None: all


class Storage(Protocol):
    layers: list[LayerPages]


StorageT = TypeVar("StorageT", bound=Storage)


class VocabMapping:
    """The tokens that a head can draft, as ids of the target. U: their number."""

    def __init__(self, shape: HeadShape, target: Model, ids: Tensor | None) -> None:
        self.shape, self.vocabulary = shape, target.config.vocabulary
        self.ids = ids if ids is None else ids.to(target.norm.device)  # [U]

    def head_rows(self, target: Model) -> object:
        """Return the rows of the target's LM head for these tokens."""
        return target.head if self.ids is None else target.head_rows(self.ids)

    def scale(self, logits: Tensor) -> Tensor:
        """Apply the head's logit scale [R, U]."""
        return logits if self.shape.logit_scale == 1 else logits * self.shape.logit_scale

    def scatter(self, logits: Tensor) -> Tensor:
        """Scatter logits [R, U] to [R, V] f32, with -inf for tokens that cannot be drafted."""
        if self.ids is None:
            return logits
        scattered = logits.new_full((len(logits), self.vocabulary), -torch.inf)  # [R, V]
        scattered[:, self.ids] = logits
        return scattered


class LMHead(VocabMapping):
    """Embedding and LM head of a draft head: its own if it has them, else the target's."""

    def __init__(self, reader: WeightReader, shape: HeadShape, target: Model, ids: Tensor | None) -> None:
        super().__init__(shape, target, ids)
        self.embedding = target.embedding
        if shape.own_embedding:
            table = reader.stored("model.embed_tokens.weight", shape.own_embedding, shape.width)
            self.embedding = target.ops.matrix(reader.quantized(table, fine=True))
        if shape.own_head:
            rows = shape.draft_vocabulary or self.vocabulary
            self.matrix = target.ops.matrix(reader.matrix("lm_head.weight", rows, shape.width, fine=True))
        else:
            self.matrix = self.head_rows(target)


class HeadLayers(Generic[StorageT]):
    """The layers of a head, with their own pages. The head runs those before `begin` itself."""

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        ops: Kernels,
        pages: StorageT,
        attentions: Iterable[AttentionWeights],
        begin: int = 0,
    ) -> None:
        self.ops, self.pages, self.begin = ops, pages, begin
        self.pairs = [
            (ops.attention_layer(attention), self._perceptron(config, reader, layer))
            for layer, attention in enumerate(attentions)
        ]
        self._cached: tuple[Sequence[LayerPages], object] | None = None

    def _perceptron(self, config: ModelConfig, reader: WeightReader, layer: int) -> object:
        """Return the MLP of a layer, or its mixture of experts."""
        experts = config.experts
        if experts is not None and experts.layers[layer]:
            return self.ops.moe_layer(moe(config, experts, reader, layer))
        return self.ops.mlp_layer(layers.mlp(config, reader, layer))

    def run(self, x: Tensor, batch: Batch) -> None:
        """Run x [T, H] through the layers from `begin` on, in place."""
        pages, begin = self.pages.layers, self.begin
        if begin == len(self.pairs):
            return
        if self._cached is None or self._cached[0] is not pages:
            self._cached = pages, self.ops.layer_stack(self.pairs[begin:], pages[begin:])
        self.ops.run_layers(x, self._cached[1], batch)


class EagleHead(Generic[StorageT]):
    """An EAGLE head of any version; they differ in their EagleShape. U: tokens that the head can draft."""

    def __init__(
        self,
        head: HeadCheckpoint,
        target: Model,
        pages: StorageT,
        context: int,
        quantize: str | None = None,
        first: int = 1,
    ) -> None:
        """Read a head. `first` is the position of its first entry."""
        self.shape: EagleShape = head.shape
        shape = self.shape
        self.ops, self.pages, self.context, self.first = target.ops, pages, context, first
        self.device = target.norm.device
        self.parallel, self.mask = shape.mask is not None, -1 if shape.mask is None else shape.mask
        self.width, self.eps, self.vocabulary = shape.layers.width, shape.layers.eps, target.config.vocabulary
        self.features = shape.num_aux_layers * shape.target_width
        reader = WeightReader(head, self.ops, quantize)
        self.lm_head = LMHead(reader, shape, target, head.draft_ids)
        self._read_norms(reader, target)
        columns = self.width + shape.target_width if shape.joins == "before" else self.features
        self.fc = self.ops.matrix(reader.matrix("model.fc.weight", self.width, columns)) if shape.fc else None
        self.fc_bias = reader.vector("model.fc.bias", self.width) if shape.fc_bias else None
        rope_tables = RopeTables(shape.layers, self.ops, context)
        attentions = (self._attention(reader, layer, rope_tables) for layer in range(shape.layers.layers))
        self.layers = HeadLayers(shape.layers, reader, self.ops, pages, attentions, int(shape.joins == "inside"))
        self.mask_features = self._mask_features(reader) if self.parallel else None
        reader.finish(shape.layers)
        self.weight_bytes = reader.weight_bytes

    def _read_norms(self, reader: WeightReader, target: Model) -> None:
        shape, width, inside = self.shape, self.width, self.shape.joins == "inside"
        self.target_norm = (target.norm, target.config.eps) if shape.target_norm else None
        self.fc_norms: list[Tensor] = []  # over the aux states: one for all, or one per layer
        if shape.norm_before_fc:
            self.fc_norms = [reader.norm("model.input_norm.weight", self.features)]
        elif shape.fc_norm:
            names = [f"model.fc_norm.{index}.weight" for index in range(shape.num_aux_layers)]
            self.fc_norms = [reader.norm(name, shape.target_width) for name in names]
        token, state = ("input_layernorm", "hidden_norm") if inside else ("token_norm", "state_norm")
        self.token_norm = self.state_norm = None
        if inside or shape.norm_inputs:
            prefix = FIRST if inside else "model."
            self.token_norm = reader.norm(f"{prefix}{token}.weight", width)
            self.state_norm = reader.norm(f"{prefix}{state}.weight", width)
        self.norm = reader.norm("model.norm.weight", width) if shape.norm_last else None

    def _mask_features(self, reader: WeightReader) -> Tensor:
        """Return the learned state of positions where the target has none yet, as an entry reads it: [1, H]."""
        state = reader.stored("mask_hidden", 1, 1, self.features).data.view(1, -1)
        return self._fuse(state.to(self.device, torch.float32, copy=True))

    def _attention(self, reader: WeightReader, layer: int, rope_tables: RopeTables) -> AttentionWeights:
        shape = self.shape
        joined = layer == 0 and shape.joins == "inside"
        inputs = 2 * self.width if joined else self.width
        normed = layer > 0 or (shape.joins == "before" and shape.norm_first)
        weights = layers.attention(shape.layers, reader, layer, rope_tables, inputs=inputs, normed=normed)
        return replace(weights, skip=self.first)

    def project_features(self, features: Tensor) -> Tensor:
        """Convert the target's aux hidden states [T, features] to the state that an entry reads: [T, H]."""
        if self.target_norm is not None:
            features = self.ops.rms_norm(features, *self.target_norm)
        return self._fuse(features)

    def _fuse(self, features: Tensor) -> Tensor:
        if self.fc_norms:
            parts = features.chunk(len(self.fc_norms), 1)
            normed = [
                self.ops.rms_norm(part.contiguous(), norm, self.eps)
                for part, norm in zip(parts, self.fc_norms, strict=True)
            ]
            features = torch.cat(normed, 1)
        return self._through_fc(features) if self.shape.joins == "inside" else features

    def run(self, batch: Batch, features: Tensor | None) -> Tensor:
        """Run tokens with their input features [T, H], and store their KV; return states [T, H]."""
        assert features is not None
        token, state = self.ops.embed(self.lm_head.embedding, batch.tokens, 1.0), features  # [T, H] each
        if self.shape.blank_first:
            token = torch.where(batch.positions[:, None] == self.first, 0.0, token)
        if self.token_norm is not None and self.state_norm is not None:
            token = self.ops.rms_norm(token, self.token_norm, self.eps)
            state = self.ops.rms_norm(state, self.state_norm, self.eps)
        if self.shape.joins == "before":
            x = self._through_fc(torch.cat([state, token] if self.shape.state_first else [token, state], 1))  # [T, H]
            self.layers.run(x, batch)
            return x
        x = state.clone() if self.shape.norm_before_residual else features.clone()
        (attention, mlp), pages = self.layers.pairs[0], self.pages.layers[0]
        queries = self.ops.project_qkv(torch.cat([token, state], 1), attention, batch, pages)
        self.ops.attend(queries, attention, batch, pages, x)
        self.ops.mlp(x, mlp)
        self.layers.run(x, batch)
        return x

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [R, V] f32 of states [R, H], with -inf for tokens that the head cannot draft."""
        return self.lm_head.scatter(self.scores(states))

    def scores(self, states: Tensor) -> Tensor:
        """Return logits [R, U] f32 of states [R, H] over the draft vocabulary."""
        if self.norm is None:
            logits = self.ops.linear(states, self.lm_head.matrix)  # [R, U]
        else:
            logits = self.ops.norm_linear(states, self.norm, self.eps, self.lm_head.matrix)
        return self.lm_head.scale(logits)

    @property
    def ids(self) -> Tensor | None:
        return self.lm_head.ids

    def feedback_features(self, states: Tensor) -> Tensor:
        """Return what the entry of a token drafted from `states` [R, H] reads in place of the target's state."""
        if self.norm is None or not self.shape.norm_output:
            return states
        return self.ops.rms_norm(states, self.norm, self.eps)

    def _through_fc(self, x: Tensor) -> Tensor:
        if self.fc is None:
            return x
        out = self.ops.linear(x, self.fc)  # [T, H]
        return out if self.fc_bias is None else out.add_(self.fc_bias)


class StateStorage(Storage, Protocol):
    page_size: int
    states: Tensor  # [pages, floats]


StateStorageT = TypeVar("StateStorageT", bound=StateStorage)


class ModuleChain(Generic[StateStorageT]):
    """MTP modules that run one after the other over the same entries, each for one token. N: modules. H: their width.

    The entry of module j at position q joins token q with the output of module j - 1 at position q - 1; module 0 reads
    the target's state. So module j has no entry below position j + 1, and its keys are indexed by position as the
    target's are.

    Inputs and outputs have H floats for each module that still has a token to draft: the state that it reads, and its
    output. Each draft step leaves out the module that has drafted its token.
    """

    parallel, mask, mask_features = False, -1, None

    def __init__(self, modules: Sequence[EagleHead[StateStorageT]]) -> None:
        """Chain the modules. The pages of the second also store the states that later modules read, by slot."""
        first = modules[0]
        self.modules, self.width = list(modules), first.width
        self.pages, self.context, self.features = first.pages, first.context, first.features
        self.outputs = modules[1].pages
        self.weight_bytes = sum(module.weight_bytes for module in modules)

    def project_features(self, features: Tensor) -> Tensor:
        """Convert [T, features] to [T, N * H]: the other modules read outputs of modules, so their parts are zero."""
        return pad(self.modules[0].project_features(features), (0, (len(self.modules) - 1) * self.width))

    def run(self, batch: Batch, features: Tensor | None) -> Tensor:
        assert features is not None
        parts = torch.split(features, self.width, 1)
        running = self.modules[-len(parts) :]
        if len(running) < len(self.modules):  # drafting: one token per row, and `feedback_features` gave every part
            outputs = [module.run(batch, part.contiguous()) for module, part in zip(running, parts, strict=True)]
            return torch.cat(outputs, 1)
        outputs = [running[0].run(batch, parts[0].contiguous())]  # [T, H] each
        states: list[Tensor] = []  # [T, H] each, as the next module reads them
        for index, module in enumerate(running[1:], 1):
            states.append(running[index - 1].feedback_features(outputs[-1]))
            outputs.append(module.run(batch, self._shifted(batch, states[-1], index)))
        self._stored()[batch.slots.long()] = torch.cat(states, 1)
        return torch.cat(outputs, 1)

    def _shifted(self, batch: Batch, outputs: Tensor, index: int) -> Tensor:
        """Return the previous module's outputs [T, H] at the previous position; a row's first is read from storage.

        Before the first entry of a module the storage is undefined, and what comes of it is never read.
        """
        states, firsts = outputs.roll(1, 0), batch.query_starts[:-1].long()  # [B]
        size = self.outputs.page_size
        positions = (batch.positions[firsts].long() - 1).clamp(min=0)  # [B]; padding has position 0
        pages = batch.page_tables.gather(1, (positions // size)[:, None])[:, 0].long()  # [B]
        columns = slice((index - 1) * self.width, index * self.width)
        states[firsts] = self._stored()[pages * size + positions % size, columns]
        return states

    def _stored(self) -> Tensor:
        """Return the states that later modules read, by slot: [slots, (N - 1) * H]."""
        states: Tensor = self.outputs.states
        return states.view(-1, (len(self.modules) - 1) * self.width)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [R, V] f32 of the next module to draft."""
        return self._next(states).logits(states[:, : self.width].contiguous())

    def scores(self, states: Tensor) -> Tensor:
        """Return the same over the draft vocabulary `ids`: [R, U]."""
        return self._next(states).scores(states[:, : self.width].contiguous())

    @property
    def ids(self) -> Tensor | None:
        return self.modules[0].ids

    def _next(self, states: Tensor) -> EagleHead[StateStorageT]:
        module: EagleHead[StateStorageT] = self.modules[-(states.shape[1] // self.width)]
        return module

    def feedback_features(self, states: Tensor) -> Tensor:
        """Return what the modules after the first of these read with its token: [R, one part less]."""
        *parts, _ = torch.split(states, self.width, 1)
        running = self.modules[-len(parts) - 1 : -1]
        return torch.cat(
            [module.feedback_features(part.contiguous()) for module, part in zip(running, parts, strict=True)], 1
        )


class MedusaHeads:
    """Medusa heads: head k predicts the token k + 2 positions after the target's last hidden state, from that state.

    The target itself has chosen the token right after the state. K: heads. U: tokens that they can draft.
    """

    def __init__(self, head: HeadCheckpoint, target: Model, quantize: str | None = None) -> None:
        self.shape: MedusaShape = head.shape
        shape, width = self.shape, self.shape.width
        self.ops = target.ops
        self.target_norm = target.norm, target.config.eps
        reader = WeightReader(head, self.ops, quantize)
        self.blocks = [[self._block(reader, k, index) for index in range(shape.blocks)] for k in range(shape.heads)]
        rows = shape.draft_vocabulary or target.config.vocabulary
        own = [self.ops.matrix(reader.matrix(name, rows, width, fine=True)) for name in shape.lm_heads]
        self.vocab_mapping = VocabMapping(shape, target, head.draft_ids)
        self.lm_heads = own or [self.vocab_mapping.head_rows(target)]
        if reader.unread:
            raise UserError(
                f"the Medusa heads come with the tensor `{min(reader.unread)}`, which none of them uses: "
                "fetch them again"
            )
        self.weight_bytes = reader.weight_bytes

    def _block(self, reader: WeightReader, head: int, index: int) -> tuple[object, Tensor | None]:
        """Read the matrix and the bias of a block."""
        prefix, width = f"model.blocks.{head}.layers.{index}.", self.shape.width
        matrix = self.ops.matrix(reader.matrix(prefix + "weight", width, width))
        return matrix, reader.vector(prefix + "bias", width) if self.shape.block_bias else None

    def logits(self, hidden: Tensor, count: int) -> Iterator[Tensor]:
        """Yield the logits [B, V] f32 of each of the first `count` heads, from the target's last states [B, E].

        Tokens that the heads cannot draft have -inf.
        """
        return map(self.vocab_mapping.scatter, self.scores(hidden, count))

    def scores(self, hidden: Tensor, count: int) -> Iterator[Tensor]:
        """Yield the same over the draft vocabulary: [B, U]."""
        state = self.ops.rms_norm(hidden, *self.target_norm)  # [B, E]
        if len(self.lm_heads) == 1:  # one matmul for all heads
            states = torch.cat([self._through(self.blocks[k], state) for k in range(count)])  # [count * B, E]
            yield from self.vocab_mapping.scale(self.ops.linear(states, self.lm_heads[0])).view(count, len(hidden), -1)
            return
        for k in range(count):
            yield self.vocab_mapping.scale(self.ops.linear(self._through(self.blocks[k], state), self.lm_heads[k]))

    def _through(self, blocks: list[tuple[object, Tensor | None]], state: Tensor) -> Tensor:
        for matrix, bias in blocks:
            out = self.ops.linear(state, matrix)  # [B, E]
            state = state + silu(out if bias is None else out + bias)
        return state
