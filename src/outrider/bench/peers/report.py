"""What the rounds came to: each engine's own figures, and ours against each of theirs, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from ..machine import describe
from ..spread import spread
from .entrants import Entrant, Plan, Way
from .race import Race

RATE = "tokens/s"
AGREEING = 8  # first tokens that greedy texts should share: later, a rounding may decide


def report(race: Race, model: str) -> dict[str, Any]:
    plan = race.plan
    ours, *theirs = race.entrants
    return {
        "model": model,
        "machine": describe() | {"threads": plan.threads},
        "rounds": plan.rounds,
        "tokens": plan.tokens,
        "prompt_tokens": plan.prompt_tokens,
        "batches": list(plan.batches),
        "sets": {name: len(prompts) for name, prompts in race.sets.items()},
        "engines": [engine(entrant, ours, plan, list(race.sets)) for entrant in race.entrants],
        "ratios": [ratio for peer in theirs for ratio in ratios(ours, peer, plan, list(race.sets))],
        "skipped": [{"name": name, "reason": reason} for name, reason in race.skipped.items()],
    }


def engine(entrant: Entrant, ours: Entrant, plan: Plan, sets: Sequence[str]) -> dict[str, Any]:
    return {
        "name": entrant.peer.name,
        **entrant.facts,
        "speculation": entrant.peer.speculation or None,
        "no_speculation": entrant.no_speculation,
        "decode": [decoding(entrant, way, batch, sets) for batch in plan.batches for way in entrant.ways(batch)],
        "prompt_tokens_per_second": spread([plan.prompt_tokens / seconds for seconds in entrant.prompts]),
        "start_seconds": spread(entrant.starts),
        "memory_bytes": entrant.memory,
        "agreement": None if entrant is ours else agreement(ours, entrant),
    }


def decoding(entrant: Entrant, way: Way, batch: int, sets: Sequence[str]) -> dict[str, Any]:
    return {
        "batch": batch,
        "way": way,
        "width": entrant.widths.get(batch) if way == "speculation" else None,
        "tokens_per_second": spread(rates(entrant, way, batch, sets)),
        "sets": {name: spread([one.rate for one in entrant.decodings[way, batch, name]]) for name in sets},
    }


def rates(entrant: Entrant, way: Way, batch: int, sets: Sequence[str]) -> list[float]:
    """Tokens per second by round, the mean over the sets."""
    by_set = [[one.rate for one in entrant.decodings[way, batch, name]] for name in sets]
    return [fmean(row) for row in zip(*by_set, strict=True)]


def best(entrant: Entrant, batch: int, sets: Sequence[str]) -> Way:
    """The faster of its two ways: nobody has to speculate at a loss."""
    return max(entrant.ways(batch), key=lambda way: median(rates(entrant, way, batch, sets)))


def ratios(ours: Entrant, peer: Entrant, plan: Plan, sets: Sequence[str]) -> list[dict[str, Any]]:
    """Each with the two figures that it compares. Above 1: we are faster, start sooner, take less."""
    found = [
        compared(f"{title}, batch {batch}", values, rates(ours, mine, batch, sets), rates(peer, its, batch, sets), RATE)
        for batch in plan.batches
        for title, mine, its in pairs(ours, peer, batch, sets)
        for values in [faster(ours, mine, peer, its, batch, sets)]
    ]
    here, there = ([plan.prompt_tokens / seconds for seconds in one.prompts] for one in (ours, peer))
    found.append(compared(f"prompt of {plan.prompt_tokens} tokens", quotients(here, there), here, there, RATE))
    starts = quotients(peer.starts, ours.starts)
    found.append(compared("start to first token", starts, ours.starts, peer.starts, "seconds"))
    taken = quotients(resident(peer), resident(ours))
    found.append(compared("memory, plain", taken, resident(ours), resident(peer), "bytes"))
    return [{"peer": peer.peer.name, **one} for one in found]


def pairs(ours: Entrant, peer: Entrant, batch: int, sets: Sequence[str]) -> list[tuple[str, Way, Way]]:
    mine, its = best(ours, batch, sets), best(peer, batch, sets)
    return [
        ("plain", "plain", "plain"),
        ("best against its plain", mine, "plain"),
        ("best against its best", mine, its),
    ]


def compared(
    figure: str, values: Sequence[float], ours: Sequence[float], theirs: Sequence[float], unit: str
) -> dict[str, Any]:
    sides = {"ours": median(ours) if ours else None, "theirs": median(theirs) if theirs else None}
    return {"figure": figure, "ratio": spread(values), **sides, "unit": unit}


def faster(ours: Entrant, mine: Way, peer: Entrant, its: Way, batch: int, sets: Sequence[str]) -> list[float]:
    """By round: the mean over the sets of how many times as fast we are."""
    by_set = [
        [
            here.rate / there.rate
            for here, there in zip(ours.decodings[mine, batch, name], peer.decodings[its, batch, name], strict=True)
        ]
        for name in sets
    ]
    return [fmean(row) for row in zip(*by_set, strict=True)]


def quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=False)]


def resident(entrant: Entrant) -> list[float]:
    known = entrant.memory.get("plain")
    return [] if known is None else [float(known["resident"])]


def agreement(ours: Entrant, peer: Entrant) -> dict[str, Any]:
    """How much of our greedy texts the peer's are: a broken set-up shows here before it shows in the figures."""
    lengths = [shared(text, peer.texts[key]) for key, text in ours.texts.items()]
    longest = max(len(text) for text in ours.texts.values())
    checked = min(AGREEING, longest)
    return {
        "prompts": len(lengths),
        "first_tokens": checked,
        "share_of_equal_beginnings": fmean(length >= checked for length in lengths),
        "mean_equal_tokens": fmean(lengths),
    }


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first difference."""
    for at, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            return at
    return min(len(one), len(other))
