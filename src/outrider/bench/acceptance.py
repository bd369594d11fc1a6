"""`outrider bench acceptance`: how much of their drafts the target keeps, by drafter, temperature and set of prompts.

A step counts if it verified a draft. With tau, the drafted tokens that it gave to the text:
mean acceptance length = 1 + E[tau], the target's own token included; acceptance rate at i = P(tau >= i) over all those
steps, so that the rates add up to the mean length less 1; conditional rate at i = P(tau >= i) / P(tau >= i - 1). Of a
tree tau is the depth that was reached. The token that ends a text counts as the target's own, and none after it counts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from ..diagnostics.machine import machine_facts
from ..diagnostics.method_spec import with_settings
from ..diagnostics.trace import WARM_UP
from ..errors import UserError
from ..input_processor import Prompt
from ..llm import LLM
from ..speculation.config import parse, read
from ..types import FinishReason, SamplingParams, SpecStats
from .speculation import DecodeResult
from .spread import spread

Sets = Mapping[str, Sequence[Prompt]]
Opener = Callable[[str, int], LLM]  # a drafter, and the tokens that a step must have room for

WIDEST = 64  # drafts of a head that says itself how many there are, at most
STEP_TOKENS = 2048  # and prompts read in pieces of this


@dataclass(frozen=True)
class AcceptanceConfig:
    drafters: Sequence[str]
    temperatures: Sequence[float] = (0.0,)
    max_tokens: int = 128
    batch: int = 8
    speed: bool = False


@dataclass
class SetResult:
    """What a drafter did on one set."""

    prompts: int
    tokens: int = 0
    spec_stats: SpecStats = field(default_factory=SpecStats)
    ratios: list[float] = field(default_factory=list)  # plain decoding's time for a token to the drafter's, by batch

    def add(self, side: DecodeResult) -> None:
        self.tokens += side.tokens
        self.spec_stats.add(side.spec_stats)

    def figures(self) -> dict[str, Any]:
        found = {"prompts": self.prompts, "tokens": self.tokens + self.prompts, **figures(self.spec_stats)}
        if self.ratios:
            found["speedup"] = spread(self.ratios)
        return found


def full_width(drafter: str) -> str:
    """The drafter with every draft as wide as it can be, unless `adaptive` is said."""
    if not read(drafter)[0]:
        raise UserError("`--speculate` is `none`: name a method whose drafts are to be counted")
    parse(drafter)  # a mistake in the last one is told before the first one runs
    return with_settings(drafter, adaptive="false")


def measure(
    open_model: Opener, ask: Callable[[LLM], Sets], plan: AcceptanceConfig, note: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """The figures of each drafter at each temperature, as they come."""
    asked = [(drafter, full_width(drafter)) for drafter in plan.drafters]
    for drafter, configured in asked:
        for temperature in plan.temperatures:
            yield {"drafter": drafter, **one(open_model, configured, ask, plan, temperature, note)}
            gc.collect()  # an engine holds on to memory that the next one measures as its room


def one(
    open_model: Opener,
    drafter: str,
    ask: Callable[[LLM], Sets],
    plan: AcceptanceConfig,
    temperature: float,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """In an engine of its own: a drafter may remember the answers."""
    params = SamplingParams(max_tokens=plan.max_tokens, temperature=temperature, seed=0)
    # A step gives half of its room to drafts: what does not fit would be cut.
    llm = open_model(drafter, max(STEP_TOKENS, plan.batch * (2 * WIDEST + 2)))
    proposer = llm.engine.spec_manager.methods[llm.engine.spec_manager.plan.method]
    if plan.batch * (2 * proposer.needs.width + 1) > llm.resolved.max_step_tokens:
        raise UserError(f"drafts of {proposer.needs.width} tokens do not fit into a step: lower `--batch`")
    sets = ask(llm)
    if plan.speed:  # with other prompts: a drafter may remember the answers
        for drafting in (None, False):
            llm.generate([WARM_UP] * plan.batch, replace(params, ignore_eos=True, speculate=drafting))
    found = {}
    for name, prompts in sets.items():
        found[name] = answer(llm, prompts, params, plan).figures()
        note(f"{drafter}, temperature {temperature:g}, {name}: {found[name]['mean_acceptance_length']:.2f}")
    return {
        "model": llm.resolved.model,
        "method": llm.engine.spec_manager.plan.method,
        "width": proposer.needs.width,
        "adaptive": llm.engine.spec_manager.plan.adaptive,
        "temperature": temperature,
        "max_tokens": plan.max_tokens,
        "batch": plan.batch,
        "backend": llm.resolved.backend,
        "machine": machine_facts(llm.engine.device),
        "sets": found,
        "mean": mean(list(found.values())),
    }


def answer(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, plan: AcceptanceConfig) -> SetResult:
    found = SetResult(len(prompts))
    if not plan.speed:
        found.add(side(llm, prompts, params))
        return found
    plain = replace(params, speculate=False)
    for number, first in enumerate(range(0, len(prompts), plan.batch)):
        some = prompts[first : first + plan.batch]
        # Whoever comes second finds a warmer machine: they take turns.
        both = {drafts: side(llm, some, params if drafts else plain) for drafts in (number % 2 == 1, number % 2 == 0)}
        found.add(both[True])
        if both[True].tokens and both[False].tokens:
            paces = {drafts: one.seconds / one.tokens for drafts, one in both.items()}
            found.ratios.append(paces[False] / paces[True])
    return found


def side(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> DecodeResult:
    found = DecodeResult()
    for output in llm.generate(prompts, params):
        (told,) = output.completions
        if told.finish_reason == FinishReason.ERROR:
            raise UserError(
                f"a prompt failed, and without it the figures would mean something else: {told.stop_reason}"
            )
        found.add(output)
    return found


def figures(spec_stats: SpecStats) -> dict[str, Any]:
    """What the head of this file defines, under the names that others use."""
    plain = spec_stats.widths.get(0, 0)
    steps = spec_stats.steps - plain
    reached = [steps, *spec_stats.kept]  # [i]: steps with tau >= i
    lost = [*reached[1:], 0]
    return {
        "steps": steps,
        "plain_steps": plain,
        "drafted": spec_stats.drafted,
        "accepted": spec_stats.accepted,
        "mean_acceptance_length": 1 + spec_stats.accepted / steps if steps else 1.0,
        "draft_acceptance_rate": spec_stats.accepted / spec_stats.drafted if spec_stats.drafted else 0.0,
        "acceptance_rates": [kept / steps for kept in spec_stats.kept],
        "conditional_rates": conditional([float(count) for count in reached]),
        "acceptance_histogram": [count - more for count, more in zip(reached, lost, strict=True)],
        "tokens_per_step": spec_stats.mean_length,
    }


def conditional(reached: Sequence[float]) -> list[float | None]:
    """How often each place was reached from the one before; None where that never was."""
    return [after / before if before else None for before, after in pairwise(reached)]


def mean(sets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every set counts the same, however long it is."""
    deepest = max(len(one["acceptance_rates"]) for one in sets)
    padded = [[*one["acceptance_rates"], *[0.0] * (deepest - len(one["acceptance_rates"]))] for one in sets]
    rates = [fmean(column) for column in zip(*padded, strict=True)]
    found = {
        "mean_acceptance_length": fmean(one["mean_acceptance_length"] for one in sets),
        "acceptance_rates": rates,
        "conditional_rates": conditional([1.0, *rates]),
    }
    if all("speedup" in one for one in sets):
        found["speedup"] = fmean(one["speedup"]["median"] for one in sets)
    return found
