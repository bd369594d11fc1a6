"""`outrider bench speed`: time decoding, verification and prefill, and compare with the memory bandwidth.

Each round measures everything once (bandwidth, decode, verification, prefill, peer), so that a disturbance of the
machine affects all figures alike. All times are taken outside of the engine. A GPU's memory that the engine takes
beyond weights and KV caches (buffers, captured graphs, allocator overhead) is a figure too.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from ..device import SingleThreadedTorch, choose_backend, open_device
from ..diagnostics.machine import bandwidth_meter, machine_facts
from ..errors import UserError
from ..kernels import cpu
from ..llm import LLM
from ..request import Request, Row, Step
from ..types import Draft, SamplingParams, SpecStats
from . import transformers_baseline

WARM_UPS = 2  # uncounted rounds: the first compiles kernels, the second captures CUDA graphs
WIDTHS = (1, 2, 4, 5, 8, 16)  # tokens of one request in a step, as verification has them
REPEATS = 5  # timings of each width; the fastest counts
SPARE = 64  # cache slots of a request beyond its text, for drafts


@dataclass(frozen=True)
class SpeedConfig:
    rounds: int = 5
    tokens: int = 64
    batches: Sequence[int] = (1, 4, 16)
    prompt_tokens: int = 128

    @property
    def cache_tokens(self) -> int:
        """Size of the KV cache: twice the largest batch, so that a device's memory has space for the peer."""
        return 2 * max(self.batches) * (self.prompt_tokens + self.tokens + SPARE)


@dataclass(frozen=True)
class Decoded:
    """Times of a batch that decodes."""

    seconds: float  # for one token of each request
    host: float  # the part of `seconds` in which no kernel ran
    spec_stats: SpecStats = field(default_factory=SpecStats)  # of all requests


@dataclass
class Samples:
    """Measurements by figure; each list has one entry for each round."""

    bandwidth: list[float] = field(default_factory=list)
    plain: dict[int, list[Decoded]] = field(default_factory=dict)  # by batch size
    drafted: dict[int, list[Decoded]] = field(default_factory=dict)  # by batch size
    steps: dict[int, list[float]] = field(default_factory=dict)  # tokens in a step -> seconds
    prefill: list[float] = field(default_factory=list)  # tokens per second
    peer: list[float] = field(default_factory=list)  # seconds per token


def measure(
    open_model: Callable[[], LLM], backend: str, config: SpeedConfig, peer: str | None, note: Callable[[str], None]
) -> dict[str, Any]:
    """Measure all figures; `note` receives messages about slow parts."""
    open_peer = (
        transformers_baseline.find(peer) if peer is not None else None
    )  # refuse an unknown peer before loading the model
    free = open_device(choose_backend(backend)).free_bytes()
    llm = open_model()
    first = first_token(llm)
    rng = random.Random(0)
    for _ in range(WARM_UPS):
        engine_round(llm, config, rng, Samples(), swap=False)
    beyond = beyond_weights(llm, free)
    bandwidth = bandwidth_meter(llm.engine.device, llm.engine.weight_bytes)
    other = open_peer(llm, config.prompt_tokens + config.tokens) if open_peer is not None else None
    if other is not None:
        note(f"warming up {other.title}" + (": compiling takes a minute or two" if other.compiled else ""))
        other.seconds_per_token(random_prompt(llm, config.prompt_tokens, rng), config.tokens)
    samples = Samples()
    for number in range(config.rounds):
        samples.bandwidth.append(bandwidth.read().bytes_per_second)
        engine_round(llm, config, rng, samples, swap=bool(number % 2))
        if other is not None:
            samples.peer.append(other.seconds_per_token(random_prompt(llm, config.prompt_tokens, rng), config.tokens))
    figures = report(llm, config, samples, first) | {"memory_beyond_weights_and_cache_bytes": beyond}
    return figures | {"peer": None if other is None else peer_report(other, samples)}


