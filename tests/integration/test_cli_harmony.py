"""Answers of gpt-oss in `generate` and `chat`: channels are shown as a <think> block and the text after it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_server_reasoning import MARKS

from outrider import LLM, SamplingParams
from outrider.types import Completion, Output, Stats

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{# <|channel|>analysis<|message|> #}"
THOUGHT = "<|channel|>analysis<|message|>First, I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Here < there.<|return|>"
PREAMBLE = "<|channel|>commentary<|message|>I look again.<|end|><|start|>assistant"
CASES = {
    "both channels": (THOUGHT + FINAL, "<think>\nFirst, I look.\n</think>\n\nHere < there.", "Here < there."),
    "no reasoning": (FINAL, "Here < there.", "Here < there."),
    "cut off": (THOUGHT.partition(" I look")[0], "<think>\nFirst,\n</think>", ""),
    "in turns": (
        PREAMBLE + THOUGHT + FINAL,
        "I look again.\n\n<think>\nFirst, I look.\n</think>\n\nHere < there.",
        "I look again.\nHere < there.",
    ),
}


def plain(text: str) -> str:
    """Return a text without marks."""
    for mark in MARKS:
        text = text.replace(mark, "")
    return text


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    return CASES[request.param]


@pytest.fixture
def gpt_oss(scripted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, case: tuple[str, str, str]) -> Path:
    """A model whose answers are that of the case; it writes their marks if special tokens are kept."""
    engine, _ = scripted(TEMPLATE, "", MARKS)

    def written(params: SamplingParams) -> str:
        return plain(case[0]) if params.skip_special_tokens else case[0]

    def answer(text: str, prompt: Any, params: SamplingParams, finished: bool) -> Output:
        completions = [Completion(index, text, [5], "stop" if finished else None) for index in range(params.n)]
        return Output("1", None, list(prompt), completions, finished, stats=Stats(1, 1.0, 0.1, 1.0, 0, 0))

    def stream(self: LLM, prompt: Any, params: SamplingParams, **_: Any) -> Iterator[Output]:
        text = written(params)
        for end in range(1, len(text) + 1):
            yield answer(text[:end], prompt, params, end == len(text))

    def generate(self: LLM, prompts: Any, params: Any, **_: Any) -> list[Output]:
        return [answer(written(own), prompt, own, True) for prompt, own in zip(prompts, params, strict=True)]

    monkeypatch.setattr(LLM, "stream", stream)
    monkeypatch.setattr(LLM, "generate", generate)
    return Path(engine.llm.resolved.model)


def test_generate_shows_reasoning_and_answer(outrider, gpt_oss: Path, case: tuple[str, str, str]) -> None:
    common = ("-m", gpt_oss, "--speculate", "none")
    assert outrider("generate", "go", *common).stdout == case[1] + "\n"
    assert f"\n{case[1]}\n" in outrider("generate", "go", "on", *common).stdout
    body = [json.loads(line) for line in outrider("generate", "go", "--n", "2", "--json", *common).stdout.splitlines()]
    assert [one["text"] for one in (body[0], *body[0]["samples"])] == [case[1]] * 3


def test_raw_prompts_get_the_text_as_it_is(outrider, gpt_oss: Path, case: tuple[str, str, str]) -> None:
    assert outrider("generate", "go", "--raw", "-m", gpt_oss, "--speculate", "none").stdout == plain(case[0]) + "\n"


def test_chat_shows_reasoning_and_keeps_the_answer_alone(outrider, gpt_oss: Path, case: tuple[str, str, str]) -> None:
    common = ("chat", "-m", gpt_oss, "--speculate", "none")
    assert outrider(*common, stdin="go\n").stdout == case[1] + "\n"
    first, second = (json.loads(line) for line in outrider(*common, "--json", stdin="go\non\n").stdout.splitlines())
    assert first["text"] == second["text"] == case[1]
    assert second["messages"][1] == {"role": "assistant", "content": case[2]}
