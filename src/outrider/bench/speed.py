"""`outrider bench speed`: what a step costs, beside the memory bandwidth that bounds it, in one run.

The rounds are interleaved (bandwidth, decode, verification, prefill, the peer, again), so that a disturbance of the
machine falls on all figures alike.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..device import choose_backend, open_device
from ..diagnostics.machine import bandwidth_meter, machine_facts
from ..kernels import cpu
from ..llm import LLM
from ..request import Request, Row, Step
from ..types import Draft, SamplingParams, SpecStats
from . import transformers_baseline
from .memory import beyond_weights
from .spread import spread

WARM_UPS = 2  # rounds that are not counted: in the first, kernels are compiled, in the second, graphs are recorded


@dataclass
class Samples:
    """One list a figure, one entry a round."""

    bandwidth: list[float] = field(default_factory=list)
    plain: dict[int, list[Decoded]] = field(default_factory=dict)  # batch
    drafted: dict[int, list[Decoded]] = field(default_factory=dict)  # batch
    steps: dict[int, list[float]] = field(default_factory=dict)  # query tokens: seconds per step
    prefill: list[float] = field(default_factory=list)  # tokens per second
    peer: list[float] = field(default_factory=list)  # seconds per token


def measure(
    open_model: Callable[[], LLM], backend: str, plan: SpeedConfig, peer: str | None, note: Callable[[str], None]
) -> dict[str, Any]:
    """All figures of one run; `note` hears of what takes long."""
    open_peer = transformers_baseline.find(peer) if peer is not None else None  # refused before anything is loaded
    free = open_device(choose_backend(backend)).free_bytes()
    llm = open_model()
    first = first_token(llm)
    dice = random.Random(0)
    for _ in range(WARM_UPS):
        engine_round(llm, plan, dice, Samples(), swap=False)
    beyond = beyond_weights(llm, free)
    bandwidth = bandwidth_meter(llm.engine.device, llm.engine.weight_bytes)
    other = open_peer(llm, plan.prompt_tokens + plan.tokens) if open_peer is not None else None
    if other is not None:
        note(f"warming up {other.title}" + (": compiling takes a minute or two" if other.compiled else ""))
        other.seconds_per_token(prompt(llm, plan.prompt_tokens, dice), plan.tokens)
    samples = Samples()
    for number in range(plan.rounds):
        samples.bandwidth.append(bandwidth.read().bytes_per_second)
        engine_round(llm, plan, dice, samples, swap=bool(number % 2))
        if other is not None:
            samples.peer.append(other.seconds_per_token(prompt(llm, plan.prompt_tokens, dice), plan.tokens))
    found = report(llm, plan, samples, first) | {"memory_beyond_weights_and_cache_bytes": beyond}
    return found | {"peer": None if other is None else peer_report(other, samples)}


def engine_round(llm: LLM, plan: SpeedConfig, dice: random.Random, samples: Samples, swap: bool) -> None:
    """swap: speculation goes first. Whoever comes second finds a warmer machine."""
    ways = {False: samples.plain} | ({None: samples.drafted} if llm.engine.spec_manager.plan.method else {})
    for batch in plan.batches:
        for speculate, kept in reversed(ways.items()) if swap else ways.items():
            kept.setdefault(batch, []).append(decode(llm, batch, plan, dice, speculate))
    for width, seconds in verify(llm, plan, dice).items():
        samples.steps.setdefault(width, []).append(seconds)
    samples.prefill.append(prefill(llm, plan, dice))


def report(llm: LLM, plan: SpeedConfig, samples: Samples, first: float) -> dict[str, Any]:
    one, weights = median(samples.steps[1]), llm.engine.weight_bytes
    single = samples.plain.get(1, [])  # empty where no batch of one was asked for
    bandwidths = samples.bandwidth[: len(single)]
    fractions = [weights / speed / run.seconds for speed, run in zip(bandwidths, single, strict=True)]
    return {
        "model": llm.resolved.model,
        "backend": llm.resolved.backend,
        "machine": machine_facts(llm.engine.device),
        "rounds": plan.rounds,
        "weight_bytes_per_step": weights,
        "load_seconds": llm.engine.load_seconds,
        "load_to_first_token_seconds": llm.engine.load_seconds + first,
        "bandwidth_gb_per_second": spread(samples.bandwidth, 1e-9),
        "fraction_of_bandwidth": spread(fractions),
        "host_milliseconds_per_step": spread([run.host for run in single], 1e3),
        "host_share": spread([run.host / run.seconds for run in single]),
        "prefill_tokens_per_second": spread(samples.prefill),
        "decode": [
            {
                "batch": batch,
                "step_milliseconds": spread([run.seconds for run in runs], 1e3),
                "tokens_per_second": spread([batch / run.seconds for run in runs]),
            }
            for batch, runs in samples.plain.items()
        ],
        "step": [
            {"tokens": width, "milliseconds": spread(seconds, 1e3), "relative_to_one": median(seconds) / one}
            for width, seconds in samples.steps.items()
        ],
        "speculation": [speculation_report(llm, batch, samples) for batch in samples.drafted],
    }


def speculation_report(llm: LLM, batch: int, samples: Samples) -> dict[str, Any]:
    plain, drafted = samples.plain[batch], samples.drafted[batch]
    spec_stats = SpecStats()
    for run in drafted:
        spec_stats.add(run.spec_stats)
    return {
        "method": llm.engine.spec_manager.plan.method,
        "batch": batch,
        "tokens_per_second": spread([batch / run.seconds for run in drafted]),
        "speedup": spread([slow.seconds / fast.seconds for slow, fast in zip(plain, drafted, strict=True)]),
        "round_milliseconds": spread(
            [run.seconds * run.spec_stats.mean_length for run in drafted], 1e3
        ),  # draft and check
        "mean_acceptance_length": spec_stats.mean_length,
        "widths": dict(sorted(spec_stats.widths.items())),
    }


def peer_report(peer: transformers_baseline.InProcessPeer, samples: Samples) -> dict[str, Any]:
    ours = samples.plain.get(1, [])
    return {
        "name": peer.title,
        "compiled": peer.compiled,
        "tokens_per_second": spread([1 / seconds for seconds in samples.peer]),
        "speedup": spread([theirs / run.seconds for theirs, run in zip(samples.peer, ours, strict=False)]),
    }


WIDTHS = (1, 2, 4, 5, 8, 16)  # tokens of one row, as verification uses them
REPEATS = 5
SPARE = 64  # tokens beyond a request's text that drafts may take, at most


@dataclass(frozen=True)
class SpeedConfig:
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


def decode(llm: LLM, batch: int, plan: SpeedConfig, dice: random.Random, speculate: bool | None = False) -> Decoded:
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


def verify(llm: LLM, plan: SpeedConfig, dice: random.Random) -> dict[int, float]:
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


def prefill(llm: LLM, plan: SpeedConfig, dice: random.Random) -> float:
    """Prompt tokens per second, the first token included."""
    tokens = prompt(llm, plan.prompt_tokens, dice)
    begin = time.perf_counter()
    llm.generate([tokens], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, speculate=False))
    return len(tokens) / (time.perf_counter() - begin)
