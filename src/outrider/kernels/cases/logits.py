"""Cases of logits: processors, masks, sampling, log-probabilities. Items are rows of logits, or texts. See case.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, inf, nan

from ..protocol import Kernels
from ..structures import (
    COUNTED,
    MARK_ALLOWED,
    MARK_BANNED,
    MARK_BIAS,
    MARK_END,
    MARK_PROMPT,
    ONLY_ALLOWED,
    PROCESSED,
    DecodeProcessors,
    LogitsProcessors,
)
from . import inputs as make
from .case import Case, Run, listed, pick
from .inputs import REQUEST_SETTINGS

SETTINGS: dict[str, list[dict[str, float]]] = {
    "greedy": [{"temperature": 0.0}] * 3,
    "gumbel": [{}, {"temperature": 0.3}, {"temperature": 2.0}, {"temperature": 1e-3}],
    "top-k": [{"top_k": 1}, {"top_k": 2, "temperature": 3.0}, {"top_k": 50}, {"top_k": 5000}],
    "top-p": [{"top_p": 1e-6}, {"top_p": 0.5}, {"top_p": 0.9, "temperature": 2.0}, {"top_p": 0.999}],
    "min-p": [{"min_p": 1.0}, {"min_p": 0.1, "temperature": 3.0}, {"min_p": 1e-4}],
    "mixture": [
        {"temperature": 0.0, "top_k": 7},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
        {"top_k": 3, "top_p": 0.99},
        {"top_p": 0.7, "min_p": 0.3},
        {},
    ],
}


def process_logits() -> Case:
    rows: list[tuple[bool, dict[int, tuple[float, float]]]] = [
        (False, {}),
        (False, {3: (1.3, 0.0), 0: (1.3, -0.5), 999: (0.7, 2.0)}),
        (True, {5: (1.0, 0.0), 77: (1.2, 1.0), 500: (1.0, 0.25)}),
        (False, {9: (1.0, -torch.inf), 10: (1.0, 0.0)}),
        (True, {}),
        (False, {token: (1.1, -0.1 * (token % 3)) for token in range(0, 1000, 7)}),
    ]

    def build(ops: Kernels, seed: int) -> Run:
        logits = 3 * make.normal(make.generator(seed), len(rows), 1000)  # [R, V]
        logits[5, 14] = -torch.inf

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            processors: LogitsProcessors = make.make_processors(
                rows if items is None else [rows[item] for item in items]
            )
            out = pick(logits, items)
            ops.process_logits(out, processors)
            return (out,)

        return run

    return Case("process_logits", "penalties, biases, bans, lists", len(rows), 1e-6, build)


def _decode_processors(seed: int, vocabulary: int) -> DecodeProcessors:
    """Return processors of seven texts: none, each kind alone, all of them."""
    random = make.generator(seed)
    kinds = [0, *[PROCESSED | COUNTED] * 2, *[PROCESSED] * 2, PROCESSED | ONLY_ALLOWED]
    kinds.append(PROCESSED | COUNTED | ONLY_ALLOWED)
    count = len(kinds)
    counts = torch.randint(-6, 4, (count, vocabulary), dtype=torch.int32, generator=random).clamp(min=0)
    counted = torch.tensor([kind & COUNTED for kind in kinds])[:, None] > 0
    marks = torch.where(counted, counts, 0)  # [B, V]
    bits = {MARK_PROMPT: (1, 6), MARK_BIAS: (2, 3, 6), MARK_BANNED: (3, 5, 6), MARK_END: (4, 6), MARK_ALLOWED: (5, 6)}
    for bit, texts in bits.items():
        for text in texts:
            marks[text] |= bit * torch.randint(0, 2, (vocabulary,), dtype=torch.int32, generator=random)
    bias = torch.randn(count, vocabulary, dtype=torch.float64, generator=random)
    penalties = torch.tensor([[1.0, 0.0, 0.0]] * count, dtype=torch.float64)
    penalties[1, 0], penalties[2, 1:] = 1.3, torch.tensor([0.7, 0.1])
    penalties[6] = torch.tensor([0.8, -0.3, 0.45])
    lengths = torch.tensor([0, 0, 0, 0, 12, 0, 40], dtype=torch.int32)
    return DecodeProcessors(marks, bias, penalties, lengths, torch.tensor(kinds, dtype=torch.int32))


def _take_texts(processors: DecodeProcessors, texts: list[int]) -> DecodeProcessors:
    return DecodeProcessors(*(part[texts].clone() for part in vars(processors).values()))


def process_decode_logits(name: str, width: int, vocabulary: int) -> Case:
    """Texts of 10 to 16 tokens, whose drafts repeat some tokens and end early."""
    processors = _decode_processors(5, vocabulary)
    count = processors.kinds.shape[0]

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        logits = 3 * make.normal(random, count, width + 1, vocabulary)
        logits[:, :, 3] = -inf
        drafts = torch.randint(0, 3, (count, width), dtype=torch.int32, generator=random)
        drafts[::2, width // 2 :] = -1
        positions = torch.arange(9, 9 + count, dtype=torch.int32)

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            texts = listed(items, count)
            out = logits[texts].flatten(0, 1)  # [R, V]
            ops.process_decode_logits(out, _take_texts(processors, texts), drafts[texts], positions[texts])
            return (out.view(len(texts), -1),)

        return run

    return Case("process_decode_logits", name, count, 1e-6, build)


def count_tokens(name: str, tokens: int, vocabulary: int) -> Case:
    processors = _decode_processors(6, vocabulary)
    count = processors.kinds.shape[0]

    def build(ops: Kernels, seed: int) -> Run:
        new = torch.randint(-1, min(vocabulary, 4), (count, tokens), dtype=torch.int32, generator=make.generator(seed))

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            texts = listed(items, count)
            taken = _take_texts(processors, texts)
            ops.count_tokens(taken, new[texts])
            return (taken.marks,)

        return run

    return Case("count_tokens", name, count, 0.0, build)


def mask_logits(name: str, rows: int, vocabulary: int, timed: bool = False) -> Case:
    """Masks for every other row, the last of them first."""

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        logits = 3 * make.normal(random, rows, vocabulary)  # [R, V]
        words = torch.randint(-(2**31), 2**31, (rows, -(-vocabulary // 32)), generator=random, dtype=torch.int32)
        words[0] = 0  # [R, W]: nothing is left
        words[-1, ::2] = -1

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            chosen = listed(items, rows)
            masked = [index for index, item in enumerate(chosen) if item % 2 == 0][::-1]
            out = pick(logits, items)
            masks = words[[chosen[index] for index in masked]]  # [M, W]
            ops.mask_logits(out, masks, torch.tensor(masked, dtype=torch.int32))
            return (out,)

        return run

    return Case("mask_logits", name, rows, 0.0, build, timed=timed)


def sample(name: str, settings: Sequence[dict[str, float]], vocabulary: int = 1000, timed: bool = False) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        logits = 2.5 * make.normal(make.generator(seed), len(settings), vocabulary)  # [R, V]
        if name.startswith("ties"):
            logits = logits.round()
        if name.startswith("banned"):
            logits[:, 5:] = -torch.inf
        sampling = make.make_sampling(settings, seed)

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            return (ops.sample(pick(logits, items), sampling if items is None else sampling.take(list(items))),)

        return run

    size = len(settings) * vocabulary * 4
    return Case("sample", f"{name} {len(settings)}x{vocabulary}", len(settings), 0.0, build, size, timed)


def top_logprobs(name: str, count: int, rows: int = 4, vocabulary: int = 1000, timed: bool = False) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        logits = 3 * make.normal(random, rows, vocabulary)  # [R, V]
        if name == "ties":
            logits = logits.round()
        if name == "banned":
            logits[:, 5:] = -torch.inf
        tokens = torch.randint(0, 5 if name == "banned" else vocabulary, (rows,), dtype=torch.int32, generator=random)

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            top = ops.top_logprobs(pick(logits, items), pick(tokens, items), count)
            return top.chosen, top.rank, top.values, top.tokens

        return run

    size = rows * vocabulary * 4
    return Case("top_logprobs", f"{name} {count} of {rows}x{vocabulary}", rows, 1e-5, build, size, timed)


def sample_children(name: str, count: int, rows: int, vocabulary: int, timed: bool = False) -> Case:
    settings = [{"temperature": 0.0}] * rows if name == "greedy" else [REQUEST_SETTINGS[at % 7] for at in range(rows)]

    def build(ops: Kernels, seed: int) -> Run:
        logits = 2.5 * make.normal(make.generator(seed), rows, vocabulary)  # [R, V]
        if name == "ties":
            logits = logits.round()
        if name == "banned":
            logits[:, 5:] = -inf
            logits[3], logits[4, :3], logits[5, 2] = -inf, nan, inf
        sampling = make.make_sampling(settings, seed)

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            part = sampling if items is None else sampling.take(list(items))
            found = ops.sample_children(pick(logits, items), part, count)
            return found.tokens, found.logprobs

        return run

    size = rows * vocabulary * 4
    return Case("sample_children", f"{name}, {count} of {rows}x{vocabulary}", rows, 1e-5, build, size, timed)


def _all() -> list[Case]:
    found = [
        process_logits(),
        process_decode_logits("without drafts", 0, 1000),
        process_decode_logits("five draft tokens", 5, 77),
        process_decode_logits("several blocks", 1, 2100),
        count_tokens("one token", 1, 100),
        count_tokens("a draft that repeats itself", 6, 100),
        mask_logits("5 rows", 5, 1000),
        mask_logits("whole words", 3, 2048),
        mask_logits("few tokens", 4, 7),
        mask_logits("a vocabulary", 8, 49_152, timed=True),
    ]
    found += [sample(name, settings) for name, settings in SETTINGS.items()]
    found += [sample(f"ties, {name}", settings) for name, settings in SETTINGS.items()]
    found += [sample(f"banned, {name}", settings) for name, settings in SETTINGS.items()]
    found += [
        sample("mixture", SETTINGS["mixture"] * 4, 7),
        sample("greedy", [{"temperature": 0.0}], 49_152, timed=True),
        sample("gumbel", [{}], 49_152, timed=True),
        sample("truncated", [{"top_k": 40, "top_p": 0.95}], 49_152, timed=True),
        top_logprobs("plain", 0),
        top_logprobs("plain", 5),
        top_logprobs("ties", 20),
        top_logprobs("banned", 8),
        top_logprobs("plain", 1000, 2),
        top_logprobs("plain", 5, 1, 49_152, timed=True),
    ]
    found += [
        *[
            sample_children(name, count, 14, 1000)
            for name in ("mixture", "greedy", "ties", "banned")
            for count in (1, 8)
        ],
        *[sample_children("mixture", count, 9, 77) for count in (0, 63, 64, 78)],
        sample_children("mixture", 4, 7, 2),
        sample_children("mixture", 64, 3, 8193),
        sample_children("mixture", 8, 8, 49_152, timed=True),
        sample_children("greedy", 8, 1, 49_152, timed=True),
        sample_children("warm", 8, 1, 49_152, timed=True),
    ]
    return found


LOGIT_CASES = _all()
