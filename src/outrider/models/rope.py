"""Rotary embeddings: their description, as read from a config.json, and their tables.

A table pairs dimensions i and i + D / 2 of a head. If only the first R dimensions rotate (partial rotary), their pairs
are i and i + R / 2: `rotary_order` moves them to where the tables expect them, and the other pairs have the frequency
0, which leaves them as they are. The order of dimensions changes no dot product of queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from .fields import ConfigFields, positive

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
YARN_SLOW, YARN_FAST = 1.0, 32.0  # periods in the original context; the defaults of the paper
MAX_PERIODS = 1e6  # no context has more


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a layer. Layers with equal ones share their tables."""

    theta: float
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0  # linear, llama3, yarn: divides low frequencies
    low: float = 1.0  # llama3, yarn: frequencies with fewer periods in the original context are divided
    high: float = 4.0  # llama3, yarn: frequencies with more periods in the original context stay unchanged
    original_context: int = 0  # llama3, yarn, longrope: the context before it was extended
    dims: int = 0  # leading dimensions of a head that rotate; 0: all
    attention_factor: float = 1.0  # yarn, longrope: multiplies cosines and sines
    truncate: bool = True  # yarn: the range between `low` and `high` begins and ends at whole dimensions
    short: tuple[float, ...] = ()  # longrope: divisors of the frequencies, within the original context
    long: tuple[float, ...] = ()  # longrope: the same for longer contexts


