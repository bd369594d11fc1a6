"""Answer a file of prompts in one batch and write the answers to another file, with a progress bar.

    python examples/batch.py prompts.jsonl answers.jsonl

Each line of the input is text, or a JSON object with `prompt`. Answers are written as they finish, in any order.
"""

import json
import sys
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider import LLM, Output, SamplingParams


def read(path: Path) -> list[str]:
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    return [json.loads(line)["prompt"] if line.lstrip().startswith("{") else line for line in lines]


def answer(llm: LLM, prompts: list[str], out: TextIO, bar: Progress) -> None:
    task = bar.add_task("answers", total=len(prompts), speed="")
    lengths: dict[str, int] = {}

    def show(output: Output) -> None:
        lengths[output.request_id] = len(output.completions[0].token_ids)
        bar.update(task, speed=f"{sum(lengths.values())} tokens")
        if output.finished:
            out.write(json.dumps({"prompt": output.prompt, "text": output.completions[0].text}) + "\n")
            bar.advance(task)

    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48), progress=show)


def main() -> None:
    source, destination = map(Path, sys.argv[1:3])
    llm = LLM("smollm2-135m", speculate="suffix")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
    with destination.open("w") as out, Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        answer(llm, read(source), out, bar)
    for method, spec_stats in llm.method_stats.items():
        sys.stderr.write(f"{spec_stats.tokens_per_step:.2f} tokens per step with {method}\n")


if __name__ == "__main__":
    main()
