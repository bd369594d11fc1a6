"""Characters whose bytes span several tokens, in the traces of the server and of `outrider trace`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import tiny
from outrider import LLM, AsyncLLM, SamplingParams, StructuredOutput
from outrider.diagnostics.trace import record
from outrider.server.app import build_app
from outrider.server.options import ServerOptions

WAVES = "\U0001f30a" * 8
CHOICE = json.dumps([WAVES])


@pytest.fixture(scope="module")
def byte_model(plain_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a token for each byte of a character and for letters."""
    folder = tmp_path_factory.mktemp("bytes") / "model"
    shutil.copytree(plain_model, folder)
    spelled = pre_tokenizers.ByteLevel(False).pre_tokenize_str("\U0001f30a")[0][0]
    letters = [*dict.fromkeys(spelled), *(chr(code) for code in range(ord("a"), ord("z") + 1))]
    tokenizer = Tokenizer(models.BPE({text: token for token, text in enumerate(tiny.SPECIAL + letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer.add_special_tokens(tiny.SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def byte_client(byte_model: Path) -> Iterator[TestClient]:
    llm = AsyncLLM(str(byte_model), speculate="ngram:adaptive=no,width=5")
    yield TestClient(build_app(llm, ServerOptions(names=("tiny",))))
    llm.close()


def test_the_servers_trace_has_whole_characters(byte_client: TestClient) -> None:
    body = {"prompt": "ab", "max_tokens": 64, "trace": True, "structured_outputs": {"choice": [WAVES]}}
    [choice] = byte_client.post("/v1/completions", json=body).json()["choices"]
    steps = choice["speculation"]["steps"]
    assert choice["text"] == WAVES
    added = [text for step in steps for text in step["text"]]
    assert "".join(text for text in added if text != "</s>") == WAVES
    drafted = [text for step in steps for text in step["drafted_text"]]
    assert "\U0001f30a" in drafted and "\ufffd" not in "".join(drafted + added)
    parts = [step for step in steps if "" in step["text"]]
    assert parts and all(len(step["bytes"]) == len(step["tokens"]) for step in parts)
    assert all(len(step["drafted_bytes"]) == len(step["drafted"]) for step in parts)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_name_the_bytes_of_incomplete_characters(byte_client: TestClient, stream: bool) -> None:
    body = {"prompt": "ab", "max_tokens": 64, "logprobs": 3, "structured_outputs": {"choice": ["a" + WAVES + "b"]}}
    answer = byte_client.post("/v1/completions", json={**body, "stream": stream}).text
    lines = [line[6:] for line in answer.split("\n") if line.startswith("data: {")] if stream else [answer]
    found: dict[str, list[Any]] = {"tokens": [], "text_offset": [], "top_logprobs": []}
    for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
        for name, values in found.items():
            values += (choice["logprobs"] or {name: []})[name]
    tokens = found["tokens"][:34]
    assert tokens == ["a", *[f"bytes:\\x{byte:02x}" for byte in WAVES.encode()], "b"]
    assert found["text_offset"][:34] == [0, *[1 + at // 4 for at in range(32)], 9]
    assert all(token in top for token, top in zip(tokens, found["top_logprobs"], strict=False))
    assert "\ufffd" not in answer


def test_a_stream_describes_characters_across_its_events(byte_client: TestClient) -> None:
    body = {
        "prompt": "ab",
        "max_tokens": 64,
        "trace": True,
        "stream": True,
        "structured_outputs": {"choice": [WAVES]},
    }
    lines = byte_client.post("/v1/completions", json=body).text.split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    traces = [one.get("speculation") for event in events for one in (event, *event["choices"])]
    steps = [step for trace in traces if trace for step in trace["steps"]]
    added = [text for step in steps for text in step["text"] if text != "</s>"]
    assert "".join(added) == WAVES


def test_the_trace_command_names_bytes_of_incomplete_characters(byte_model: Path) -> None:
    llm = LLM(str(byte_model), speculate="ngram:adaptive=no,width=5", decode_steps=1)
    params = SamplingParams(max_tokens=64, temperature=0, trace=True, structured=StructuredOutput("choice", CHOICE))
    trace = record(llm, "ab", "ab", params)
    assert "".join(text for step in trace.steps for text in step.shown) == WAVES
    labels = {node.text for step in trace.steps for node in step.nodes}
    assert labels <= {"<0xF0>", "<0x9F>", "<0x8C>", "\U0001f30a", "</s>"} and "\U0001f30a" in labels
