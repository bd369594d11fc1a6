"""schemathesis: valid and invalid requests generated from `/openapi.json`, on none of which the server may fail.

Requests of random fields contradict themselves nearly always, so a second pass draws from a narrower document, whose
requests reach the engine.
"""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from stage import Environment, Record, Server

PACKAGES = ("schemathesis",)
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
# Excluded, because a paused server answers no request.
LEFT_OUT = ("/pause", "/resume", "/reset_prefix_cache")
# Short answers: it is the requests that are of interest.
FLAGS = ("--max-tokens", "8", "--max-context", "256", "--max-body-bytes", "1000000")
OPERATIONS = 17
# Each of these has a meaning only beside another field, or without another.
CONTRARY = [
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "num_speculative_tokens",
    "stream_options",
    "top_logprobs",
    "max_completion_tokens",
    "continue_final_message",
    "add_generation_prompt",
    "best_of",
    "logit_bias",
    "min_tokens",
    "chat_template_kwargs",
    "prediction",
]
NARROW: dict[str, Any] = {
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
    "n": {"type": "integer", "minimum": 1, "maximum": 3},
    "speculate": {"enum": [True, False, "suffix", "ngram", "none"]},
    "speculate_width": {"type": "integer", "minimum": 0, "maximum": 16},
    "prompt": {
        "anyOf": [{"type": "string", "maxLength": 30}, {"type": "array", "items": {"enum": [5, 50]}, "minItems": 1}]
    },
    "messages": {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "additionalProperties": False,
            "properties": {"role": {"enum": ["user", "assistant"]}, "content": {"type": "string", "maxLength": 20}},
        },
    },
    "allowed_token_ids": {"type": "array", "items": {"enum": [5, 6, 7]}, "minItems": 1},
    "stop_token_ids": {"type": "array", "items": {"enum": [5, 6, 7]}},
    "stop": {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 3},
    "bad_words": {"type": "array", "items": {"enum": ["a", "sea"]}},
}


def run(server: Server, environment: Environment, scratch: Path, record: Record, cases: int) -> None:
    """Run about `cases` cases in total."""
    with urllib.request.urlopen(f"{server.address}/openapi.json") as reply:
        document = json.load(reply)
    (scratch / "sensible.json").write_text(json.dumps(narrowed(document, server.model)))
    every = [f"{server.address}/openapi.json", "--max-examples", str(max(cases // 2 // OPERATIONS, 1))]
    every += [part for path in LEFT_OUT for part in ("--exclude-path", path)]
    sensible = ["sensible.json", "--url", server.address, "--max-examples", str(max(cases // 4, 1))]
    sensible += ["--mode", "positive", "--include-path-regex", "completions"]
    total = 0
    for name, arguments in (("any request", every), ("sensible ones", sensible)):
        before = answered(server)
        count, output, content = look(environment, scratch, name, arguments)
        total += count
        record.note(f"{name}: no check failed", content, output)
        record.note(f"{name}: some reach the engine", answered(server) > before, f"{answered(server) - before} answers")
    record.note("cases in all", total > 0, total)


def look(environment: Environment, scratch: Path, name: str, arguments: list[str]) -> tuple[int, str, bool]:
    command = [environment.command("schemathesis"), "run", *arguments, "--checks", CHECKS, "--seed", "1"]
    command += ["--continue-on-failure", "--request-timeout", "120", "--phases", "examples,coverage,fuzzing"]
    command += ["--suppress-health-check", "all"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=scratch)
    output = done.stdout + done.stderr
    log = scratch / f"{name.replace(' ', '-')}.log"
    log.write_text(output)
    found = re.search(r"(\d+) generated.*", output)
    return int(found[1]) if found else 0, found[0] if found else f"see {log}", done.returncode == 0


def answered(server: Server) -> int:
    """Return the number of requests that the engine finished."""
    with urllib.request.urlopen(f"{server.address}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith("vllm:request_success_total{"))


def narrowed(document: dict[str, Any], model: str) -> dict[str, Any]:
    for name in ("CompletionRequest", "ChatRequest"):
        fields = document["components"]["schemas"][name]["properties"]
        kept = {
            field: shape for field, shape in fields.items() if field not in CONTRARY and shape.get("type") != "null"
        }
        kept |= {field: shape for field, shape in NARROW.items() if field in kept}
        document["components"]["schemas"][name]["properties"] = {**kept, "model": {"const": model}}
    return document
