"""The harmony format: the pieces of a stream equal the whole, however the text is cut."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outrider.harmony import HarmonyStream, OutputSplitter, is_harmony
from outrider.server.api.conversation import Answer, gather
from outrider.server.reasoning import has_reasoning
from outrider.server.tools.parser import GENERIC, ToolCall, ToolParser
from outrider.types import Completion, Output

TOOLS = ToolParser(GENERIC, frozenset({"look", "rest"}), lambda choice, call: f"id-{choice}-{call}")
ANALYSIS = "<|channel|>analysis<|message|>First, I look.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Here < there.<|return|>"
LOOK = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"n": 1}<|call|>'
LOOK_CALL = ToolCall("id-0-0", "look", '{"n": 1}')
CASES: dict[str, tuple[str, Answer]] = {
    "reasoning and content": (ANALYSIS + FINAL, Answer("Here < there.", "First, I look.")),
    "content alone": (FINAL.removeprefix("<|start|>assistant"), Answer("Here < there.")),
    "no marks": ("Just text.", Answer("Just text.")),
    "cut off in the reasoning": ("<|channel|>analysis<|message|>First, I", Answer("", "First, I")),
    "cut off in a header": (ANALYSIS + "<|start|>assistant<|chan", Answer("", "First, I look.")),
    "cut off in a mark": ("<|channel|>final<|message|>Here <|en", Answer("Here <|en")),
    "two thoughts": (
        ANALYSIS + "<|start|>assistant" + ANALYSIS.replace("First", "Then") + FINAL,
        Answer("Here < there.", "First, I look.\nThen, I look."),
    ),
    "a preamble": (
        ANALYSIS + "<|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>" + FINAL,
        Answer("I will look.\nHere < there.", "First, I look."),
    ),
    "a call": (f"{ANALYSIS}<|start|>assistant{LOOK}", Answer(None, "First, I look.", [LOOK_CALL])),
    "a call from the role": (
        ' to=functions.look<|channel|>commentary json<|message|>{"n": 1}<|call|>',
        Answer(None, "", [LOOK_CALL]),
    ),
    "a call without its end": (LOOK.removesuffix("<|call|>"), Answer(None, "", [LOOK_CALL])),
    "a call without arguments": (
        "<|channel|>commentary to=functions.rest<|message|><|call|>",
        Answer(None, "", [ToolCall("id-0-0", "rest", "{}")]),
    ),
    "two calls": (
        f"{LOOK}<|start|>assistant{LOOK}",
        Answer(None, "", [LOOK_CALL, ToolCall("id-0-1", "look", '{"n": 1}')]),
    ),
    "a call of another tool": (
        "<|channel|>commentary to=functions.jump<|message|>{}<|call|>",
        Answer("{}"),
    ),
    "a missing end": (
        "<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Here.",
        Answer("Here.", "Hm"),
    ),
    "text after a message": (ANALYSIS + "Here.", Answer("Here.", "First, I look.")),
    "an endless header": ("<|channel|>" + "x" * 400, Answer("<|channel|>" + "x" * 400)),
    "no recipient": ("to=5 is an assignment", Answer("to=5 is an assignment")),
    "nothing": ("", Answer("")),
}


def cut(text: str, most: int, dice: random.Random, **options: Any) -> Answer:
    stream, found, at = HarmonyStream(TOOLS, **options), [], 0
    while at < len(text):
        size = dice.randint(1, most)
        found.append(stream.push(text[at : at + size]))
        at += size
    answer = gather([*found, stream.push("", final=True)])
    assert stream.called == bool(answer.calls)
    return answer


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_split_however_it_is_cut(name: str) -> None:
    text, wanted = CASES[name]
    dice = random.Random(name)
    for most in (1, 2, 3, 8, 40, len(text) + 1):
        assert cut(text, most, dice) == wanted
    whole = HarmonyStream(TOOLS)
    assert gather([whole.push(text, final=True)]) == wanted
    assert all("analysis" in text[begin:end] for begin, end in whole.reasoning)
    assert bool(whole.reasoning) == bool(wanted.reasoning)


def test_text_is_passed_on_before_a_message_ends() -> None:
    stream = HarmonyStream(TOOLS)
    pieces = [stream.push(piece) for piece in ("<|channel|>analysis<|mess", "age|>one ", "two <", "| three<|end", "|>")]
    assert pieces == [
        {},
        {"reasoning_content": "one "},
        {"reasoning_content": "two "},
        {"reasoning_content": "<| three"},
        {},
    ]


def test_only_the_first_call_counts_without_parallel_calls() -> None:
    alone = ToolParser(GENERIC, frozenset({"look"}), TOOLS.make_id, parallel=False)
    answer = gather([HarmonyStream(alone).push(f"{LOOK}<|start|>assistant{LOOK}", final=True)])
    assert answer.calls == [LOOK_CALL] and answer.content is None


def test_a_continued_message_is_content() -> None:
    assert cut(" and more.<|return|>", 3, random.Random(0), continued=True) == Answer(" and more.")


def test_templates_are_recognized() -> None:
    template = "{{ '<|start|>assistant<|channel|>analysis<|message|>' }}"
    assert is_harmony(template) and has_reasoning(template)
    assert not is_harmony("<|message|>") and not is_harmony(None)


def test_a_growing_output_is_split_as_its_texts_grow() -> None:
    texts = (ANALYSIS + FINAL, FINAL.removeprefix("<|start|>assistant"))
    splitter, seen = OutputSplitter(2), []
    for end in range(0, len(texts[0]) + 7, 7):
        cut = [(text[:end], "stop" if end >= len(text) else None) for text in texts]  # the second ends before the first
        completions = [Completion(index, text, [], reason) for index, (text, reason) in enumerate(cut)]
        output = splitter.push(Output("1", None, [], completions, finished=False))
        seen.append([(one.reasoning, one.text) for one in output.completions])
    assert seen[-1] == [("First, I look.", "Here < there."), ("", "Here < there.")]
    for grown in zip(*seen, strict=True):
        assert list(grown) == sorted(grown) and len(set(grown)) > 2
