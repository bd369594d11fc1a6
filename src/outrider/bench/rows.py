"""`outrider bench rows`: time one step on the CPU by its number of rows and by threads.

A step of N rows verifies N - 1 tokens of one request, as speculation does. Its time is split into the layers, the
output matrix (head) and the rest, which is host work. Rows and thread counts take turns within each round, so that a
disturbance of the machine affects all figures alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..device import SingleThreadedTorch
from ..diagnostics.machine import machine_facts
from ..kernels import load
from ..llm import LLM
from ..request import Request
from .speculation import ModelTimer
from .speed import prefilled, spread, time_step

BACKEND = "cpu"


@dataclass(frozen=True)
class RowsConfig:
    threads: Sequence[int]
    rows: Sequence[int] = (1, 2, 4, 5, 8, 16, 32)
    context: int = 256  # tokens in the KV cache before the step
    rounds: int = 9

    @property
    def engine(self) -> dict[str, Any]:
        """Options of an engine with just the capacity that is needed: larger steps take longer to profile."""
        most = max(self.rows)
        step_tokens = max(most, 64)
        return {
            "backend": BACKEND,
            "threads": max(self.threads),
            "max_requests": 1,
            "max_step_tokens": step_tokens,
            "cache_tokens": 2 * (self.context + most + step_tokens),
        }


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step, and of its parts in a second step that ran them one by one."""

    total: float
    layers: float
    head: float


def measure(open_model: Callable[[], LLM], config: RowsConfig) -> dict[str, Any]:
    """Measure every number of rows with every thread count."""
    llm = open_model()
    timer = ModelTimer(llm.engine.model)
    samples: dict[tuple[int, int], list[StepParts]] = {}  # by threads and rows
    with prefilled(llm, config.context, max(config.rows), random.Random(0)) as request, SingleThreadedTorch(BACKEND):
        llm.engine.runner.model = timer  # type: ignore[assignment]
        for number in range(config.rounds + 1):
            for threads in config.threads:
                load(BACKEND, threads)
                time_parts(llm, timer, request, config.context, 1)  # starts the threads
                for rows in config.rows:
                    parts = time_parts(llm, timer, request, config.context, rows)
                    if number:  # the first round is the warm-up
                        samples.setdefault((threads, rows), []).append(parts)
    return report(llm, config, samples)


def time_parts(llm: LLM, timer: ModelTimer, request: Request, context: int, rows: int) -> StepParts:
    """Time a step, and then its parts: in a replay (single_row.py) they cannot be told apart."""
    seconds = time_step(llm, request, context, rows)
    layers, head, recordings = timer.layers, timer.head, llm.engine.runner.single_row.recordings
    recordings.enabled = False
    time_step(llm, request, context, rows)
    recordings.enabled = True
    layers, head = timer.layers - layers, timer.head - head
    return StepParts(seconds, layers, head)


def report(llm: LLM, config: RowsConfig, samples: dict[tuple[int, int], list[StepParts]]) -> dict[str, Any]:
    """Return one record for each thread count and number of rows."""
    one_row = {threads: median(step.total for step in samples[threads, 1]) for threads in config.threads}
    return {
        "model": llm.resolved.model,
        "machine": machine_facts(llm.engine.device),
        "weight_bytes_per_step": llm.engine.weight_bytes,
        "context": config.context,
        "rounds": config.rounds,
        "steps": [record(threads, rows, steps, one_row[threads]) for (threads, rows), steps in samples.items()],
    }


def record(threads: int, rows: int, steps: Sequence[StepParts], one_row: float) -> dict[str, Any]:
    """Return the figures of one thread count and number of rows. one_row: seconds of a step of one row."""
    total, layers, head = (median(getattr(step, part) for step in steps) for part in ("total", "layers", "head"))
    return {
        "threads": threads,
        "rows": rows,
        "milliseconds": spread([step.total for step in steps], 1e3),
        "layers_milliseconds": 1e3 * layers,
        "head_milliseconds": 1e3 * head,
        "host_milliseconds": 1e3 * max(total - layers - head, 0.0),
        "relative_to_one": total / one_row,
        "further_row": (total / one_row - 1) / (rows - 1) if rows > 1 else None,
    }
