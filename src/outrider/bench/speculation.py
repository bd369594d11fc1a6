"""`outrider bench speculation`: the same prompts with and without a drafter, in turn.

Only decoding is timed: the prompt costs the same either way. The share outside the models is what is left of the time
of speculative steps when the forward passes of target and drafter, heads included, are taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, TypeVar

from ..errors import UserError
from ..input_processor import Prompt
from ..llm import LLM
from ..models import Model
from ..types import Output, SamplingParams, SpecStats
from .machine import measured_on
from .spread import spread

Result = TypeVar("Result")
WARM_UP = "one two three one two three one two"


class Watch:
    """A model that notes how long its passes take."""

    def __init__(self, model: Model) -> None:
        self.model, self.seconds = model, 0.0
        self.forward = self._timed(model.forward)
        self.logits = self._timed(model.logits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def _timed(self, run: Callable[..., Result]) -> Callable[..., Result]:
        def timed(*arguments: Any) -> Result:
            begin = time.perf_counter()
            try:
                return run(*arguments)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


@dataclass
class Side:
    """One way of decoding, over all prompts of a round."""

    seconds: float = 0.0
    tokens: int = 0
    spec_stats: SpecStats = field(default_factory=SpecStats)

    def add(self, output: Output) -> None:
        assert output.stats is not None
        self.seconds += output.stats.seconds - output.stats.first_token_seconds
        self.tokens += len(output.completions[0].token_ids) - 1
        self.spec_stats.add(output.stats.speculation)


@dataclass
class Round:
    plain: Side = field(default_factory=Side)
    drafted: Side = field(default_factory=Side)
    outside: list[float] = field(default_factory=list)  # shares of single answers
    different: int = 0  # answers that speculation changed


def measure(
    open_model: Callable[[], LLM], ask: Callable[[LLM], Sequence[Prompt]], params: SamplingParams, rounds: int
) -> dict[str, Any]:
    """Every figure of one run. Each round has an engine of its own: a drafter may remember the answers."""
    found = []
    for number in range(rounds):
        llm = open_model()
        if not llm.engine.spec_manager.plan.method:
            raise UserError("`--speculate` is `none`: name the method to measure")
        watch = Watch(llm.engine.model)
        llm.engine.runner.model = watch  # type: ignore[assignment]
        prompts = ask(llm)
        llm.generate(WARM_UP, replace(params, ignore_eos=True))
        found.append(one_round(llm, watch, prompts, params, swap=bool(number % 2)))
    return report(llm, len(prompts), found)


def one_round(llm: LLM, watch: Watch, prompts: Sequence[Prompt], params: SamplingParams, swap: bool = False) -> Round:
    found = Round()
    for number, prompt in enumerate(prompts):
        texts = {}
        # Whoever comes second finds a warmer machine: they take turns.
        for drafting in (True, False) if (number + swap) % 2 else (False, True):
            before = inside(llm, watch)
            begin = time.perf_counter()
            (output,) = llm.generate([prompt], replace(params, speculate=None if drafting else False))
            seconds = time.perf_counter() - begin
            (found.drafted if drafting else found.plain).add(output)
            texts[drafting] = output.completions[0].token_ids
            if drafting:
                found.outside.append(1 - (inside(llm, watch) - before) / seconds)
        found.different += texts[True] != texts[False]
    return found


def inside(llm: LLM, watch: Watch) -> float:
    """Seconds in passes so far; on a device that works by itself, those of rounds, drafts and checks included."""
    return watch.seconds if llm.engine.device.torch_device.type == "cpu" else llm.engine.runner.rounds.busy


def report(llm: LLM, prompts: int, rounds: Sequence[Round]) -> dict[str, Any]:
    ratios = [one.plain.seconds / one.drafted.seconds for one in rounds]
    spec_stats = rounds[-1].drafted.spec_stats
    return {
        "model": llm.resolved.model,
        "method": llm.engine.spec_manager.plan.method,
        "machine": measured_on(llm.engine.device),
        "prompts": prompts,
        "rounds": len(rounds),
        "plain_tokens_per_second": median(one.plain.tokens / one.plain.seconds for one in rounds),
        "tokens_per_second": median(one.drafted.tokens / one.drafted.seconds for one in rounds),
        "speedup": spread(ratios),
        "mean_acceptance_length": spec_stats.mean_length,
        "drafted": spec_stats.drafted,
        "accepted": spec_stats.accepted,
        "acceptance_rates": spec_stats.rates,
        "widths": dict(sorted(spec_stats.widths.items())),
        "drafters": {name: asdict(credit) for name, credit in spec_stats.drafters.items()},
        "outside_models": median(share for one in rounds for share in one.outside),
        "different_texts": sum(one.different for one in rounds),
    }
