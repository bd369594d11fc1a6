"""`outrider bench acceptance`: acceptance rates by drafter, temperature and set of prompts.

A step counts if it verified a draft; tau is its number of accepted tokens, for a tree the depth of the accepted path.

- mean acceptance length = 1 + E[tau], which includes the target's own token
- acceptance rate at depth i = P(tau >= i); these rates add up to the mean acceptance length minus 1
- conditional rate at depth i = P(tau >= i) / P(tau >= i - 1)

The last token of a text counts as the target's own, and tokens after it do not count.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from statistics import fmean
from typing import Any

from ..diagnostics.machine import machine_facts
from ..diagnostics.trace import WARM_UP
from ..errors import UserError
from ..input_processor import Prompt
from ..llm import LLM
from ..speculation.config import parse, read, with_settings
from ..types import FinishReason, SamplingParams, SpecStats
from .speculation import DecodeResult
from .speed import spread

Sets = Mapping[str, Sequence[Prompt]]
Opener = Callable[[str, int], LLM]  # method specification, max_step_tokens -> engine

MAX_WIDTH = 64  # the widest draft of a head whose checkpoint fixes the width
STEP_TOKENS = 2048  # tokens of a step at least: the chunk size of prefill


@dataclass(frozen=True)
class AcceptanceConfig:
    drafters: Sequence[str]
    temperatures: Sequence[float] = (0.0,)
    max_tokens: int = 128
    batch: int = 8
    speed: bool = False


@dataclass
class SetResult:
    """Result of a drafter on one set of prompts."""

    prompts: int
    tokens: int = 0
    spec_stats: SpecStats = field(default_factory=SpecStats)
    ratios: list[float] = field(default_factory=list)  # seconds per token of plain decoding / speculation, by batch

    def add(self, result: DecodeResult) -> None:
        self.tokens += result.tokens
        self.spec_stats.add(result.spec_stats)

    def figures(self) -> dict[str, Any]:
        result = {"prompts": self.prompts, "tokens": self.tokens + self.prompts, **figures(self.spec_stats)}
        if self.ratios:
            result["speedup"] = spread(self.ratios)
        return result


def full_width(drafter: str) -> str:
    """Return the specification with adaptive widths off, unless it sets `adaptive`."""
    if not read(drafter)[0]:
        raise UserError("`--speculate` is `none`, which drafts nothing: name a method")
    parse(drafter)  # refuse a bad specification before the first one runs
    return with_settings(drafter, adaptive="false")


def measure(
    open_model: Opener, ask: Callable[[LLM], Sets], config: AcceptanceConfig, note: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each drafter at each temperature."""
    specs = [(drafter, full_width(drafter)) for drafter in config.drafters]
    for drafter, configured in specs:
        for temperature in config.temperatures:
            yield {"drafter": drafter, **measure_one(open_model, configured, ask, config, temperature, note)}
            gc.collect()  # free the engine before the next one measures the free memory


def measure_one(
    open_model: Opener,
    drafter: str,
    ask: Callable[[LLM], Sets],
    config: AcceptanceConfig,
    temperature: float,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Measure with a new engine, since a drafter may remember the answers."""
    params = SamplingParams(max_tokens=config.max_tokens, temperature=temperature, seed=0)
    # Drafts get half of a step's tokens and are cut beyond that.
    llm = open_model(drafter, max(STEP_TOKENS, config.batch * (2 * MAX_WIDTH + 2)))
    proposer = llm.engine.spec_manager.methods[llm.engine.spec_manager.plan.method]
    if config.batch * (2 * proposer.needs.width + 1) > llm.resolved.max_step_tokens:
        raise UserError(
            f"{config.batch} drafts of {proposer.needs.width} tokens do not fit into a step: lower `--batch`"
        )
    sets = ask(llm)
    if config.speed:  # warm up with another prompt, since a drafter may remember the answers
        for drafting in (None, False):
            llm.generate([WARM_UP] * config.batch, replace(params, ignore_eos=True, speculate=drafting))
    results = {}
    for name, prompts in sets.items():
        results[name] = answer(llm, prompts, params, config).figures()
        note(f"{drafter}, temperature {temperature:g}, {name}: {results[name]['mean_acceptance_length']:.2f}")
    return {
        "model": llm.resolved.model,
        "method": llm.engine.spec_manager.plan.method,
        "width": proposer.needs.width,
        "adaptive": llm.engine.spec_manager.plan.adaptive,
        "temperature": temperature,
        "max_tokens": config.max_tokens,
        "batch": config.batch,
        "backend": llm.resolved.backend,
        "machine": machine_facts(llm.engine.device),
        "sets": results,
        "mean": mean(list(results.values())),
    }


def answer(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, config: AcceptanceConfig) -> SetResult:
    result = SetResult(len(prompts))
    if not config.speed:
        result.add(decode(llm, prompts, params))
        return result
    plain = replace(params, speculate=False)
    for number, first in enumerate(range(0, len(prompts), config.batch)):
        batch = prompts[first : first + config.batch]
        # Alternate the order: the second run finds a warmer machine.
        both = {
            drafts: decode(llm, batch, params if drafts else plain) for drafts in (number % 2 == 1, number % 2 == 0)
        }
        result.add(both[True])
        if both[True].tokens and both[False].tokens:
            per_token = {drafts: run.seconds / run.tokens for drafts, run in both.items()}
            result.ratios.append(per_token[False] / per_token[True])
    return result


def decode(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> DecodeResult:
    result = DecodeResult()
    for output in llm.generate(prompts, params):
        (completion,) = output.completions
        if completion.finish_reason == FinishReason.ERROR:
            raise UserError(f"a prompt failed, so the figures would be incomplete: {completion.stop_reason}")
        result.add([output])
    return result


def figures(spec_stats: SpecStats) -> dict[str, Any]:
    """Compute the figures that the module docstring defines, under their usual names."""
    plain = spec_stats.widths.get(0, 0)
    steps = spec_stats.steps - plain
    reached = [steps, *spec_stats.accepted_per_depth]  # [i]: steps with tau >= i
    deeper = [*reached[1:], 0]
    return {
        "steps": steps,
        "plain_steps": plain,
        "drafted": spec_stats.drafted,
        "accepted": spec_stats.accepted,
        "mean_acceptance_length": 1 + spec_stats.accepted / steps if steps else 1.0,
        "draft_acceptance_rate": spec_stats.accepted / spec_stats.drafted if spec_stats.drafted else 0.0,
        "acceptance_rates": [kept / steps for kept in spec_stats.accepted_per_depth],
        "conditional_rates": conditional([float(count) for count in reached]),
        "acceptance_histogram": [count - more for count, more in zip(reached, deeper, strict=True)],
        "tokens_per_step": spec_stats.tokens_per_step,
    }


def conditional(reached: Sequence[float]) -> list[float | None]:
    """Return the rate of each depth given the one before; None if that was never reached."""
    return [after / before if before else None for before, after in pairwise(reached)]


def mean(sets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average over the sets, each with the same weight."""
    rates = [fmean(column) for column in zip_longest(*(figures["acceptance_rates"] for figures in sets), fillvalue=0.0)]
    result = {
        "mean_acceptance_length": fmean(figures["mean_acceptance_length"] for figures in sets),
        "acceptance_rates": rates,
        "conditional_rates": conditional([1.0, *rates]),
    }
    if all("speedup" in figures for figures in sets):
        result["speedup"] = fmean(figures["speedup"]["median"] for figures in sets)
    return result
