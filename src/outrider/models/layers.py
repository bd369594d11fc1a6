"""Build the layers of a backend from the tensors of a checkpoint, one matrix at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..errors import UserError
from ..kernels import AttentionWeights, Kernels, MlpWeights, Weight
from ..kernels.cpu import quantize_weight
from .config import ModelConfig
from .rope import Rope, cos_sin_tables, rotary_order

FLOATS = ("f32", "f16", "bf16")
UNUSED = "rotary_emb.inv_freq"
# The first matrix of an MTP module, as DeepSeek, Qwen and MiMo name it. Such modules belong to a drafter.
MTP_MODULE = re.compile(
    r"^(model\.layers\.\d+\.(?=eh_proj\.)|(?:model\.)?mtp\.(?=fc\.)|model\.mtp_layers\.(?=\d+\.input_proj\.))"
)
MAX_ROPE_BYTES = 2**30  # of a model's rope tables; 2**20 positions of 256 dimensions, more than published models need
SINKS = ("sinks", "sinks.weight")  # the second in GGUF files


class ModelCheckpoint(Protocol):
    """The checkpoint interface that models read: tensors by their Hugging Face names."""

    @property
    def config(self) -> dict[str, object]: ...  # as in config.json

    @property
    def norms_are_offset(self) -> bool: ...  # norm weights are stored minus 1

    def names(self) -> Iterable[str]: ...

    def weight(self, name: str) -> Weight: ...

    def release(self) -> None: ...  # the tensors read so far are packed: free their memory


class WeightReader:
    """Reads each tensor once, checks its shape, and tracks the tensors that were not read."""

    def __init__(self, checkpoint: ModelCheckpoint, ops: Kernels, quantize: str | None) -> None:
        self.checkpoint, self.ops, self.quantize = checkpoint, ops, quantize
        self.unread = set(checkpoint.names())
        self.stored_kinds: set[str] = set()  # of quantized matrices, on which `quantize` has no effect
        self.weight_bytes = 0  # of the matrices read so far that a step of one token reads, after quantization
        self.idle_bytes = 0  # of the experts that it does not read

    def has(self, name: str) -> bool:
        return name in self.unread

    def stored(self, name: str, *shape: int, transposed: bool = False) -> Weight:
        """Read a tensor as it is stored. transposed: floats [..., K, N], which become [..., N, K]; blocks are not."""
        if name not in self.unread:
            raise UserError(f"the checkpoint lacks the tensor `{name}` of shape {list(shape)}: fetch the model again")
        self.unread.discard(name)
        weight = self.checkpoint.weight(name)
        transposed = transposed and weight.kind in FLOATS
        expected = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        if tuple(weight.shape) != expected:
            raise UserError(
                f"the tensor `{name}` has the shape {list(weight.shape)}, but the configuration asks for "
                f"{list(expected)}: config and weights are not of the same model"
            )
        return replace(weight, shape=shape, data=weight.data.transpose(-1, -2)) if transposed else weight

    def matrix(self, name: str, *shape: int, fine: bool = False) -> Weight:
        """Read a matrix that every step reads, quantized if requested."""
        return self.counted(self.quantized(self.stored(name, *shape), fine))

    def matrices(self, module: str, rows: Mapping[str, int], fused: str, columns: int) -> list[Weight]:
        """Read matrices of a module, by name and number of rows: one tensor each, or all in the tensor `fused`."""
        if not self.has(f"{module}{fused}.weight"):
            return [self.matrix(f"{module}{name}.weight", count, columns) for name, count in rows.items()]
        whole = self.stored(f"{module}{fused}.weight", sum(rows.values()), columns)
        parts = torch.split(whole.data, list(rows.values()))
        found = [replace(whole, shape=(len(part), columns), data=part) for part in parts]
        return [self.counted(self.quantized(weight, fine=False)) for weight in found]

    def quantized(self, weight: Weight, fine: bool) -> Weight:
        """Quantize a float matrix if requested. A `fine` one keeps 8 bits if the others have fewer."""
        if self.quantize is None:
            return weight
        if weight.kind not in FLOATS:
            self.stored_kinds.add(weight.kind)
            return weight
        if not fine:  # a GPU is faster at it than the host
            weight = replace(weight, data=self.ops.vector(weight.data))
        return quantize_weight(weight, "int8" if fine else self.quantize)

    def counted(self, weight: Weight) -> Weight:
        """Count the bytes of a matrix that every step reads. Of embedding tables a step reads only a few rows."""
        self.weight_bytes += weight.data.nbytes
        return weight

    def count_experts(self, weights: Sequence[Weight], used: int, count: int) -> None:
        """Count the bytes of experts: a step of one token reads `used` of `count`."""
        total = sum(weight.data.nbytes for weight in weights)
        self.weight_bytes += total * used // count
        self.idle_bytes += total - total * used // count

    def vector(self, name: str, length: int) -> Tensor:
        """Read a vector as float32 [length]: a copy, so that the file need not stay mapped for it."""
        return self.floats(name, length)

    def row(self, name: str, length: int) -> Tensor:
        """Read a vector that Hugging Face stores as a matrix of one row, and GGUF as a vector."""
        is_matrix = self.has(name) and len(self.checkpoint.weight(name).shape) == 2
        return self.floats(name, *((1, length) if is_matrix else (length,))).flatten()

    def floats(self, name: str, *shape: int) -> Tensor:
        """Read a tensor as float32, as `vector` does."""
        weight = self.stored(name, *shape)
        if weight.kind not in FLOATS:
            raise UserError(f"the tensor `{name}` is quantized as `{weight.kind}`: expected floats")
        return self.ops.vector(weight.data.to(torch.float32, copy=True))

    def norm(self, name: str, length: int) -> Tensor:
        weight = self.vector(name, length)
        return weight + 1 if self.checkpoint.norms_are_offset else weight

    def finish(self, config: ModelConfig) -> None:
        """Refuse tensors that the model does not use: its output would be wrong without them."""
        if config.tied_head:
            self.unread.discard("lm_head.weight")
        modules = {match[1] for name in self.unread if (match := MTP_MODULE.match(name))}
        known = [name for name in self.unread if name.startswith(tuple(modules)) or name.endswith(UNUSED)]
        unknown = sorted(self.unread.difference(known))
        if unknown:
            shape = list(self.checkpoint.weight(unknown[0]).shape)
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise UserError(
                f"the checkpoint holds the tensor `{unknown[0]}` of shape {shape}{more}, which a "
                f"`{config.architecture}` model of this configuration does not have: check config.json"
            )


class RopeTables:
    """Rope tables, shared by layers with the same rope."""

    def __init__(self, config: ModelConfig, ops: Kernels, positions: int) -> None:
        self.config, self.ops, self.positions = config, ops, positions
        self.tables: dict[Rope, tuple[Tensor, Tensor]] = {}

    def of(self, layer: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return cosines and sines of a layer, [positions, D / 2] each; None for a layer without rope."""
        rope = self.config.ropes[layer]
        if rope is None:
            return None, None
        if rope not in self.tables:
            self._check_size()
            cos, sin = cos_sin_tables(rope, self.config.head_dim, self.positions)
            self.tables[rope] = self.ops.vector(cos), self.ops.vector(sin)
        return self.tables[rope]

    def _check_size(self) -> None:
        size = (len(self.tables) + 1) * self.positions * self.config.head_dim * 4  # fp32 cosines and sines
        if size > MAX_ROPE_BYTES:
            raise UserError(
                f"the rope tables of {self.positions} positions and {self.config.head_dim} dimensions would take "
                f"{size / 2**30:.1f} GiB, and {MAX_ROPE_BYTES // 2**30} GiB is the limit: pass a smaller `max_context` "
                "(the default is `max_position_embeddings` of the model)"
            )


