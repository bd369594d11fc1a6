"""The target model in training: a forward pass over packed documents, and its outputs as labels for draft heads.

Shapes: B rows of L tokens, V the target's vocabulary, E its hidden size, U the tokens that a head can draft.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import config as configuration
from ..cache.pages import Pages
from ..config import EngineConfig
from ..device import choose_backend, open_device
from ..errors import UserError
from ..kernels import Batch, load
from ..kernels.quantization import dequantize
from ..models import Model, ModelConfig, build
from ..weights import open_checkpoint
from .data.pack import Pack

Array = np.ndarray[Any, Any]
PASS_TOKENS = 1 << 15  # tokens of one forward pass; bounds the memory of activations, and fills a GPU


@dataclass(frozen=True)
class TargetOutputs:
    """A pack and what the target computed for it."""

    pack: Pack
    aux_states: Mapping[int, Tensor]  # by layer: [B, L, E] f32, the hidden state that enters it (Model.forward)
    last_state: Tensor  # [B, L, E] f32, after the final norm
    logits: Tensor  # [B, L, V] f32: of the token after each
    _by_vocab: dict[bytes, VocabLogits] = field(default_factory=dict, init=False, repr=False, compare=False)

    def logits_for(self, draft_ids: Tensor | None, key: bytes) -> VocabLogits:
        """Return the logits of the tokens `draft_ids` [U], None: all. Heads with equal keys (vocab_key) share them."""
        if key not in self._by_vocab:
            self._by_vocab[key] = VocabLogits.of(self.logits.flatten(0, 1), draft_ids)
        return self._by_vocab[key]


def vocab_key(draft_ids: Tensor | None) -> bytes:
    """Return a key that is equal for equal ids. Compute it once: it waits for the device."""
    return b"" if draft_ids is None else hashlib.blake2b(draft_ids.cpu().numpy().tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class VocabLogits:
    """The target's logits of U tokens at the B * L positions of a pack."""

    logits: Tensor  # [B * L, U] f32
    logsumexp: Tensor | None  # [B * L] f32, over the whole vocabulary; None: U is the whole vocabulary
    argmax: Tensor  # [B * L] int64, over the whole vocabulary

    @staticmethod
    def of(logits: Tensor, draft_ids: Tensor | None, chunk: int = 4096) -> VocabLogits:
        """Select columns of logits [B * L, V], `chunk` rows at a time."""
        starts = range(0, len(logits), chunk)
        argmax = torch.cat([logits[start : start + chunk].argmax(-1) for start in starts])
        if draft_ids is None:
            return VocabLogits(logits, None, argmax)
        selected, logsumexp = logits.new_empty(len(logits), len(draft_ids)), logits.new_empty(len(logits))
        for start in starts:
            rows = slice(start, start + chunk)
            torch.index_select(logits[rows], 1, draft_ids, out=selected[rows])
            torch.logsumexp(logits[rows], -1, out=logsumexp[rows])
        return VocabLogits(selected, logsumexp, argmax)


@dataclass(frozen=True)
class TargetInfo:
    """The parts of the target that a draft head is built from."""

    model: str  # the name or path that the user gave
    config: ModelConfig
    embedding: Tensor  # [V, E] f32, as it enters the first layer
    lm_head: Tensor  # [V, E] f32
    aux_layers: tuple[int, ...]  # the model's default
    token_counts: Tensor  # [V] int64: how often the target wrote each token
    torch_device: torch.device
    weights: Callable[[str], Tensor]  # matrices and norms of its layers by name, f32


