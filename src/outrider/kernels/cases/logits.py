"""Cases of logits: processors, masks, sampling, log-probabilities. Items are rows of logits. See case.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, inf, nan

from ..protocol import Kernels
from ..structures import LogitsProcessors
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
