"""Soak test: run a mixed load on every method for a given time and compare every text with a solo run.

    python tools/endure.py smollm2-135m --seconds 3600 --threads 1 --report endured.json

Opens one engine per method in this process, each with fewer KV pages than its requests need. Requests of all lengths
and sampling parameters are added, preempted, resumed and aborted, and prefix caches are cleared. In the end every page
must be free, and the memory of the process must not have grown since the warm-up. Exits with code 1 on any fault.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from outrider import LLM, Output, SamplingParams, StructuredOutput
from outrider.engine import Engine

FLAT = 0.01  # the memory may grow by this share after the warm-up
FULL = 0.95  # share of pages in use from which on a step counts as full
BACKLOG = 3  # requests that always wait, so that pages are scarce
BURST = 4  # steps of one engine before the next engine runs
ABORT, CLEAR = 0.02, 0.004  # probability in each step: abort a request, clear the prefix cache

SENTENCE = "the sea is wide and old ships cross it slowly while birds follow them over grey water to the north"
WORDS = SENTENCE.split()
LENGTHS = (1, 9, 24, 48, 90, 120)
# Sampling parameters of the requests, used in rotation.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0},
    {"temperature": 1.0, "ignore_eos": False},
    {"temperature": 0.8, "stop": ["e", " the"]},
    {"temperature": 0.0, "stop": ["."], "logprobs": 2},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "speculate": False},
    {"temperature": 0.0, "speculate": "ngram"},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0.0, "prediction": SENTENCE},
    {"temperature": 1.0, "ignore_eos": False, "structured": StructuredOutput("regex", "[0-9]{2,9}")},
)
# Every method that ships for the models of the catalog, in its main variants.
METHODS = (
    "none",
    "ngram:adaptive=no",
    "suffix:adaptive=no,cached_requests=64",  # a small cache, so that entries are evicted
    "prediction:adaptive=no",
    "draft_model:adaptive=no",
    "medusa:adaptive=no",
    "eagle3:adaptive=no",
    "dspark:adaptive=no",
    "eagle3",
    "eagle3:adaptive=no,width=7,branches=2",
    "eagle3:adaptive=no,draft=probabilistic",
    "ngram+eagle3:adaptive=no",
)


@dataclass(frozen=True)
class PoolRequest:
    """A request with its answer in a solo run."""

    prompt: str | list[int]
    params: SamplingParams
    expected: object
    texts: list[list[int]]


def visible_output(output: Output) -> object:
    """Return everything that a user sees of an answer except its speed."""
    return [
        (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, answer.logprobs)
        for answer in output.completions
    ]


def solo(llm: LLM, requests: Sequence[tuple[str | list[int], SamplingParams]]) -> list[PoolRequest]:
    """Answer each request alone by plain decoding."""
    answered = []
    for prompt, params in requests:
        (output,) = llm.generate([prompt], replace(params, speculate=False, prediction=None))
        token_ids = [completion.token_ids for completion in output.completions]
        answered.append(PoolRequest(prompt, params, visible_output(output), token_ids))
    return answered


def mixed(
    count: int, rng: random.Random, lengths: Sequence[int] = LENGTHS, words: int = 40
) -> Iterator[tuple[str, SamplingParams]]:
    """Yield prompts of fewer than `words` words with the parameters of `KINDS` in rotation, each with its own seed."""
    for number in range(count):
        prompt = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, words)))
        params = SamplingParams(max_tokens=rng.choice(lengths), seed=number, ignore_eos=True)
        yield prompt, replace(params, **KINDS[number % len(KINDS)])


class Workload:
    """The live requests of one engine, and counters and faults of the finished ones."""

    def __init__(self, name: str, llm: LLM, pool: Sequence[PoolRequest], seed: int) -> None:
        self.name, self.engine, self.pool = name, llm.engine, pool
        self.rng = random.Random(f"{name} {seed}")
        self.live: dict[str, PoolRequest] = {}
        self.seen: Counter[str] = Counter()
        self.faults: list[str] = []

    def advance(self) -> None:
        """Add requests, sometimes abort one or clear the cache, and run one step."""
        while self.engine.scheduler.waiting_count < BACKLOG:
            asked = self.rng.choice(self.pool)
            self.live[self.engine.add(asked.prompt, asked.params)] = asked
        if self.rng.random() < ABORT:
            self.abort(self.rng.choice(list(self.live)))
        if self.rng.random() < CLEAR:
            self.engine.clear_cache()
            self.seen["cleared"] += 1
        self.step()

    def step(self) -> None:
        for output in self.engine.step(quiet=self.rng.random() < 0.5):
            if output.finished:
                self.finish(output)
        self.engine.scheduler.check()
        cache = self.engine.scheduler.cache
        use = 1 - cache.available / cache.pages
        self.seen.update(steps=1, full=use >= FULL)

    def finish(self, output: Output) -> None:
        asked = self.live.pop(output.request_id)
        if visible_output(output) != asked.expected:
            self.faults.append(
                f"{self.name}: the text differs from the solo run for {asked.prompt!r} with {asked.params}"
            )
        assert output.stats is not None
        spec_stats = output.stats.speculation
        tokens = sum(len(one.token_ids) for one in output.completions)
        self.seen.update(texts=1, tokens=tokens, preempted=output.stats.preemptions)
        self.seen.update(drafted=spec_stats.drafted, accepted=spec_stats.accepted)

    def abort(self, name: str) -> None:
        """Abort a request; its tokens so far must be a prefix of the solo run's."""
        asked, output = self.live.pop(name), self.engine.abort(name)
        assert output is not None, "the engine must know a live request"
        for one, text in zip(output.completions, asked.texts, strict=True):
            if one.token_ids != text[: len(one.token_ids)]:
                self.faults.append(f"{self.name}: the text of an aborted request differs for {asked.prompt!r}")
        self.seen["aborted"] += 1

    def end(self) -> None:
        """Finish all requests and check that the engine holds nothing."""
        while self.live:
            self.step()
        self.faults += [f"{self.name}: {fault}" for fault in left_behind(self.engine)]


