"""aiperf: several concurrent streamed chats, and the figures that it reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from stage import Environment, Record, Server

PACKAGES = ("aiperf",)
FIGURES = {
    "time_to_first_token": "first token",
    "inter_token_latency": "between tokens",
    "request_latency": "a request",
    "output_token_throughput": "all together",
}
TOKENS = 32  # of an answer
TOKENIZER = "outrider/served"
REVISION = "0" * 40


def run(server: Server, environment: Environment, scratch: Path, record: Record, requests: int) -> None:
    folder = scratch / "aiperf"
    shutil.rmtree(folder, ignore_errors=True)
    asked = {
        "model": server.model,
        "url": server.address,
        "endpoint-type": "chat",
        "tokenizer": TOKENIZER,
        "concurrency": 4,
        "request-count": requests,
        "synthetic-input-tokens-mean": 64,
        "synthetic-input-tokens-stddev": 8,
        "output-tokens-mean": TOKENS,
        "extra-inputs": "ignore_eos:true",
        "artifact-dir": folder,
        "random-seed": 1,
        "ui": "none",
    }
    flags = [str(part) for key, value in asked.items() for part in (f"--{key}", value)]
    environment.run(
        "aiperf", "profile", "--streaming", *flags, extra=as_cached(server.tokenizer, scratch / "hub"), cwd=scratch
    )
    report: dict[str, Any] = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
    done = report["request_count"]["avg"]
    record.note("all requests were answered", done == requests, f"{done:.0f} of {requests}")
    errors = report.get("error_request_count", {}).get("avg", 0)
    record.note("none failed", errors == 0, errors or "")
    for name, shown in FIGURES.items():
        figure = report[name]
        spread = f", p99 {figure['p99']:.1f}" if figure.get("p99") is not None else ""
        record.note(shown, figure["avg"] > 0, f"{figure['avg']:.1f} {figure['unit']}{spread}")
    # It knows vLLM's report of speculation, and finds it here.
    steps, length = (
        report["total_spec_decode_steps"]["avg"],
        report["spec_decode_token_weighted_acceptance_length"]["avg"],
    )
    record.note("speculation is reported", steps > 0, f"{steps:.0f} steps with a draft, {length:.2f} tokens each")


def as_cached(tokenizer: Path, home: Path) -> dict[str, str]:
    """Put the tokenizer into a hub cache: aiperf reads a plain folder only with network access."""
    kept = home / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    shutil.copytree(tokenizer, kept / "snapshots" / REVISION, dirs_exist_ok=True)
    (kept / "refs").mkdir(exist_ok=True)
    (kept / "refs" / "main").write_text(REVISION)
    return {"HF_HOME": str(home)}