class TargetModel:
    """The engine's model and kernels without an engine, for whole documents at once."""

    def __init__(self, model: str, backend: str = "auto", tokens: int = PASS_TOKENS) -> None:
        """Load the model. tokens: the most that one forward pass takes."""
        if tokens < 1:
            raise UserError(f"`tokens` is {tokens}, but a forward pass needs at least 1 token: pass 1 or more")
        self.name, self.tokens = model, tokens
        config = EngineConfig(model=model, backend=choose_backend(backend))
        configuration.check(config)
        self.device = open_device(config.backend)
        checkpoint = open_checkpoint(model, device=self.device.torch_device)
        self.model = build(checkpoint, load(config.backend))
        shape = self.model.config
        if shape.recurrent is not None:
            raise UserError(f"`{model}` has recurrent layers, for which heads cannot be trained: pick another model")
        dtype = configuration.kv_dtype(config, checkpoint.float32)
        self.pages = Pages(shape.layers, shape.kv_heads, config.page_size, shape.head_dim, dtype)
        self._logits = torch.empty(0, device=self.device.torch_device)  # buffer, as large as the largest pack so far

    @torch.no_grad()
    def forward(self, pack: Pack, aux_layers: Collection[int] = (), with_logits: bool = True) -> TargetOutputs:
        """Run the target over a pack on the host; padding gets zeros. Logits are valid until the next call.

        aux_layers: as in Model.forward. Without logits, `TargetOutputs.logits` has no columns.
        """
        layout = layout_of(pack, self.pages.page_size)
        self._check(layout)
        if layout.pages > self.pages.count:
            self.pages.allocate(layout.pages, self.device)
        shape, width = tuple(pack.tokens.shape), self.model.config.width
        layers = tuple(sorted(set(aux_layers)))
        on_device = pack.to(self.device.torch_device)
        states = torch.zeros(
            1 + len(layers), shape[0] * shape[1], width, device=self.device.torch_device
        )  # [1 + aux layers, B * L, E]
        for start in range(0, len(layout.tokens), self.tokens):
            end = min(start + self.tokens, len(layout.tokens))
            rows = self.device.upload(layout.rows[start:end], torch.int64)
            hidden, aux_states = self.model.forward(
                self._batch(layout, start, end), self.pages.layers, layers
            )  # [T, E]
            for state, computed in zip(states, (hidden, *aux_states), strict=True):
                state.index_copy_(0, rows, computed)
        last = self.model.ops.rms_norm(states[0], self.model.norm, self.model.config.stream_eps)  # [B * L, E]
        logits = self._head(states[0]) if with_logits else states.new_empty(shape[0] * shape[1], 0)  # [B * L, V]
        by_layer = {layer: state.view(*shape, width) for layer, state in zip(layers, states[1:], strict=True)}
        return TargetOutputs(on_device, by_layer, last.view(*shape, width), logits.view(*shape, -1))

    def info(self, token_counts: Tensor) -> TargetInfo:
        """Describe the target for draft heads. token_counts [V] int64: how often it wrote each token."""
        model = self.model
        embedding = self._dequantized(model.embedding, model.embedding_scale)
        shared = model.head is model.embedding and model.embedding_scale == 1
        return TargetInfo(
            model=self.name,
            config=model.config,
            embedding=embedding,
            lm_head=embedding if shared else self._dequantized(model.head, 1.0),
            aux_layers=default_aux_layers(model),
            token_counts=token_counts,
            torch_device=self.device.torch_device,
            weights=self._weight,
        )

    def _weight(self, name: str) -> Tensor:
        weight = open_checkpoint(self.name).weight(name)
        return weight.data.float() if weight.data.is_floating_point() else dequantize(weight)

    def _dequantized(self, matrix: object, scale: float) -> Tensor:
        """Read all rows of a table as the kernels do: [V, E] f32."""
        everything = self.device.upload(np.arange(self.model.config.vocabulary), torch.int32)
        return self.model.ops.embed(matrix, everything, scale)

    def _head(self, hidden: Tensor) -> Tensor:
        """Compute logits of states before the final norm: [R, E] to [R, V] f32. Zeros at padding stay zeros."""
        rows, vocabulary = len(hidden), self.model.config.vocabulary
        if self._logits.numel() < rows * vocabulary:
            self._logits = torch.empty(
                0, device=self.device.torch_device
            )  # frees the old buffer first: both may not fit
            self._logits = torch.empty(rows * vocabulary, device=self.device.torch_device)
        logits = self._logits[: rows * vocabulary].view(rows, vocabulary)
        for start in range(0, rows, self.tokens):
            end = start + self.tokens
            self.model.logits(hidden[start:end], logits[start:end])
        return logits

    def _batch(self, layout: PackLayout, start: int, end: int) -> Batch:
        """Build the batch of tokens [start, end). A document may continue in the next batch: its KV stays."""
        first, last = np.searchsorted(layout.starts, (start, end - 1), "right") - 1
        starts = np.clip(layout.starts[first : last + 2], start, end) - start
        tables = np.minimum(layout.first_pages[first : last + 1, None] + np.arange(layout.width), layout.pages - 1)

        def upload(values: Array) -> Tensor:
            return self.device.upload(values, torch.int32)

        return Batch(
            tokens=upload(layout.tokens[start:end]),
            positions=upload(layout.positions[start:end]),
            slots=upload(layout.slots[start:end]),
            query_starts=upload(starts),
            page_tables=upload(tables),
        )

    def _check(self, layout: PackLayout) -> None:
        shape = self.model.config
        unknown = layout.tokens[(layout.tokens < 0) | (layout.tokens >= shape.vocabulary)]
        if len(unknown):
            raise UserError(
                f"a document holds token {unknown[0]}, but the vocabulary of `{self.name}` ends at "
                f"{shape.vocabulary - 1}: train on answers that this model wrote"
            )
        longest = int(layout.positions.max(initial=-1)) + 1
        if longest > shape.context:
            raise UserError(
                f"a document has {longest} tokens, but `{self.name}` was trained for {shape.context}: "
                f"pack rows of at most {shape.context}"
            )