def left_behind(engine: Engine) -> list[str]:
    """Return what an engine without requests still holds; empty if it holds nothing."""
    cache = engine.scheduler.cache
    left = {
        "requests": len(engine.parents),
        "rows": engine.scheduler.running_count + engine.scheduler.waiting_count,
        "pages": cache.pages - cache.available,
        "rows of the controller": engine.spec_manager.controller.num_requests,
    }
    return [f"{count} {name} left behind" for name, count in left.items() if count]


@dataclass
class SoakResult:
    seconds: float
    seen: dict[str, dict[str, int]]  # counters by method
    resident: list[tuple[float, int]] = field(default_factory=list)  # (seconds, bytes)
    warm: float = 0.0  # seconds of the warm-up
    faults: list[str] = field(default_factory=list)

    @property
    def level(self) -> int:
        """Return the bytes after the warm-up: the median of the first tenth of the rest."""
        return self._median(lambda share: share <= 0.1)

    @property
    def grown(self) -> float:
        """Return the growth of memory from the warm-up to the end, as a share."""
        return self._median(lambda share: share >= 0.9) / self.level - 1

    def _median(self, wanted: Callable[[float], bool]) -> int:
        later = [(seconds, size) for seconds, size in self.resident if seconds >= self.warm]
        first, last = later[0][0], later[-1][0]
        return int(median(size for seconds, size in later if wanted((seconds - first) / max(last - first, 1e-9))))

    @property
    def total(self) -> Counter[str]:
        return sum((Counter(each) for each in self.seen.values()), Counter())


