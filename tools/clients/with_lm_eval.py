"""lm-eval's `local-completions`: a task that scores answers and one that generates, with speculation and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stage import Environment, Record, Server

PACKAGES = ("lm-eval[api]", "transformers")
TASKS = Path(__file__).with_name("tasks")
NAMES = ("outrider_capitals", "outrider_counting")


def run(servers: dict[str, Server], environment: Environment, scratch: Path, record: Record) -> None:
    """Compare the scores. servers: by drafting method."""
    found = {how: evaluate(server, environment, scratch / "lm-eval" / how) for how, server in servers.items()}
    (first, (scores, samples)), *others = found.items()
    for name in NAMES:
        numbers = {key.split(",")[0]: value for key, value in scores[name].items() if isinstance(value, float)}
        record.note(f"{name} has scores, {first}", bool(numbers), numbers)
        record.note(f"{name} has samples", len(samples[name]) > 4, len(samples[name]))
    for how, (other_scores, other_samples) in others:
        record.note(f"scores with {how} equal those with {first}", other_scores == scores)
        record.note(f"so does every log-probability and text with {how}", other_samples == samples)


def evaluate(server: Server, environment: Environment, folder: Path) -> tuple[Any, Any]:
    """Return the scores and the responses of the server, by task."""
    settings = {
        "model": server.model,
        "base_url": f"{server.base}/completions",
        "tokenizer": server.tokenizer,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
        "max_retries": 1,
    }
    arguments = ",".join(f"{key}={value}" for key, value in settings.items())
    options = ["--model", "local-completions", "--model_args", arguments, "--tasks", ",".join(NAMES)]
    where = ["--include_path", TASKS, "--output_path", folder, "--log_samples", "--batch_size", "1"]
    cache = {"HF_HOME": str(folder.parent / "cache"), "OPENAI_API_KEY": "none"}
    environment.run("lm_eval", *options, *where, extra=cache, cwd=TASKS)
    results = json.loads(newest(folder, "results_*.json").read_text())["results"]
    scores = {name: {key: value for key, value in results[name].items() if key != "alias"} for name in NAMES}
    samples = {name: answers(newest(folder, f"samples_{name}_*.jsonl")) for name in NAMES}
    return scores, samples


def newest(folder: Path, pattern: str) -> Path:
    return max(folder.rglob(pattern), key=lambda path: path.stat().st_mtime)


def answers(path: Path) -> list[Any]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["resps"] for row in sorted(rows, key=lambda row: int(row["doc_id"]))]