@dataclass(frozen=True)
class PackLayout:
    """The documents of a pack, concatenated without padding, each with its own pages. T: all tokens."""

    tokens: Array  # [T]
    positions: Array  # [T]
    slots: Array  # [T]
    rows: Array  # [T]: index of each token in the flattened pack
    starts: Array  # [documents + 1]
    first_pages: Array  # [documents]; a document has consecutive pages
    width: int  # pages of the longest document
    pages: int


def layout_of(pack: Pack, page_size: int) -> PackLayout:
    """Concatenate the documents of a pack and assign pages to them."""
    documents, positions = pack.documents.numpy(), pack.positions.numpy()
    # Padding (-1) before each row, so that its first document also counts as a start.
    previous = np.pad(documents, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    rows = np.flatnonzero(documents.ravel() >= 0)  # [T]
    is_start = (documents != previous).ravel()[rows]  # [T]
    numbers = np.cumsum(is_start) - 1  # [T]: the document of each token
    positions = positions.ravel()[rows]
    assert np.array_equal(is_start, positions == 0), "positions of a pack must count from 0 in each document"
    starts = np.append(np.flatnonzero(is_start), len(rows))  # [documents + 1]
    needed = -(-np.diff(starts) // page_size)  # [documents]
    first_pages = np.cumsum(needed) - needed
    return PackLayout(
        tokens=pack.tokens.numpy().ravel()[rows],
        positions=positions,
        slots=first_pages[numbers] * page_size + positions,
        rows=rows,
        starts=starts,
        first_pages=first_pages,
        width=int(needed.max(initial=1)),
        pages=int(needed.sum()),
    )


def default_aux_layers(model: Model) -> tuple[int, ...]:
    """Return the model's default aux layers, or evenly spaced ones if it has too few layers for the default."""
    try:
        return model.default_aux_layers()
    except UserError:
        layers = model.config.layers
        return tuple(sorted({-(-layers * part // 4) for part in (1, 2, 3)}))
