"""`outrider bench speed`: what a step costs, beside the memory bandwidth that bounds it, in one run.

The rounds are interleaved (bandwidth, decode, verification, prefill, the peer, again), so that a disturbance of the
machine falls on all figures alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..device import choose_backend, open_device
from ..llm import LLM
from ..types import SpecStats
from . import in_process
from .bandwidth import meter
from .machine import measured_on
from .memory import beyond_weights
from .parts import Decoded, Plan, decode, first_token, prefill, prompt, verify
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
    open_model: Callable[[], LLM], backend: str, plan: Plan, peer: str | None, note: Callable[[str], None]
) -> dict[str, Any]:
    """All figures of one run; `note` hears of what takes long."""
    open_peer = in_process.find(peer) if peer is not None else None  # refused before anything is loaded
    free = open_device(choose_backend(backend)).free_bytes()
    llm = open_model()
    first = first_token(llm)
    dice = random.Random(0)
    for _ in range(WARM_UPS):
        engine_round(llm, plan, dice, Samples(), swap=False)
    beyond = beyond_weights(llm, free)
    bandwidth = meter(llm.engine.device, llm.engine.weight_bytes)
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


def engine_round(llm: LLM, plan: Plan, dice: random.Random, samples: Samples, swap: bool) -> None:
    """swap: speculation goes first. Whoever comes second finds a warmer machine."""
    ways = {False: samples.plain} | ({None: samples.drafted} if llm.engine.spec_manager.plan.method else {})
    for batch in plan.batches:
        for speculate, kept in reversed(ways.items()) if swap else ways.items():
            kept.setdefault(batch, []).append(decode(llm, batch, plan, dice, speculate))
    for width, seconds in verify(llm, plan, dice).items():
        samples.steps.setdefault(width, []).append(seconds)
    samples.prefill.append(prefill(llm, plan, dice))


def report(llm: LLM, plan: Plan, samples: Samples, first: float) -> dict[str, Any]:
    one, weights = median(samples.steps[1]), llm.engine.weight_bytes
    single = samples.plain.get(1, [])  # empty where no batch of one was asked for
    bandwidths = samples.bandwidth[: len(single)]
    fractions = [weights / speed / run.seconds for speed, run in zip(bandwidths, single, strict=True)]
    return {
        "model": llm.resolved.model,
        "backend": llm.resolved.backend,
        "machine": measured_on(llm.engine.device),
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


def peer_report(peer: in_process.Peer, samples: Samples) -> dict[str, Any]:
    ours = samples.plain.get(1, [])
    return {
        "name": peer.title,
        "compiled": peer.compiled,
        "tokens_per_second": spread([1 / seconds for seconds in samples.peer]),
        "speedup": spread([theirs / run.seconds for theirs, run in zip(samples.peer, ours, strict=False)]),
    }
