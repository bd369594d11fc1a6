"""aiperf: several chats at once, streamed, and its own figures of them."""

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
# Offline, aiperf takes a folder for a name on the hub; online it reads the folder, and asks nobody.
ONLINE = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}


def run(server: Server, environment: Environment, scratch: Path, record: Record, requests: int) -> None:
    folder = scratch / "aiperf"
    shutil.rmtree(folder, ignore_errors=True)
    asked = {
        "model": server.model,
        "url": server.address,
        "endpoint-type": "chat",
        "tokenizer": server.tokenizer,
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
    environment.run("aiperf", "profile", "--streaming", *flags, extra=ONLINE, cwd=scratch)
    told: dict[str, Any] = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
    done = told["request_count"]["avg"]
    record.note("all requests were answered", done == requests, f"{done:.0f} of {requests}")
    errors = told.get("error_request_count", {}).get("avg", 0)
    record.note("none failed", errors == 0, errors or "")
    for name, shown in FIGURES.items():
        figure = told[name]
        spread = f", p99 {figure['p99']:.1f}" if figure.get("p99") is not None else ""
        record.note(shown, figure["avg"] > 0, f"{figure['avg']:.1f} {figure['unit']}{spread}")
