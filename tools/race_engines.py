"""Race engines in turns on this machine: with other options, or with the sources of another commit.

Each engine is a process of its own, and answers while the others wait. Prompts are random tokens, answers have a fixed
length. Prints the median tokens/s of each engine, times with the prompts, and its ratios to the first engine in the
same round: the median, the lowest and the highest.

Usage, with the commit before in a worktree:
    race_engines.py -m random/llama-3.1-8b --batch 1,8,64 --tokens 96,256 \\
        --engine before '{"quantize": "int4", "source": "../before/src"}' --engine now '{"quantize": "int4"}'

Options are those of `LLM`; `source` is a folder to import Outrider from (default: the installed one). A built CPU
backend must lie in it (`src/outrider/kernels/cpu/_native*.so`). A length of 1 measures prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from outrider.bench.peers.environment import Child, PeerFailedError

FIRST_TOKEN = 3  # ids below are often special


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2-135m", help="model of all engines")
    parser.add_argument("--engine", nargs=2, action="append", required=True, metavar=("NAME", "JSON"))
    parser.add_argument("--batch", default="1", help="batch sizes")
    parser.add_argument("--tokens", default="96", help="lengths of the answers")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after one that is not counted")
    asked = parser.parse_args()
    shapes = list(product(numbers(asked.batch), numbers(asked.tokens)))
    logs = Path(tempfile.mkdtemp(prefix="race-"))
    engines = {name: start(name, asked.model, json.loads(options), logs) for name, options in asked.engine}
    times: dict[tuple[int, int], dict[str, list[float]]] = {shape: {name: [] for name in engines} for shape in shapes}
    try:
        for child in engines.values():  # all have begun to load
            child.ask("open")
        for number, shape in product(range(asked.rounds + 1), shapes):
            for name, child in engines.items():
                seconds = child.ask("answer", batch=shape[0], tokens=shape[1], prompt=asked.prompt, seed=number)[
                    "found"
                ]
                if number:
                    times[shape][name].append(seconds)
    except PeerFailedError as error:
        sys.stderr.write(f"an engine failed: {error}\n")
        return 1
    finally:
        for child in engines.values():
            child.close()
    report(times, asked.prompt)
    return 0


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def start(name: str, model: str, options: dict[str, Any], logs: Path) -> Child:
    source = options.pop("source", None)
    path = {} if source is None else {"PYTHONPATH": str(Path(source).resolve())}
    command = [sys.executable, __file__, "--answer", model, json.dumps(options)]
    return Child(command, os.environ | path, logs / f"{name}.log")


def report(times: dict[tuple[int, int], dict[str, list[float]]], prompt: int) -> None:
    names = list(next(iter(times.values())))
    say("| batch, tokens | " + " | ".join(names) + " |")
    say("|---|" + "---:|" * len(names))
    for (batch, tokens), found in times.items():
        first = found[names[0]]
        count = batch * (tokens if tokens > 1 else prompt)
        cells = []
        for name in names:
            cell = f"{count / statistics.median(found[name]):,.1f}"
            if name != names[0]:
                ratios = [one / other for one, other in zip(first, found[name], strict=True)]
                cell += f" ({statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f})"
            cells.append(cell)
        say(f"| {batch}, {tokens} | " + " | ".join(cells) + " |")


def answer(model: str, options: dict[str, Any]) -> None:
    """Answer the requests of `main`: the process of an engine."""
    from outrider import LLM, SamplingParams

    llm = LLM(model, **options)
    vocabulary = llm.engine.model.config.vocabulary
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "open":
            say(json.dumps({"found": None}))
            continue
        rng = random.Random(request["seed"])
        prompts = [rng.choices(range(FIRST_TOKEN, vocabulary), k=request["prompt"]) for _ in range(request["batch"])]
        params = SamplingParams(max_tokens=request["tokens"], temperature=0, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate(prompts, params)
        say(json.dumps({"found": time.perf_counter() - begin}))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer(sys.argv[2], json.loads(sys.argv[3]))
    else:
        sys.exit(main())