def attention(
    config: ModelConfig,
    reader: WeightReader,
    layer: int,
    rope_tables: RopeTables,
    inputs: int | None = None,
    normed: bool = True,
) -> AttentionWeights:
    """Read the attention weights of a layer. Draft heads may have another input width, and no input norm."""
    prefix = f"model.layers.{layer}."
    module = prefix + "self_attn."
    width, head = config.width, config.head_dim
    inputs = inputs or width
    queries, keys = config.heads * head, config.kv_heads * head
    parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    # First, to check the shapes before allocating the rope tables.
    gate = None
    if config.gated_attention:
        query, gate = _query_and_gate(config, reader, module, inputs)
        key, value = (reader.matrix(f"{module}{name}.weight", keys, inputs) for name in ("k_proj", "v_proj"))
    else:
        query, key, value = reader.matrices(module, parts, "qkv_proj", inputs)
    cos, sin = rope_tables.of(layer)
    weights = AttentionWeights(
        query=query,
        key=key,
        value=value,
        output=reader.matrix(module + "o_proj.weight", width, queries),
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=head,
        scale=config.attention_scale,
        eps=config.stream_eps,
        window=config.windows[layer],
        soft_cap=config.attention_cap,
        norm=reader.norm(prefix + "input_layernorm.weight", width) if normed and config.pre_norms else None,
        cos=cos,
        sin=sin,
        gate=gate,
    )
    if config.post_norms:
        weights = replace(weights, post_norm=reader.norm(prefix + "post_attention_layernorm.weight", width))
    if config.head_norms or config.whole_norms:
        weights = replace(
            weights,
            query_norm=reader.norm(module + "q_norm.weight", queries if config.whole_norms else head),
            key_norm=reader.norm(module + "k_norm.weight", keys if config.whole_norms else head),
        )
    if config.qkv_bias:
        weights = replace(
            weights,
            query_bias=reader.vector(module + "q_proj.bias", queries),
            key_bias=reader.vector(module + "k_proj.bias", keys),
            value_bias=reader.vector(module + "v_proj.bias", keys),
        )
    if config.output_bias:
        weights = replace(weights, output_bias=reader.vector(module + "o_proj.bias", width))
    if config.sinks:
        name = next((name for name in SINKS if reader.has(module + name)), SINKS[0])
        weights = replace(weights, sinks=reader.vector(module + name, config.heads))
    order = rotary_order(config.ropes[layer], head)
    return weights if order is None else _reordered(weights, torch.tensor(order))


