"""Cases of layers: matrices, norms, attention over pages, MLPs. See case.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..protocol import Kernels
from ..quantization import FORMATS, row_bytes
from ..structures import Activation
from . import inputs as make
from .case import TOLERANCE, Case, Run, beside, pick
from .inputs import BIASES, HEAD_NORMS, MODEL, SMALL, Shape

# Rows of (tokens in the cache, tokens in this step): decoding, a chunk, a fresh prompt, several pages.
MIXED = ((0, 1), (5, 3), (0, 19), (33, 1), (47, 2))
EXPERT = Shape(inner=256)
WIDE_EXPERT = Shape(width=1024, inner=384)
INPUT_SCALES = {"swiglu_oai": 8.0}  # so large that its limits matter
LONG = ((700, 1), (255, 1), (256, 3), (511, 2), (40, 1))


def linear(kind: str, rows: int, outputs: int, inputs: int, timed: bool = False) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        matrix = ops.matrix(make.random_weight(random, kind, outputs, inputs))
        x = make.normal(random, rows, inputs)  # [T, K]
        return lambda items: (ops.linear(pick(x, items), matrix),)

    name = f"{kind} {rows}x{outputs}x{inputs}"
    return Case("linear", name, rows, TOLERANCE[kind], build, outputs * row_bytes(kind, inputs), timed)


def matrix(kind: str) -> Case:
    """Multiply with unit rows, which returns every weight of the packed matrix."""

    def build(ops: Kernels, seed: int) -> Run:
        packed = ops.matrix(make.random_weight(make.generator(seed), kind, 37, 256))
        return lambda items: (ops.linear(pick(torch.eye(256), items), packed),)

    return Case("matrix", kind, 256, TOLERANCE[kind], build)


def vector() -> Case:
    """A norm weight copied to the device once."""

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        x, weight = make.normal(random, 3, 64), ops.vector(make.normal(random, 64))
        return lambda items: (ops.rms_norm(pick(x, items), weight, 1e-6),)

    return Case("vector", "of a norm", 3, 1e-5, build)


def embed(kind: str) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        table = ops.matrix(make.random_weight(make.generator(seed), kind, 101, 256))
        tokens = torch.tensor([0, 100, 3, 3, 64, 17, 99], dtype=torch.int32)
        return lambda items: (ops.embed(table, pick(tokens, items), 1.5),)

    return Case("embed", kind, 7, TOLERANCE[kind], build)


def rms_norm(rows: int, width: int) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        x, weight = 3 * make.normal(random, rows, width), make.normal(random, width)
        return lambda items: (ops.rms_norm(pick(x, items), weight, 1e-6),)

    return Case("rms_norm", f"{rows}x{width}", rows, 1e-5, build)


def norm_linear(kind: str, rows: int, outputs: int, width: int) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        handle = ops.matrix(make.random_weight(random, kind, outputs, width))
        x, weight = make.normal(random, rows, width), make.normal(random, width)  # [T, E], [E]
        return lambda items: (ops.norm_linear(pick(x, items), weight, 1e-6, handle),)

    return Case("norm_linear", f"{kind} {rows}x{outputs}x{width}", rows, TOLERANCE[kind], build)


def soft_cap(rows: int, width: int) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        x = 9 * make.normal(make.generator(seed), rows, width)
        x[0, :4] = torch.tensor([0.0, 1e-3, 1e30, -torch.inf])

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            out = pick(x, items)
            ops.soft_cap(out, 5.0)
            return (out,)

        return run

    return Case("soft_cap", f"{rows}x{width}", rows, 1e-5, build)


def project_qkv(
    name: str,
    options: Sequence[str] = (),
    kind: str = "f32",
    dtype: torch.dtype = torch.float32,
    shape: Shape = SMALL,
    op: str = "project_qkv",
    lora: bool = False,
) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        weights, batch = make.attention_weights(random, kind, shape, options), make.random_batch(random, MIXED)
        if lora:
            weights = make.with_attention_lora(random, ops, weights)
            batch = replace(batch, adapters=make.random_adapters(random, len(batch.tokens)))
        layer = ops.attention_layer(weights)
        pages = make.random_pages(random, batch, shape, dtype)
        x = make.normal(random, len(batch.tokens), shape.width)  # [T, E]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            part = batch if items is None else make.take_tokens(batch, items)
            queries = ops.project_qkv(pick(x, items), layer, part, pages)
            return queries, *make.stored(pages, part.slots)

        return run

    return Case(op, name, sum(queries for _, queries in MIXED), beside(kind, dtype, stores=True), build)


def attend(
    name: str,
    kind: str = "f32",
    dtype: torch.dtype = torch.float32,
    rows: Sequence[tuple[int, int]] = MIXED,
    shape: Shape = SMALL,
    options: Sequence[str] = (),
    window: int = 0,
    soft_cap: float = 0.0,
    timed: bool = False,
    lora: bool = False,
) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        weights = make.attention_weights(random, kind, shape, options, window, soft_cap=soft_cap)
        batch = make.random_batch(random, rows)
        if lora:
            weights = make.with_attention_lora(random, ops, weights)
            batch = replace(batch, adapters=make.random_adapters(random, len(batch.tokens)))
        layer = ops.attention_layer(weights)
        pages = make.random_pages(random, batch, shape, dtype)
        # Large queries, so that attention is sharp and a wrong key shows.
        queries = 3 * make.normal(random, len(batch.tokens), shape.heads * shape.head_dim)  # [T, H * D]
        x = make.normal(random, len(batch.tokens), shape.width)  # [T, E]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            part = batch if items is None else make.take_tokens(batch, items)
            out = pick(x, items)
            ops.attend(pick(queries, items), layer, part, pages, out)
            return (out,)

        return run

    keys = sum(min(context + count, window or context + count) for context, count in rows)
    size = shape.attention_bytes(keys, kind, dtype)
    return Case("attend", name, sum(count for _, count in rows), beside(kind, dtype), build, size, timed)


def mlp(
    kind: str,
    activation: Activation,
    options: Sequence[str] = ("norm",),
    tokens: int = 5,
    shape: Shape = SMALL,
    timed: bool = False,
    op: str = "mlp",
    lora: bool = False,
) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        weights, adapters = make.mlp_weights(random, kind, shape, activation, options), None
        if lora:
            weights = make.with_mlp_lora(random, ops, weights)
            adapters = make.random_adapters(random, tokens)
        layer = ops.mlp_layer(weights)
        x = INPUT_SCALES.get(activation, 1.0) * make.normal(random, tokens, shape.width)  # [T, E]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            out = pick(x, items)
            ops.mlp(out, layer, None if adapters is None else pick(adapters, items))
            return (out,)

        return run

    size = 2 * shape.inner * row_bytes(kind, shape.width) + shape.width * row_bytes(kind, shape.inner)
    name = " ".join([kind, activation, f"{tokens}x{shape.width}x{shape.inner}", *options, *(["adapters"] * lora)])
    return Case(op, name, tokens, TOLERANCE[kind], build, size, timed)


def moe(
    kind: str,
    options: Sequence[str] = ("norm", "normalized"),
    tokens: int = 5,
    experts: int = 8,
    top_k: int = 3,
    activation: Activation = "silu",
    shape: Shape = EXPERT,
    timed: bool = False,
    op: str = "moe",
) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        layer = ops.moe_layer(make.moe_weights(random, kind, shape, experts, top_k, activation, options))
        x = INPUT_SCALES.get(activation, 1.0) * make.normal(random, tokens, shape.width)  # [T, E]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            out = pick(x, items)
            ops.moe(out, layer)
            return (out,)

        return run

    one = 2 * shape.inner * row_bytes(kind, shape.width) + shape.width * row_bytes(kind, shape.inner)
    name = " ".join([kind, activation, f"{tokens}x{shape.width}x{shape.inner}", f"{top_k} of {experts}", *options])
    return Case(op, name, tokens, 2 * TOLERANCE[kind], build, min(top_k * tokens, experts) * one, timed)


def layer_stack(op: str, lora: bool = False) -> Case:
    """Run layers with MLPs and with experts in one call, so that each reads the output of the one before."""
    shape, rows = SMALL, ((0, 1), (20, 1), (7, 1), (33, 1))  # single tokens: each can be run without the others

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        layers: list[tuple[object, object]] = []
        for _ in range(2):
            attention = make.attention_weights(random, "f32", shape, ["norm", "rotary"])
            perceptron = make.mlp_weights(random, "f32", shape, "silu", ["norm"])
            if lora:
                attention = make.with_attention_lora(random, ops, attention)
                perceptron = make.with_mlp_lora(random, ops, perceptron)
            layers.append((ops.attention_layer(attention), ops.mlp_layer(perceptron)))
        attention = make.attention_weights(random, "f32", shape, ["norm", "rotary"])
        mixture = make.moe_weights(random, "f32", EXPERT, 4, 2, options=["norm"])
        layers.append((ops.attention_layer(attention), ops.moe_layer(mixture)))
        batch = make.random_batch(random, rows)
        if lora:
            batch = replace(batch, adapters=torch.tensor([3, -1, 0, 1], dtype=torch.int32))
        storage = [make.random_pages(random, batch, shape, torch.float32) for _ in layers]
        x = make.normal(random, len(batch.tokens), shape.width)  # [T, E]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            out = pick(x, items)
            pages = [make.copy_pages(kept) for kept in storage]
            part = batch if items is None else make.take_tokens(batch, items)
            ops.run_layers(out, ops.layer_stack(layers, pages), part)
            return (out,)

        return run

    return Case(op, "three layers" + ", adapters" * lora, sum(count for _, count in rows), 2 * TOLERANCE["f32"], build)


EVERYTHING = ("norm", "post_norm", "output_bias", "rotary", *BIASES, *HEAD_NORMS)


def _all() -> list[Case]:
    half, brain, int8, fp8 = torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
    found = [matrix(kind) for kind in FORMATS]
    found += [embed(kind) for kind in FORMATS]
    found += [linear(kind, rows, 52, 512) for kind in FORMATS for rows in (1, 3, 16, 40)]
    # Row counts for which level amx has kernels of their own, and an odd number of groups of 32 inputs.
    found += [
        linear(kind, rows, 20, 256) for kind in FORMATS if FORMATS[kind].dtype is None for rows in (4, 5, 6, 8, 12)
    ]
    found += [linear(kind, rows, 20, 224) for kind in ("q4_0", "q4_1", "q8_0") for rows in (4, 7)]
    found += [linear("f32", 3, 33, 100), linear("f16", 2, 16, 31), linear("bf16", 2, 7, 65), linear("q8_0", 5, 1, 32)]
    found += [linear(kind, rows, 1536, 768, timed=True) for kind in FORMATS for rows in (1, 16)]
    found += [rms_norm(1, 64), rms_norm(17, 576), rms_norm(3, 100)]
    found += [soft_cap(3, 101), soft_cap(17, 1000)]
    found += [norm_linear("f32", 3, 40, 64), norm_linear("q8_0", 17, 100, 96)]
    found += [
        project_qkv("plain"),
        project_qkv("norm, rotary", ["norm", "rotary"]),
        project_qkv("bias", ["rotary", *BIASES]),
        project_qkv("head norms", ["norm", "rotary", *HEAD_NORMS]),
        project_qkv("norms over all heads", ["norm", "rotary", "whole_norms", *HEAD_NORMS]),
        project_qkv("norms over all heads, bias", ["whole_norms", *HEAD_NORMS, *BIASES], "q8_0", half),
        project_qkv("one key/value head", ["norm", "rotary"], shape=Shape(heads=6, kv_heads=1, head_dim=32)),
        project_qkv("f16 pages", ["norm", "rotary"], dtype=half),
        project_qkv("bf16 pages", ["norm", "rotary"], dtype=brain),
        project_qkv("int8 pages", ["norm", "rotary"], dtype=int8),
        project_qkv("int8 pages, bias", ["norm", "rotary", *BIASES], dtype=int8),
        project_qkv("fp8 pages", ["norm", "rotary", *BIASES], dtype=fp8),
        project_qkv("q4_1", ["norm", "rotary"], "q4_1", half),
        project_qkv("q8_0", ["norm", "rotary", *HEAD_NORMS], "q8_0", half),
        project_qkv("everything", EVERYTHING, op="attention_layer"),
        attend("plain"),
        attend("f16 pages", dtype=half),
        attend("bf16 pages", dtype=brain),
        attend("int8 pages", dtype=int8),
        attend("int8 pages, bias", options=BIASES, dtype=int8),
        attend("fp8 pages", dtype=fp8),
        attend("soft cap", soft_cap=2.0),
        attend("soft cap, int8 pages", soft_cap=2.0, dtype=int8),
        attend("soft cap, long, f16 pages", rows=LONG, dtype=half, soft_cap=2.0, window=300),
        attend("sinks", options=["sinks"]),
        attend("sinks, window 1", options=["sinks"], window=1),
        attend("sinks, long, f16 pages", rows=LONG, dtype=half, options=["sinks"], window=300),
        attend("sinks, long", rows=LONG, options=["sinks"]),
        attend("window 1", window=1),
        attend("window 20", window=20),
        attend("window 300, long", rows=LONG, window=300),
        attend("long", rows=LONG),
        attend("long, f16 pages", rows=LONG, dtype=half),
        attend("long, int8 pages", rows=LONG, dtype=int8),
        attend("window 300, long, fp8 pages", rows=LONG, window=300, dtype=fp8),
        attend("narrow heads, int8 pages", shape=Shape(heads=4, kv_heads=2, head_dim=8, width=32), dtype=int8),
        attend("no shared heads, int8 pages", shape=Shape(heads=3, kv_heads=3, head_dim=128, width=96), dtype=int8),
        attend("no shared heads, fp8 pages", shape=Shape(heads=3, kv_heads=3, head_dim=128, width=96), dtype=fp8),
        attend("one key/value head", shape=Shape(heads=6, kv_heads=1, head_dim=32)),
        attend("no shared heads", shape=Shape(heads=3, kv_heads=3, head_dim=128, width=96)),
        attend("wide heads", shape=Shape(heads=2, kv_heads=1, head_dim=256)),
        attend("narrow heads", shape=Shape(heads=4, kv_heads=2, head_dim=8, width=32)),
        attend("post norm, bias", options=["post_norm", "output_bias"]),
        attend("q4_1", "q4_1", half, options=["post_norm"]),
        attend("q8_0", "q8_0", half),
        attend("gate", options=["norm", "gate"]),
        attend("gate, q8_0", "q8_0", half, options=["gate", "post_norm"]),
        attend("1 token, 1024 keys", "q8_0", half, [(1023, 1)], MODEL, timed=True),
        attend("1 token, 1024 keys, int8 pages", "q8_0", int8, [(1023, 1)], MODEL, timed=True),
        attend("16 tokens, 1024 keys", "q8_0", half, [(1008, 16)], MODEL, timed=True),
        attend("16 tokens, 1024 keys, int8 pages", "q8_0", int8, [(1008, 16)], MODEL, timed=True),
    ]
    found += [mlp(kind, "silu") for kind in FORMATS]
    found += [
        mlp("f32", "gelu_tanh", []),
        mlp("f32", "swiglu_oai", ["gate_bias", "up_bias"]),
        mlp("f32", "gelu_tanh", ["norm", "post_norm"]),
        mlp("q4_0", "gelu_tanh", ["norm", "post_norm"], tokens=40),
        mlp("bf16", "silu", ["norm", "gate_bias", "up_bias", "down_bias", "post_norm"], tokens=17, op="mlp_layer"),
        mlp("q4_1", "silu", tokens=1, shape=MODEL, timed=True),
        mlp("q4_1", "silu", tokens=16, shape=MODEL, timed=True),
        *[moe(kind) for kind in FORMATS],
        moe("f32", [], tokens=1),
        moe("f32", ["norm", "shared"], activation="gelu_tanh"),
        moe("q4_0", ["norm", "post_norm", "normalized", "shared"], tokens=40),
        moe("q8_0", ["norm", "router_bias", "gate_bias", "up_bias", "down_bias"], tokens=17, op="moe_layer"),
        moe("mxfp4", ["normalized", "router_bias", "gate_bias", "up_bias", "down_bias"], activation="swiglu_oai"),
        moe("bf16", tokens=40, experts=3, top_k=3, shape=Shape(width=96, inner=80)),
        moe("q4_1", tokens=1, experts=64, top_k=8, shape=WIDE_EXPERT, timed=True),
        moe("q4_1", tokens=5, experts=64, top_k=8, shape=WIDE_EXPERT, timed=True),
        vector(),
        layer_stack("layer_stack"),
        layer_stack("run_layers"),
        layer_stack("run_layers", lora=True),
        project_qkv("adapters", ["norm", "rotary", *BIASES], op="lora_slots", lora=True),
        project_qkv("q8_0, adapters", ["norm", *HEAD_NORMS], "q8_0", half, op="set_lora", lora=True),
        attend("adapters", options=["post_norm", "output_bias"], lora=True),
        attend("q4_1, adapters", "q4_1", half, lora=True),
        mlp("f32", "gelu_tanh", ["norm", "post_norm", "gate_bias"], tokens=17, lora=True),
        mlp("q8_0", "silu", tokens=40, lora=True),
    ]
    return found


LAYER_CASES = _all()
