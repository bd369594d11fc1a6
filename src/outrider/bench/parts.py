"""The single measurements of `outrider bench speed`, all from outside of the engine: tokens, and the time they took."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ..kernels import cpu
from ..llm import LLM
from ..request import Request, Row, Step
from ..types import Draft, SamplingParams, SpecStats

WIDTHS = (1, 2, 4, 5, 8, 16)  # tokens of one row, as verification uses them
REPEATS = 5
SPARE = 64  # tokens beyond a request's text that drafts may take, at most


@dataclass(frozen=True)
class Plan:
    rounds: int = 5
    tokens: int = 64
    batches: Sequence[int] = (1, 4, 16)
    prompt_tokens: int = 128

    @property
    def cache_tokens(self) -> int:
        """Room for all requests of the largest batch, twice: the rest of a device's memory is for the peers."""
        return 2 * max(self.batches) * (self.prompt_tokens + self.tokens + SPARE)


@dataclass(frozen=True)
class Decoded:
    """What decoding side by side came to."""

    seconds: float  # for one token of each request
    host: float  # of these, when no kernel ran
    spec_stats: SpecStats = field(default_factory=SpecStats)  # of all requests, where somebody drafted


def prompt(llm: LLM, tokens: int, dice: random.Random) -> list[int]:
    """Random ids: two prompts share no prefix that the cache could answer."""
    return [dice.randrange(llm.engine.model.config.vocabulary) for _ in range(tokens)]


def first_token(llm: LLM) -> float:
    """Seconds from a short prompt to its first token, on an engine that has not run yet."""
    begin = time.perf_counter()
    llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    return time.perf_counter() - begin


def decode(llm: LLM, batch: int, plan: Plan, dice: random.Random, speculate: bool | None = False) -> Decoded:
    """`batch` requests decode side by side: from when all have their first token to when the first one is done.

    speculate: None where the engine's own method drafts. A step may bring several tokens a request, so that tokens are
    counted rather than steps.
    """
    params = SamplingParams(max_tokens=plan.tokens, temperature=0, ignore_eos=True, speculate=speculate)
    engine = llm.engine
    names = [engine.add(prompt(llm, plan.prompt_tokens, dice), params) for _ in range(batch)]
    requests = [engine.parents[name].transcripts[0].request for name in names]
    while not all(request.output for request in requests):
        engine.step(quiet=True)
    before, busy, begin = written(requests), busy_seconds(llm), time.perf_counter()
    while len(engine.parents) == batch:
        engine.step(quiet=True)
    seconds, busy, tokens = time.perf_counter() - begin, busy_seconds(llm) - busy, written(requests) - before
    for name in names:
        engine.abort(name)
    spec_stats = SpecStats()
    for request in requests:
        spec_stats.add(request.spec_stats)
    rounds = tokens / batch
    return Decoded(seconds / rounds, (seconds - busy) / rounds, spec_stats)


def written(requests: Sequence[Request]) -> int:
    return sum(len(request.output) for request in requests)


def busy_seconds(llm: LLM) -> float:
    """How long kernels have run so far; on a device, how long it was at work between the host's calls."""
    return cpu.busy_seconds() if llm.engine.device.torch_device.type == "cpu" else llm.engine.runner.rounds.busy


def verify(llm: LLM, plan: Plan, dice: random.Random) -> dict[int, float]:
    """Seconds of a step that runs 1, 2, 4, ... tokens of one request, all but the first of them drafted."""
    engine = llm.engine
    tokens = prompt(llm, plan.prompt_tokens + max(WIDTHS), dice)
    name = engine.add(tokens, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, speculate=False))
    request = engine.parents[name].transcripts[0].request
    while not request.output:
        engine.step()
    # A width's repeats are short: the best of a few is the step that nothing interrupted.
    found = {w: min(time_step(llm, request, plan.prompt_tokens, w) for _ in range(REPEATS)) for w in WIDTHS}
    engine.abort(name)
    return found


def time_step(llm: LLM, request: Request, start: int, width: int) -> float:
    """Verify `width` - 1 tokens of the prompt as if they had been drafted: their pages are there already."""
    tokens = request.prompt[start : start + width]
    row = Row(request, start, tokens[:1], sample=True, draft=Draft(tokens[1:]) if width > 1 else None)
    if llm.resolved.decode_steps > 1:  # time one decode step of a multi-step run
        marks = llm.engine.runner.rounds.rehearse("", row, width - 1)
        return median(marks[at + 1].since(marks[at]) for at in range(0, len(marks) - 1, 2))
    begin = time.perf_counter()
    llm.engine.runner.step(Step([row]))
    return time.perf_counter() - begin


def prefill(llm: LLM, plan: Plan, dice: random.Random) -> float:
    """Prompt tokens per second, the first token included."""
    tokens = prompt(llm, plan.prompt_tokens, dice)
    begin = time.perf_counter()
    llm.generate([tokens], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, speculate=False))
    return len(tokens) / (time.perf_counter() - begin)
