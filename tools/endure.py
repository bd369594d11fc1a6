"""Mixed load on every method at once, for as long as is wanted; every text must be that of a solo run.

    python tools/endure.py smollm2-135m --seconds 3600 --threads 1 --report endured.json

One engine for each way to draft, all in this process, all with fewer pages than their requests ask for: texts of any
length and temperature come, give way, come back, are dropped, and their cache is cleared under them. Afterwards no page
is missing, and the process is no larger than it was once everything had been touched. Exit code 1: something was wrong.
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

FLAT = 0.01  # by so much of itself may the memory have grown after the warm-up
CROWDED = 0.95  # of the pages in use
BACKLOG = 3  # requests that wait at any time, so that pages are never left over
BURST = 4  # steps of one engine before the next has its turn
DROPPED, CLEARED = 0.02, 0.004  # how likely it is in a step

SAID = "the sea is wide and old ships cross it slowly while birds follow them over grey water to the north"
WORDS = SAID.split()
LENGTHS = (1, 9, 24, 48, 90, 120)
# What is asked of the sampler, each in its turn. `stop` and `ignore_eos` decide where a text ends.
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
    {"temperature": 0.0, "prediction": SAID},
    {"temperature": 1.0, "ignore_eos": False, "structured": StructuredOutput("regex", "[0-9]{2,9}")},
)
# Whatever drafts for the models of the catalog, and the ways in which it can be asked to.
WAYS = (
    "none",
    "ngram:adaptive=no",
    "suffix:adaptive=no,cached_requests=64",  # what it remembers has an end soon
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
class Asked:
    """A request, and what it is answered when nobody else is there."""

    prompt: str | list[int]
    params: SamplingParams
    expected: object
    texts: list[list[int]]


def told(output: Output) -> object:
    """All that a user sees of an answer but its speed."""
    return [(one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs) for one in output.completions]


def solo(llm: LLM, requests: Sequence[tuple[str | list[int], SamplingParams]]) -> list[Asked]:
    """Each by itself, by plain decoding."""
    found = []
    for prompt, params in requests:
        (output,) = llm.generate([prompt], replace(params, speculate=False, prediction=None))
        found.append(Asked(prompt, params, told(output), [one.token_ids for one in output.completions]))
    return found


def mixed(
    count: int, dice: random.Random, lengths: Sequence[int] = LENGTHS, words: int = 40
) -> Iterator[tuple[str, SamplingParams]]:
    """Prompts of fewer than `words`, and parameters of every kind in turn, with seeds of their own."""
    for number in range(count):
        prompt = " ".join(dice.choice(WORDS) for _ in range(dice.randrange(1, words)))
        params = SamplingParams(max_tokens=dice.choice(lengths), seed=number, ignore_eos=True)
        yield prompt, replace(params, **KINDS[number % len(KINDS)])


class Crowd:
    """The requests that an engine has, and what became of those it had."""

    def __init__(self, name: str, llm: LLM, pool: Sequence[Asked], seed: int) -> None:
        self.name, self.engine, self.pool = name, llm.engine, pool
        self.dice = random.Random(f"{name} {seed}")
        self.live: dict[str, Asked] = {}
        self.seen: Counter[str] = Counter()
        self.faults: list[str] = []

    def turn(self) -> None:
        """Some come, some are dropped, all go on."""
        while self.engine.scheduler.waiting_count < BACKLOG:
            asked = self.dice.choice(self.pool)
            self.live[self.engine.add(asked.prompt, asked.params)] = asked
        if self.dice.random() < DROPPED:
            self.drop(self.dice.choice(list(self.live)))
        if self.dice.random() < CLEARED:
            self.engine.clear_cache()
            self.seen["cleared"] += 1
        self.step()

    def step(self) -> None:
        for output in self.engine.step(quiet=self.dice.random() < 0.5):
            if output.finished:
                self.finish(output)
        self.engine.scheduler.check()
        cache = self.engine.scheduler.cache
        use = 1 - cache.available / cache.pages
        self.seen.update(steps=1, crowded=use >= CROWDED)

    def finish(self, output: Output) -> None:
        asked = self.live.pop(output.request_id)
        if told(output) != asked.expected:
            self.faults.append(f"{self.name}: another text than alone for {asked.prompt!r} with {asked.params}")
        assert output.stats is not None
        spec_stats = output.stats.speculation
        tokens = sum(len(one.token_ids) for one in output.completions)
        self.seen.update(texts=1, tokens=tokens, preempted=output.stats.preemptions)
        self.seen.update(drafted=spec_stats.drafted, kept=spec_stats.accepted)

    def drop(self, name: str) -> None:
        """What an abort leaves is the beginning of what would have come."""
        asked, output = self.live.pop(name), self.engine.abort(name)
        assert output is not None, "a request that lives is not known"
        for one, text in zip(output.completions, asked.texts, strict=True):
            if one.token_ids != text[: len(one.token_ids)]:
                self.faults.append(f"{self.name}: a dropped text began otherwise for {asked.prompt!r}")
        self.seen["dropped"] += 1

    def end(self) -> None:
        """Let everyone finish, and see what is left behind."""
        while self.live:
            self.step()
        self.faults += [f"{self.name}: {fault}" for fault in left_behind(self.engine)]


def left_behind(engine: Engine) -> list[str]:
    """What an engine without requests should not have; empty where all is well."""
    cache = engine.scheduler.cache
    left = {
        "requests": len(engine.parents),
        "rows": engine.scheduler.running_count + engine.scheduler.waiting_count,
        "pages": cache.pages - cache.available,
        "rows of the controller": engine.spec_manager.controller.num_requests,
    }
    return [f"{count} {what} left behind" for what, count in left.items() if count]


@dataclass
class Endured:
    seconds: float
    seen: dict[str, dict[str, int]]  # by way
    resident: list[tuple[float, int]] = field(default_factory=list)  # when, and bytes
    warm: float = 0.0  # seconds until all had been touched
    faults: list[str] = field(default_factory=list)

    @property
    def level(self) -> int:
        """Bytes after the warm-up, the median of a while."""
        return self._median(lambda share: share <= 0.1)

    @property
    def grown(self) -> float:
        """Of the memory, from then to the end, as a share."""
        return self._median(lambda share: share >= 0.9) / self.level - 1

    def _median(self, wanted: Callable[[float], bool]) -> int:
        later = [(at, size) for at, size in self.resident if at >= self.warm]
        first, last = later[0][0], later[-1][0]
        return int(median(size for at, size in later if wanted((at - first) / max(last - first, 1e-9))))

    @property
    def total(self) -> Counter[str]:
        return sum((Counter(each) for each in self.seen.values()), Counter())


def endure(
    crowds: Sequence[Crowd], seconds: float, warm: float, tell: Callable[[Endured], None], flat: float = FLAT
) -> Endured:
    """Let the crowds take turns. `tell` hears of it once a minute.

    warm: seconds after which the memory may grow by the share `flat` of itself and no more.
    """
    began = time.monotonic()
    found = Endured(seconds, {}, warm=warm)
    minute = 0
    while (at := time.monotonic() - began) < seconds and not any(batch_size.faults for batch_size in crowds):
        for batch_size in crowds:
            for _ in range(BURST):
                batch_size.turn()
        found.resident.append((round(time.monotonic() - began, 1), resident()))
        if at // 60 > minute:
            minute = int(at // 60)
            tell(_seen(found, crowds, at))
    for batch_size in crowds:
        batch_size.end()
    found.resident.append((round(time.monotonic() - began, 1), resident()))
    found = _seen(found, crowds, time.monotonic() - began)
    found.faults = [fault for batch_size in crowds for fault in batch_size.faults]
    if found.resident[-1][0] > warm and found.grown > flat:
        found.faults.append(f"the memory grew by {found.grown:.2%} after the warm-up")
    return found


def _seen(found: Endured, crowds: Sequence[Crowd], at: float) -> Endured:
    return replace(found, seconds=round(at, 1), seen={batch_size.name: dict(batch_size.seen) for batch_size in crowds})


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def line(found: Endured) -> str:
    seen = found.total
    parts = [f"{found.seconds:.0f} s", f"{seen['texts']} texts compared", f"{seen['tokens']} tokens"]
    parts += [f"{seen['dropped']} dropped", f"{seen['preempted']} preemptions", f"{seen['cleared']} caches cleared"]
    parts += [f"{seen['crowded'] / max(seen['steps'], 1):.0%} of {seen['steps']} steps with 95 % of the pages in use"]
    parts += [f"{seen['kept']} of {seen['drafted']} drafted tokens kept", f"{found.resident[-1][1] / 2**20:.1f} MiB"]
    return ", ".join(parts)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def open_crowds(model: str, ways: Sequence[str], options: Mapping[str, Any], pool: Sequence[Asked]) -> list[Crowd]:
    crowds = []
    shaped = next((asked for asked in pool if asked.params.structured is not None), None)
    for number, way in enumerate(ways):
        llm = LLM(model, speculate=way, **options)
        if shaped is not None:  # an engine's first grammar takes 24 MiB for good, which is no leak
            llm.generate([shaped.prompt], shaped.params)
        crowds.append(Crowd(way, llm, pool, number))
        say(f"{way}: open, {resident() / 2**20:.1f} MiB")
    return crowds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ways", nargs="+", default=WAYS, help="what `--speculate` takes, each an engine of its own")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--warm", type=float, default=900.0, help="seconds after which the memory may not grow")
    parser.add_argument("--requests", type=int, default=130, help="different ones")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cache-tokens", type=int, default=384)
    parser.add_argument("--report", type=Path, help="a file for all figures, as JSON")
    arguments = parser.parse_args()
    plain = LLM(arguments.model, threads=arguments.threads, prefix_cache=False, cache_tokens=2048)
    pool = solo(plain, list(mixed(arguments.requests, random.Random(1))))
    say(f"{len(pool)} texts written alone")
    options = {"threads": arguments.threads, "cache_tokens": arguments.cache_tokens, "max_requests": 12}
    crowds = open_crowds(arguments.model, arguments.ways, {**options, "max_step_tokens": 96}, pool)
    found = endure(crowds, arguments.seconds, arguments.warm, lambda now: say(line(now)))
    say(line(found))
    say(f"memory after the warm-up {found.level / 2**20:.1f} MiB, change to the end {found.grown:+.2%}")
    for fault in found.faults:
        say(f"FAULT {fault}")
    say("failed" if found.faults else "held")
    if arguments.report:
        arguments.report.write_text(json.dumps({**asdict(found), "grown": found.grown}, indent=1) + "\n")
    return 1 if found.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
