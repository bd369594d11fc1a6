"""`outrider bench speed`: what a step costs, beside the memory bandwidth that bounds it, in one run.

The rounds are interleaved (bandwidth, decode, verification, prefill, again), so that a disturbance of the machine
falls on all figures alike.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..engine import LLM
from ..kernels import cpu
from ..types import Guess, Request, Row, SamplingParams, Step
from .bandwidth import Reader
from .machine import describe

WIDTHS = (1, 2, 4, 8, 16)  # tokens of one row, as verification uses them
REPEATS = 5


@dataclass(frozen=True)
class Plan:
    rounds: int = 5
    tokens: int = 64
    batches: Sequence[int] = (1, 4, 16)
    prompt_tokens: int = 128


@dataclass
class Samples:
    """One list a figure, one entry a round."""

    bandwidth: list[float] = field(default_factory=list)
    decode: dict[int, list[float]] = field(default_factory=dict)  # batch: seconds per step
    host: list[float] = field(default_factory=list)  # seconds per step outside the kernels, batch 1
    fraction: list[float] = field(default_factory=list)
    steps: dict[int, list[float]] = field(default_factory=dict)  # query tokens: seconds per step
    prefill: list[float] = field(default_factory=list)  # tokens per second


def prompt(llm: LLM, tokens: int, dice: random.Random) -> list[int]:
    """Random ids: two prompts share no prefix that the cache could answer."""
    return [dice.randrange(llm.engine.model.config.vocabulary) for _ in range(tokens)]


def first_token(llm: LLM) -> float:
    """Seconds from a short prompt to its first token, on an engine that has not run yet."""
    begin = time.perf_counter()
    llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    return time.perf_counter() - begin


def decode(llm: LLM, batch: int, plan: Plan, dice: random.Random) -> tuple[float, float]:
    """Seconds per step and of these outside the kernels, `batch` requests decoding side by side."""
    params = SamplingParams(max_tokens=plan.tokens, temperature=0, ignore_eos=True)
    names = [llm.engine.add(prompt(llm, plan.prompt_tokens, dice), params) for _ in range(batch)]
    waiting = set(names)
    while waiting:
        waiting -= {output.request_id for output in llm.engine.step() if output.completions[0].token_ids}
    llm.engine.reset_times()
    before = cpu.busy_seconds()
    while len(llm.engine.families) == batch:
        llm.engine.step()
    times, busy = llm.engine.times, cpu.busy_seconds() - before
    for name in names:
        llm.engine.abort(name)
    return times.seconds / times.steps, (times.seconds - busy) / times.steps


def verify(llm: LLM, plan: Plan, dice: random.Random) -> dict[int, float]:
    """Seconds of a step that runs 1, 2, 4, ... tokens of one request, all but the first of them drafted."""
    engine = llm.engine
    tokens = prompt(llm, plan.prompt_tokens + max(WIDTHS), dice)
    name = engine.add(tokens, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    request = engine.families[name].transcripts[0].request
    while not request.output:
        engine.step()
    # A width's repeats are short: the best of a few is the step that nothing interrupted.
    found = {w: min(time_step(llm, request, plan.prompt_tokens, w) for _ in range(REPEATS)) for w in WIDTHS}
    engine.abort(name)
    return found


def time_step(llm: LLM, request: Request, start: int, width: int) -> float:
    """Verify `width` - 1 tokens of the prompt as if they had been drafted: their pages are there already."""
    tokens = request.prompt[start : start + width]
    row = Row(request, start, tokens[:1], sample=True, guess=Guess(tokens[1:]) if width > 1 else None)
    begin = time.perf_counter()
    llm.engine.runner.step(Step([row]))
    return time.perf_counter() - begin


def prefill(llm: LLM, plan: Plan, dice: random.Random) -> float:
    """Prompt tokens per second, the first token included."""
    tokens = prompt(llm, plan.prompt_tokens, dice)
    begin = time.perf_counter()
    llm.generate([tokens], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    return len(tokens) / (time.perf_counter() - begin)


def one_round(llm: LLM, reader: Reader, plan: Plan, dice: random.Random, samples: Samples) -> None:
    bandwidth = reader.read().bytes_per_second
    samples.bandwidth.append(bandwidth)
    for batch in plan.batches:
        seconds, host = decode(llm, batch, plan, dice)
        samples.decode.setdefault(batch, []).append(seconds)
        if batch == 1:
            samples.host.append(host)
            samples.fraction.append(llm.engine.weight_bytes / bandwidth / seconds)
    for width, seconds in verify(llm, plan, dice).items():
        samples.steps.setdefault(width, []).append(seconds)
    samples.prefill.append(prefill(llm, plan, dice))


def measure(llm: LLM, plan: Plan) -> dict[str, Any]:
    """All figures of one run; `llm` is fresh from loading."""
    first = first_token(llm)
    reader = Reader(llm.engine.weight_bytes)
    dice = random.Random(0)
    one_round(llm, reader, plan, dice, Samples())  # warm-up, not counted
    samples = Samples()
    for _ in range(plan.rounds):
        one_round(llm, reader, plan, dice, samples)
    return report(llm, plan, samples, first)


def report(llm: LLM, plan: Plan, samples: Samples, first: float) -> dict[str, Any]:
    one = median(samples.steps[1])
    return {
        "model": llm.plan.model,
        "backend": llm.plan.backend,
        "machine": describe(),
        "rounds": plan.rounds,
        "weight_bytes_per_step": llm.engine.weight_bytes,
        "load_seconds": llm.engine.load_seconds,
        "load_to_first_token_seconds": llm.engine.load_seconds + first,
        "bandwidth_gb_per_second": spread(samples.bandwidth, 1e-9),
        "fraction_of_bandwidth": spread(samples.fraction),
        "python_milliseconds_per_step": spread(samples.host, 1e3),
        "prefill_tokens_per_second": spread(samples.prefill),
        "decode": [
            {
                "batch": batch,
                "step_milliseconds": spread(seconds, 1e3),
                "tokens_per_second": spread([batch / one for one in seconds]),
            }
            for batch, seconds in samples.decode.items()
        ],
        "step": [
            {"tokens": width, "milliseconds": spread(seconds, 1e3), "relative_to_one": median(seconds) / one}
            for width, seconds in samples.steps.items()
        ],
    }


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float] | None:
    """The median of the rounds, with the lowest and the highest. None: not measured (no batch of one)."""
    if not values:
        return None
    scaled = [value * scale for value in values]
    return {"median": median(scaled), "low": min(scaled), "high": max(scaled)}