def endure(
    workloads: Sequence[Workload], seconds: float, warm: float, report: Callable[[SoakResult], None], flat: float = FLAT
) -> SoakResult:
    """Run the workloads in rotation; call `report` once a minute.

    warm: seconds after which the memory may grow by the share `flat` at most.
    """
    began = time.monotonic()
    found = SoakResult(seconds, {}, warm=warm)
    minute = 0
    while (elapsed := time.monotonic() - began) < seconds and not any(workload.faults for workload in workloads):
        for workload in workloads:
            for _ in range(BURST):
                workload.advance()
        found.resident.append((round(time.monotonic() - began, 1), resident()))
        if elapsed // 60 > minute:
            minute = int(elapsed // 60)
            report(_seen(found, workloads, elapsed))
    for workload in workloads:
        workload.end()
    found.resident.append((round(time.monotonic() - began, 1), resident()))
    found = _seen(found, workloads, time.monotonic() - began)
    found.faults = [fault for workload in workloads for fault in workload.faults]
    if found.resident[-1][0] > warm and found.grown > flat:
        found.faults.append(f"the memory grew by {found.grown:.2%} after the warm-up")
    return found


def _seen(found: SoakResult, workloads: Sequence[Workload], seconds: float) -> SoakResult:
    return replace(
        found, seconds=round(seconds, 1), seen={workload.name: dict(workload.seen) for workload in workloads}
    )


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def line(found: SoakResult) -> str:
    seen = found.total
    parts = [f"{found.seconds:.0f} s", f"{seen['texts']} texts compared", f"{seen['tokens']} tokens"]
    parts += [f"{seen['aborted']} aborted", f"{seen['preempted']} preemptions", f"{seen['cleared']} caches cleared"]
    parts += [f"{seen['full'] / max(seen['steps'], 1):.0%} of {seen['steps']} steps with 95 % of the pages in use"]
    parts += [
        f"{seen['accepted']} of {seen['drafted']} drafted tokens accepted",
        f"{found.resident[-1][1] / 2**20:.1f} MiB",
    ]
    return ", ".join(parts)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def open_workloads(
    model: str, methods: Sequence[str], options: Mapping[str, Any], pool: Sequence[PoolRequest]
) -> list[Workload]:
    workloads = []
    shaped = next((asked for asked in pool if asked.params.structured is not None), None)
    for number, method in enumerate(methods):
        llm = LLM(model, speculate=method, **options)
        if shaped is not None:  # an engine's first grammar allocates 24 MiB once, which is not a leak
            llm.generate([shaped.prompt], shaped.params)
        workloads.append(Workload(method, llm, pool, number))
        say(f"{method}: opened, {resident() / 2**20:.1f} MiB")
    return workloads


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ways", nargs="+", default=METHODS, help="values of `--speculate`, one engine for each")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--warm", type=float, default=900.0, help="seconds after which the memory may not grow")
    parser.add_argument("--requests", type=int, default=130, help="number of different requests")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cache-tokens", type=int, default=384)
    parser.add_argument("--report", type=Path, help="write all figures to this file as JSON")
    arguments = parser.parse_args()
    plain = LLM(arguments.model, threads=arguments.threads, prefix_cache=False, cache_tokens=2048)
    pool = solo(plain, list(mixed(arguments.requests, random.Random(1))))
    say(f"{len(pool)} texts answered alone")
    options = {"threads": arguments.threads, "cache_tokens": arguments.cache_tokens, "max_requests": 12}
    workloads = open_workloads(arguments.model, arguments.ways, {**options, "max_step_tokens": 96}, pool)
    found = endure(workloads, arguments.seconds, arguments.warm, lambda now: say(line(now)))
    say(line(found))
    say(f"memory after the warm-up {found.level / 2**20:.1f} MiB, change to the end {found.grown:+.2%}")
    for fault in found.faults:
        say(f"FAULT {fault}")
    say("failed" if found.faults else "passed")
    if arguments.report:
        arguments.report.write_text(json.dumps({**asdict(found), "grown": found.grown}, indent=1) + "\n")
    return 1 if found.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