def _query_and_gate(config: ModelConfig, reader: WeightReader, module: str, inputs: int) -> tuple[Weight, Weight]:
    """Read the queries and gates of gated attention, which alternate by head in one matrix."""
    whole = reader.stored(module + "q_proj.weight", 2 * config.heads * config.head_dim, inputs)
    both = whole.data.view(config.heads, 2, config.head_dim, -1)
    parts = [
        replace(whole, shape=(config.heads * config.head_dim, inputs), data=both[:, index].flatten(0, 1))
        for index in range(2)
    ]
    query, gate = (reader.counted(reader.quantized(part, fine=False)) for part in parts)
    return query, gate


def _reordered(weights: AttentionWeights, order: Tensor) -> AttentionWeights:
    """Reorder the dimensions of each query and key head: dimension order[i] becomes dimension i."""

    def rows(weight: Weight, heads: int) -> Weight:
        return replace(weight, data=weight.data.view(heads, len(order), -1)[:, order].flatten(0, 1))

    def vector(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.view(-1, len(order))[:, order].flatten()

    return replace(
        weights,
        query=rows(weights.query, weights.heads),
        key=rows(weights.key, weights.kv_heads),
        query_norm=vector(weights.query_norm),
        key_norm=vector(weights.key_norm),
        query_bias=vector(weights.query_bias),
        key_bias=vector(weights.key_bias),
    )


def mlp(config: ModelConfig, reader: WeightReader, layer: int) -> MlpWeights:
    """Read the MLP weights of a layer."""
    prefix = f"model.layers.{layer}."
    module = prefix + "mlp."
    width, inner = config.width, config.mlp_width
    # With norms after attention, Llama's name of the norm before the MLP is that of the norm after attention.
    norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    fused, last = "gate_up_proj", "down_proj"
    if reader.has(prefix + "shared_mlp.input_linear.weight"):  # Granite 4
        module, fused, last = prefix + "shared_mlp.", "input_linear", "output_linear"
    gate, up = reader.matrices(module, {"gate_proj": inner, "up_proj": inner}, fused, width)
    weights = MlpWeights(
        gate=gate,
        up=up,
        down=reader.matrix(f"{module}{last}.weight", width, inner),
        activation=config.activation,
        eps=config.stream_eps,
        norm=reader.norm(f"{prefix}{norm}.weight", width) if config.pre_norms else None,
    )
    if config.post_norms:
        weights = replace(weights, post_norm=reader.norm(prefix + "post_feedforward_layernorm.weight", width))
    if config.mlp_bias:
        weights = replace(
            weights,
            gate_bias=reader.vector(module + "gate_proj.bias", inner),
            up_bias=reader.vector(module + "up_proj.bias", inner),
            down_bias=reader.vector(module + "down_proj.bias", width),
        )
    return weights


def embedding_and_head(
    config: ModelConfig, reader: WeightReader, ops: Kernels
) -> tuple[object, object, torch.dtype, str]:
    """Read embedding and LM head, one matrix if tied; return also the embedding's dtype and the head's format.

    Both are quantized to 8 bits at least: an error in the head changes every logit.
    """
    shape = (config.vocabulary, config.width)
    table = reader.stored("model.embed_tokens.weight", *shape)
    dtype = table.data.dtype
    table = reader.quantized(table, fine=True)
    embedding = ops.matrix(table)
    if config.tied_head:
        return embedding, embedding, dtype, reader.counted(table).kind
    head = reader.matrix("lm_head.weight", *shape, fine=True)
    return embedding, ops.matrix(head), dtype, head.kind