def read_rope(parameters: Mapping[str, Any], fields: ConfigFields, head_dim: int) -> Rope:
    """Read a rotary embedding from `rope_parameters` or the older `rope_scaling`, with `rope_theta` among them."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind in ("su", "yarn") and "short_factor" in parameters:  # names that early Phi-3 checkpoints have
        kind = "longrope"
    if kind not in ROPE_KINDS:
        raise UserError(f"the rope type `{kind}` is not supported: expected one of {', '.join(ROPE_KINDS)}")
    if parameters.get("mrope_section"):
        raise UserError("positions with several axes (`mrope_section`) are not supported: pick a model of text alone")
    theta, dims = positive(parameters.get("rope_theta"), "rope_theta"), _rotary_dims(parameters, fields, head_dim)
    if kind == "default":
        return Rope(theta, dims=dims)
    if kind == "longrope":
        return _read_longrope(theta, dims, parameters, fields, head_dim)
    original = _original_context(parameters, fields) if kind != "linear" else 0
    factor = parameters.get("factor")
    if kind == "yarn" and factor is None:
        factor = fields.count("max_position_embeddings") / original
    factor = positive(factor, "factor")
    if kind == "linear":
        return Rope(theta, kind, factor, dims=dims)
    if kind == "yarn":
        slow = positive(parameters.get("beta_slow") or YARN_SLOW, "beta_slow")
        fast = positive(parameters.get("beta_fast") or YARN_FAST, "beta_fast")
        if theta == 1 or max(slow, fast) > MAX_PERIODS:
            raise UserError(
                f"the model's configuration says `beta_slow` is {slow}, `beta_fast` {fast} and `rope_theta` {theta}: "
                "no rope of the type `yarn` has these"
            )
        scale, truncate = _yarn_attention_factor(parameters, factor), bool(parameters.get("truncate", True))
        return Rope(theta, kind, factor, slow, fast, original, dims, scale, truncate)
    low = positive(parameters.get("low_freq_factor"), "low_freq_factor")
    high = positive(parameters.get("high_freq_factor"), "high_freq_factor")
    if low == high:
        raise UserError("the model's configuration gives `low_freq_factor` and `high_freq_factor` the same value")
    return Rope(theta, kind, factor, low, high, original, dims)


def _rotary_dims(parameters: Mapping[str, Any], fields: ConfigFields, head_dim: int) -> int:
    """Return how many leading dimensions of a head rotate; 0: all."""
    part = parameters.get("partial_rotary_factor", fields.values.get("partial_rotary_factor"))
    if part is None or part == 1:
        return 0
    dims = int(head_dim * min(positive(part, "partial_rotary_factor"), 2.0) + 1e-6)
    if not 2 <= dims <= head_dim or dims % 2:
        raise UserError(
            f"`partial_rotary_factor` is {part}, which is {dims} of {head_dim} dimensions of a head: expected an even "
            "number of them"
        )
    return 0 if dims == head_dim else dims


def _original_context(parameters: Mapping[str, Any], fields: ConfigFields) -> int:
    name = "original_max_position_embeddings"
    stated = parameters.get(name) or fields.values.get(name) or fields.values.get("max_position_embeddings")
    count = int(positive(stated, name))
    if count < 2:
        raise UserError(f"the model's configuration says `{name}` is {stated}: expected at least 2 positions")
    return count


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    if (stated := parameters.get("attention_factor")) is not None:
        return positive(stated, "attention_factor")

    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if above and below:
        return of(positive(above, "mscale")) / of(positive(below, "mscale_all_dim"))
    multiplier = parameters.get("attn_factor")  # as in vLLM; transformers does not read it
    return of(1) if multiplier is None else of(1) * positive(multiplier, "attn_factor")


def _read_longrope(theta: float, dims: int, parameters: Mapping[str, Any], fields: ConfigFields, head_dim: int) -> Rope:
    divisors = []
    for name in ("short_factor", "long_factor"):
        values = parameters.get(name)
        count = (dims or head_dim) // 2
        if not isinstance(values, list) or len(values) != count:
            given = f"{len(values)} numbers" if isinstance(values, list) else repr(values)
            raise UserError(f"the model's configuration says `{name}` is {given}: expected a list of {count} numbers")
        divisors.append(tuple(positive(value, name) for value in values))
    original = _original_context(parameters, fields)
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        factor = parameters.get("factor") or fields.count("max_position_embeddings") / original
        growth = math.log(max(positive(factor, "factor"), 1.0))
        attention_factor = math.sqrt(1 + growth / math.log(original)) if growth else 1.0
    attention_factor = positive(attention_factor, "attention_factor")
    short, long = divisors
    return Rope(
        theta,
        "longrope",
        original_context=original,
        dims=dims,
        attention_factor=attention_factor,
        short=short,
        long=long,
    )


def rope_frequencies(rope: Rope, head_dim: int, positions: int = 0) -> Tensor:
    """Return the radians per position of each pair of dimensions, 0 for pairs that do not rotate: [D / 2].

    positions: the context that the tables are for. LongRoPE has other frequencies beyond its original context.
    """
    dims = rope.dims or head_dim
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        plain = plain / rope.factor
    elif rope.kind == "llama3":
        plain = _llama3_frequencies(plain, rope)
    elif rope.kind == "yarn":
        plain = _yarn_frequencies(plain, rope, dims)
    elif rope.kind == "longrope":
        plain = plain / torch.tensor(rope.long if positions > rope.original_context else rope.short)
    return torch.nn.functional.pad(plain, (0, (head_dim - dims) // 2))


def _llama3_frequencies(plain: Tensor, rope: Rope) -> Tensor:
    """Divide the low frequencies, keep the high ones, and interpolate in between."""
    wavelength = 2 * math.pi / plain
    blend = (rope.original_context / wavelength - rope.low) / (rope.high - rope.low)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    slow = wavelength > rope.original_context / rope.low
    fast = wavelength < rope.original_context / rope.high
    return torch.where(slow, plain / rope.factor, torch.where(fast, plain, blended))


def _yarn_frequencies(plain: Tensor, rope: Rope, dims: int) -> Tensor:
    """Do the same with a blend that is linear in the dimension instead of the frequency."""

    def dimension(periods: float) -> float:
        return dims * math.log(rope.original_context / (periods * 2 * math.pi)) / (2 * math.log(rope.theta))

    begin, end = dimension(rope.high), dimension(rope.low)
    if rope.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, dims - 1)
    end += 0.001 if begin == end else 0
    kept = 1 - ((torch.arange(dims // 2, dtype=torch.float32) - begin) / (end - begin)).clamp(0, 1)
    return plain / rope.factor * (1 - kept) + plain * kept  # rounded as in transformers


def cos_sin_tables(rope: Rope, head_dim: int, positions: int, context: int = 0) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, [positions, D / 2] f32 each. context: by which LongRoPE chooses; 0: `positions`."""
    rates = rope_frequencies(rope, head_dim, context or positions)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * rates
    cos, sin = angles.cos(), angles.sin_()
    if rope.attention_factor != 1:
        rotated = (rope.dims or head_dim) // 2
        cos[:, :rotated] *= rope.attention_factor
        sin[:, :rotated] *= rope.attention_factor
    return cos, sin


def fit_rope(rope: Rope, head_dim: int, other: int) -> Rope | None:
    """Return a rope of heads of `head_dim` dimensions for heads of `other`; None: LongRoPE has factors for one size."""
    if head_dim == other or not (rope.dims or rope.short):
        return rope
    return None if rope.short else replace(rope, dims=2 * (rope.dims * other // head_dim // 2))


def rotary_order(rope: Rope | None, head_dim: int) -> list[int] | None:
    """Return which dimension of a head goes where so that rotating pairs are D / 2 apart; None: they are."""
    if rope is None or not rope.dims:
        return None
    rotating, still = list(range(rope.dims)), list(range(rope.dims, head_dim))
    first, second = len(rotating) // 2, len(still) // 2
    return rotating[:first] + still[:second] + rotating[first:] + still[second:]
