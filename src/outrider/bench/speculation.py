"""`outrider bench speculation`: answer the same prompts with and without speculation, in alternating order.

Only decoding is timed: prefill costs the same either way. `outside_models` is the share of the time of speculative
steps that is spent outside the forward passes of target and drafter; with native kernels, outside all calls of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from ..diagnostics.machine import machine_facts
from ..diagnostics.trace import WARM_UP
from ..errors import UserError
from ..input_processor import Prompt
from ..kernels.cpu import busy_seconds
from ..llm import LLM
from ..models import Model
from ..types import Output, SamplingParams, SpecStats, Stats
from .speed import spread


class ModelTimer:
    """A model that adds up the seconds of its layers and of its output matrix (head)."""

    def __init__(self, model: Model) -> None:
        self.model, self.layers, self.head = model, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds of all forward passes so far."""
        return self.layers + self.head

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, *arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self.model.forward(*arguments)
        finally:
            self.layers += time.perf_counter() - begin

    def logits(self, *arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self.model.logits(*arguments)
        finally:
            self.head += time.perf_counter() - begin


@dataclass
class DecodeResult:
    """Time, tokens and statistics of one mode over all prompts of a round."""

    seconds: float = 0.0
    tokens: int = 0
    spec_stats: SpecStats = field(default_factory=SpecStats)
    requests: list[Stats] = field(default_factory=list)

    def add(self, outputs: Sequence[Output]) -> None:
        """Add the answers of one batch, which decodes from its first token to its last."""
        stats = [output.stats for output in outputs if output.stats is not None]
        self.seconds += max(one.seconds for one in stats) - min(one.first_token_seconds for one in stats)
        self.tokens += sum(len(output.completions[0].token_ids) - 1 for output in outputs)
        for one in stats:
            self.spec_stats.add(one.speculation)
        self.requests += stats


@dataclass
class RoundResult:
    plain: DecodeResult = field(default_factory=DecodeResult)
    drafted: DecodeResult = field(default_factory=DecodeResult)
    outside: list[float] = field(default_factory=list)  # share of each answer's time
    different: int = 0  # answers that differ from plain decoding


def measure(
    open_model: Callable[[], LLM],
    ask: Callable[[LLM], Sequence[Prompt]],
    params: SamplingParams,
    rounds: int,
    batch: int = 1,
) -> dict[str, Any]:
    """Measure all figures, with a new engine for each round, since a drafter may remember the answers.

    batch: prompts that are answered at once.
    """
    results = []
    for number in range(rounds):
        llm = open_model()
        if not llm.engine.spec_manager.plan.method:
            raise UserError("`--speculate` is `none`, or `auto`, which knows no faster method here: name a method")
        timer = ModelTimer(llm.engine.model)
        llm.engine.runner.model = llm.engine.runner.single_row.model = timer  # type: ignore[assignment]
        prompts = ask(llm)
        llm.generate(WARM_UP, replace(params, ignore_eos=True))
        batches = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
        results.append(one_round(llm, timer, batches, params, swap=bool(number % 2)))
    return {**report(llm, len(prompts), results), "batch": batch}


def one_round(
    llm: LLM, timer: ModelTimer, batches: Sequence[Sequence[Prompt]], params: SamplingParams, swap: bool = False
) -> RoundResult:
    result = RoundResult()
    for number, prompts in enumerate(batches):
        texts = {}
        # Alternate the order: the second run finds a warmer machine.
        for drafting in (True, False) if (number + swap) % 2 else (False, True):
            llm.engine.clear_cache()  # else the second run would find its prompts in the prefix cache
            before = model_seconds(llm, timer)
            begin = time.perf_counter()
            outputs = llm.generate(list(prompts), replace(params, speculate=None if drafting else False))
            seconds = time.perf_counter() - begin
            (result.drafted if drafting else result.plain).add(outputs)
            texts[drafting] = [output.completions[0].token_ids for output in outputs]
            if drafting:
                result.outside.append(1 - (model_seconds(llm, timer) - before) / seconds)
        result.different += sum(one != other for one, other in zip(texts[True], texts[False], strict=True))
    return result


def request_times(requests: Sequence[Stats]) -> dict[str, float]:
    """Return the medians of the requests' times, in milliseconds."""
    times = {
        "queue": [one.queue_seconds for one in requests],
        "prefill": [one.prefill_seconds for one in requests],
        "first_token": [one.first_token_seconds for one in requests],
        "decode": [one.decode_seconds for one in requests],
        "per_output_token": [one.time_per_output_token for one in requests],
    }
    return {name: 1000 * median(values) for name, values in times.items()}


def model_seconds(llm: LLM, timer: ModelTimer) -> float:
    """Return the seconds of forward passes so far.

    With native kernels: of all calls of them. On a GPU: of whole decode steps with drafting and verification.
    """
    if llm.engine.resolved.backend == "cpu":
        return busy_seconds()
    return timer.seconds if llm.engine.device.torch_device.type == "cpu" else llm.engine.runner.multi_step.busy


def report(llm: LLM, prompts: int, rounds: Sequence[RoundResult]) -> dict[str, Any]:
    ratios = [one.plain.seconds / one.drafted.seconds for one in rounds]
    spec_stats = rounds[-1].drafted.spec_stats
    return {
        "model": llm.resolved.model,
        "method": llm.engine.spec_manager.plan.method,
        "machine": machine_facts(llm.engine.device),
        "prompts": prompts,
        "rounds": len(rounds),
        "plain_tokens_per_second": median(one.plain.tokens / one.plain.seconds for one in rounds),
        "tokens_per_second": median(one.drafted.tokens / one.drafted.seconds for one in rounds),
        "speedup": spread(ratios),
        "tokens_per_step": spec_stats.tokens_per_step,
        "mean_acceptance_length": spec_stats.mean_acceptance_length,
        "drafted": spec_stats.drafted,
        "accepted": spec_stats.accepted,
        "acceptance_rates": spec_stats.rates,
        "widths": dict(sorted(spec_stats.widths.items())),
        "drafters": {name: asdict(stats) for name, stats in spec_stats.drafters.items()},
        "suspended": spec_stats.suspended,
        "suspension": spec_stats.suspension.as_json() if spec_stats.suspension else None,
        "request_milliseconds": {
            "plain": request_times([stats for one in rounds for stats in one.plain.requests]),
            "drafted": request_times([stats for one in rounds for stats in one.drafted.requests]),
        },
        "outside_models": median(share for one in rounds for share in one.outside),
        "different_texts": sum(one.different for one in rounds),
    }


# Prompts for `--edits`: (parameter, its new name, function)
FUNCTIONS = (
    (
        "values",
        "numbers",
        """def running_mean(values, size):
    if size < 1:
        raise ValueError("size must be at least 1")
    means = []
    total = 0.0
    for index, value in enumerate(values):
        total += value
        if index >= size:
            total -= values[index - size]
        means.append(total / min(index + 1, size))
    return means""",
    ),
    (
        "text",
        "message",
        """def count_words(text, shortest=1):
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        if len(word) >= shortest:
            counts[word] = counts.get(word, 0) + 1
    ordered = sorted(counts.items(), key=lambda pair: -pair[1])
    return ordered[: len(text)]""",
    ),
    (
        "items",
        "elements",
        """def merge_sort(items):
    if len(items) <= 1:
        return items
    middle = len(items) // 2
    left = merge_sort(items[:middle])
    right = merge_sort(items[middle:])
    merged = []
    while left and right:
        if left[0] <= right[0]:
            merged.append(left.pop(0))
        else:
            merged.append(right.pop(0))
    return merged + left + right""",
    ),
    (
        "number",
        "candidate",
        """def is_prime(number):
    if number < 2:
        return False
    if number % 2 == 0:
        return number == 2
    divisor = 3
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 2
    return True""",
    ),
    (
        "path",
        "filename",
        """def read_settings(path):
    settings = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            key, _, value = line.partition("=")
            settings[key.strip()] = value.strip()
    return settings""",
    ),
    (
        "rows",
        "records",
        """def print_table(rows, columns):
    widths = [len(column) for column in columns]
    for row in rows:
        for index, column in enumerate(columns):
            widths[index] = max(widths[index], len(str(row[column])))
    print("  ".join(column.ljust(width) for column, width in zip(columns, widths)))
    for row in rows:
        print("  ".join(str(row[column]).ljust(width) for column, width in zip(columns, widths)))""",
    ),
    (
        "graph",
        "network",
        """def shortest_path(graph, start, goal):
    queue = [[start]]
    visited = {start}
    while queue:
        path = queue.pop(0)
        node = path[-1]
        if node == goal:
            return path
        for neighbour in graph.get(node, []):
            if neighbour not in visited:
                visited.add(neighbour)
                queue.append(path + [neighbour])
    return None""",
    ),
    (
        "amount",
        "total",
        """def make_change(amount, coins):
    if amount < 0:
        raise ValueError("amount must not be negative")
    change = {}
    for coin in sorted(coins, reverse=True):
        count = amount // coin
        if count > 0:
            change[coin] = count
            amount -= count * coin
    if amount > 0:
        raise ValueError("amount cannot be paid with these coins")
    return change""",
    ),
)


def edit_prompts() -> list[str]:
    """Return prompts that ask for a small change in code, so that most of the answer repeats the prompt."""
    return [
        f"Rename the parameter `{old}` to `{new}` in this function and return the whole function:\n"
        f"```python\n{function}\n```"
        for old, new, function in FUNCTIONS
    ]
