"""The table of limits in docs/server.md: options, defaults and tests exist and are those of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import typer

from outrider import scheduler
from outrider.cli import app
from outrider.input_processor import PREDICTION_CHARACTERS
from outrider.server import context, response_store, timeouts
from outrider.server.api import costs, translate
from outrider.server.api.requests import ChatRequest, CompletionRequest, RequestStruct
from outrider.server.options import ServerOptions
from outrider.server.tools import resolve
from outrider.structured_output import backend, compiler, worker
from outrider.tokenizer import sandbox

ROOT = Path(__file__).resolve().parents[2]


class Limit(NamedTuple):
    name: str
    default: str
    option: str
    beyond: str
    test: str


def table() -> list[Limit]:
    section = (ROOT / "docs" / "server.md").read_text().partition("### Limits\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert rows[0] == "| limit | default | option | beyond it | test |"
    return [Limit(*(cell.strip() for cell in row.strip("|").split("|"))) for row in rows[2:]]


LIMITS = table()
TESTS = {name for path in ROOT.glob("tests/**/test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
FLAGS: dict[str, Any] = {
    flag: parameter.default
    for parameter in typer.main.get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    for flag in parameter.opts
}


def bound(kind: type[RequestStruct], field: str, key: str) -> int:
    """The limit of a field, as its type states it."""
    properties = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"][field]
    found = [each[key] for each in [properties, *properties.get("anyOf", ())] if key in each]
    assert len(found) == 1, properties
    return int(found[0])


# Limits without an option, by the start of their name.
CONSTANTS = {
    "bytes of stored responses": response_store.MAX_BYTES,
    "open files": timeouts.MAX_FILES,
    "seconds without a step": context.STEP_LIMIT,
    "prompts of a completion": translate.MAX_PROMPTS,
    "`n`": bound(CompletionRequest, "n", "maximum"),
    "samples of one prompt": scheduler.RUNNING_SHARE,
    "the same in a step": scheduler.DECODING_SHARE,
    "`logit_bias`, `allowed_token_ids`": costs.MAX_BIASES,
    "`stop`, `bad_words`: strings": bound(CompletionRequest, "bad_words", "maxItems"),
    "`stop`: characters": costs.MAX_STOP_CHARACTERS,
    "`bad_words`: characters": costs.MAX_WORD_CHARACTERS,
    "`logprobs`, `top_logprobs`": bound(ChatRequest, "top_logprobs", "maximum"),
    "`prompt_logprobs`": costs.MAX_PROMPT_LOGPROBS,
    "`prediction`": PREDICTION_CHARACTERS,
    "`tools`": resolve.MAX_TOOLS,
    "`cache_salt`": bound(ChatRequest, "cache_salt", "maxLength"),
    "characters of a grammar": backend.MAX_CHARACTERS,
    "seconds of CPU time": worker.CPU_SECONDS,
    "bytes of memory to compile": worker.MEMORY_BYTES,
    "bytes of cached grammars": compiler.CACHE_BYTES,
    "seconds to render": sandbox.MAX_SECONDS,
    "characters that a chat template": sandbox.MAX_SIZE,
}
BY_CONTEXT = {"`messages`": "one for each token of the context"}


@pytest.mark.parametrize("limit", LIMITS, ids=[limit.name for limit in LIMITS])
def test_every_limit_has_the_default_of_the_code_and_a_test(limit: Limit) -> None:
    assert limit.test.strip("`") in TESTS
    assert limit.beyond
    if limit.option:
        default = FLAGS[limit.option.strip("`")]
        assert limit.default == "the context" if default is None else float(limit.default) == default
        return
    keys = [key for key in CONSTANTS if limit.name.startswith(key)]
    if not keys:
        assert limit.default == BY_CONTEXT[limit.name]
        return
    assert float(limit.default) == CONSTANTS[max(keys, key=len)]


def test_no_limit_is_missing() -> None:
    options = {limit.option.strip("`") for limit in LIMITS if limit.option}
    for field in fields(ServerOptions):
        if field.name.startswith("max_") or field.name.endswith("_seconds"):
            assert "--" + field.name.replace("_", "-") in options
    for key in CONSTANTS:
        assert any(limit.name.startswith(key) for limit in LIMITS), key
    reserved = re.search(r"connections are (\d+) fewer", "".join(limit.name for limit in LIMITS))
    assert reserved is not None and int(reserved[1]) == timeouts.RESERVED_FILES
    least = re.search(r"\((\d+) at least\)", "".join(limit.name for limit in LIMITS))
    assert least is not None and int(least[1]) == scheduler.MIN_SAMPLES