def engine_round(llm: LLM, config: SpeedConfig, rng: random.Random, samples: Samples, swap: bool) -> None:
    """Measure everything once. swap: speculation before plain decoding, since the second finds a warmer machine."""
    modes = {False: samples.plain} | ({None: samples.drafted} if llm.engine.spec_manager.plan.method else {})
    for batch in config.batches:
        for speculate, results in reversed(modes.items()) if swap else modes.items():
            results.setdefault(batch, []).append(decode(llm, batch, config, rng, speculate))
    for width, seconds in time_widths(llm, config, rng).items():
        samples.steps.setdefault(width, []).append(seconds)
    samples.prefill.append(prefill(llm, config, rng))


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float] | None:
    """Return the median, the lowest and the highest value; None if nothing was measured."""
    if not values:
        return None
    scaled = [value * scale for value in values]
    return {"median": median(scaled), "low": min(scaled), "high": max(scaled)}


def report(llm: LLM, config: SpeedConfig, samples: Samples, first: float) -> dict[str, Any]:
    one, weights = median(samples.steps[1]), llm.engine.weight_bytes
    single = samples.plain.get(1, [])  # empty if batch size 1 was not requested
    bandwidths = samples.bandwidth[: len(single)]
    fractions = [weights / speed / run.seconds for speed, run in zip(bandwidths, single, strict=True)]
    return {
        "model": llm.resolved.model,
        "backend": llm.resolved.backend,
        "machine": machine_facts(llm.engine.device),
        "rounds": config.rounds,
        "weight_bytes_per_step": weights,
        "load_seconds": llm.engine.load_seconds,
        "load_to_first_token_seconds": llm.engine.load_seconds + first,
        "late_work": asdict(llm.engine.late_work.read()),  # captured and compiled after the warm-up
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
    spec_stats = SpecStats.total(run.spec_stats for run in drafted)
    return {
        "method": llm.engine.spec_manager.plan.method,
        "batch": batch,
        "tokens_per_second": spread([batch / run.seconds for run in drafted]),
        "speedup": spread([slow.seconds / fast.seconds for slow, fast in zip(plain, drafted, strict=True)]),
        # one step: draft and verify
        "round_milliseconds": spread([run.seconds * run.spec_stats.tokens_per_step for run in drafted], 1e3),
        "tokens_per_step": spec_stats.tokens_per_step,
        "mean_acceptance_length": spec_stats.mean_acceptance_length,
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


def random_prompt(llm: LLM, tokens: int, rng: random.Random) -> list[int]:
    """Return random token ids, so that no two prompts share a prefix in the cache."""
    return [rng.randrange(llm.engine.model.config.vocabulary) for _ in range(tokens)]


def first_token(llm: LLM) -> float:
    """Return the seconds from a short prompt to its first token on an engine that has not run yet."""
    begin = time.perf_counter()
    llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    return time.perf_counter() - begin


def decode(llm: LLM, batch: int, config: SpeedConfig, rng: random.Random, speculate: bool | None = False) -> Decoded:
    """Time `batch` requests from when all have their first token to when the first one finishes.

    speculate: None uses the engine's method. A step may add several tokens to a request, so tokens are counted instead
    of steps.
    """
    params = SamplingParams(max_tokens=config.tokens, temperature=0, ignore_eos=True, speculate=speculate)
    engine = llm.engine
    names = [engine.add(random_prompt(llm, config.prompt_tokens, rng), params) for _ in range(batch)]
    requests = [engine.parents[name].detokenizers[0].request for name in names]
    while not all(request.output for request in requests):
        engine.step(quiet=True)
    before, busy, begin = written(requests), busy_seconds(llm), time.perf_counter()
    while len(engine.parents) == batch:
        engine.step(quiet=True)
    seconds, busy, tokens = time.perf_counter() - begin, busy_seconds(llm) - busy, written(requests) - before
    for name in names:
        engine.abort(name)
    if not tokens:
        raise UserError(
            f"`tokens` is {config.tokens}: the first of {batch} requests ended before all had read their prompts, so "
            "pass more, or a smaller batch"
        )
    spec_stats = SpecStats.total(request.spec_stats for request in requests)
    tokens_each = tokens / batch
    return Decoded(seconds / tokens_each, (seconds - busy) / tokens_each, spec_stats)


def written(requests: Sequence[Request]) -> int:
    return sum(len(request.output) for request in requests)


def busy_seconds(llm: LLM) -> float:
    """Return the seconds that kernels have run so far; on a GPU, the seconds that it was busy."""
    return cpu.busy_seconds() if llm.engine.device.torch_device.type == "cpu" else llm.engine.runner.multi_step.busy


def time_widths(llm: LLM, config: SpeedConfig, rng: random.Random) -> dict[int, float]:
    """Time steps of 1, 2, 4, ... tokens of one request, of which all but the first are drafted."""
    start = config.prompt_tokens
    with (
        prefilled(llm, start, max(WIDTHS), rng) as request,
        SingleThreadedTorch(llm.resolved.backend),
        llm.engine.late_work.suspended(),  # no request has such drafts without a drafter
    ):
        # The fastest of a few repeats is a step that nothing interrupted.
        return {width: min(time_step(llm, request, start, width) for _ in range(REPEATS)) for width in WIDTHS}


@contextmanager
def prefilled(llm: LLM, start: int, tokens: int, rng: random.Random) -> Iterator[Request]:
    """Run a prompt of `start` + `tokens` random tokens, so that steps of up to `tokens` rows have their KV slots."""
    engine = llm.engine
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, speculate=False)
    name = engine.add(random_prompt(llm, start + tokens, rng), params)
    request = engine.parents[name].detokenizers[0].request
    while not request.output:
        engine.step()
    try:
        yield request
    finally:
        engine.abort(name)


def time_step(llm: LLM, request: Request, start: int, width: int) -> float:
    """Time the verification of `width` - 1 prompt tokens as if they had been drafted; their KV slots exist already."""
    tokens = request.prompt[start : start + width]
    row = Row(request, start, tokens[:1], sample=True, draft=Draft(tokens[1:]) if width > 1 else None)
    if llm.resolved.decode_steps > 1:  # time one decode step of a multi-step run
        marks = llm.engine.runner.multi_step.warm_up("", row, width - 1)
        return median(marks[i + 1].since(marks[i]) for i in range(0, len(marks) - 1, 2))
    begin = time.perf_counter()
    llm.engine.runner.step(Step([row]))
    return time.perf_counter() - begin


def prefill(llm: LLM, config: SpeedConfig, rng: random.Random) -> float:
    """Return the prompt tokens per second of prefill, including the time of the first token."""
    tokens = random_prompt(llm, config.prompt_tokens, rng)
    begin = time.perf_counter()
    llm.generate([tokens], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, speculate=False))
    return len(tokens) / (time.perf_counter() - begin)


def beyond_weights(llm: LLM, free_before: int) -> int | None:
    """Return the bytes taken since the device had `free_before` free bytes, without weights and KV caches.

    None on the host, where pages are mapped on first use and other programs allocate at the same time.
    """
    engine = llm.engine
    if engine.device.torch_device.type == "cpu":
        return None
    taken = free_before - engine.device.free_bytes()
    return taken - weight_bytes(llm) - llm.resolved.cache_bytes


def weight_bytes(llm: LLM) -> int:
    """Return the bytes of the target's weights, its embedding included, and of the drafters' weights.

    A method without weights need not have `weight_bytes`.
    """
    shape = llm.engine.model.config
    embedding = 0 if shape.tied_head else shape.vocabulary * shape.width * 2
    drafters = llm.engine.spec_manager.methods.values()
    target = llm.engine.model.weight_bytes + llm.engine.model.idle_bytes + embedding
    return target + sum(getattr(drafter, "weight_bytes", 0) for drafter in drafters)
