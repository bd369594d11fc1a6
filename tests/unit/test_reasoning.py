"""Reasoning blocks: the pieces of a stream equal the whole, however the text is cut."""

from __future__ import annotations

import random

import pytest

from outrider.server.reasoning import ReasoningStream, has_reasoning, leaves_open, opens_reasoning

CASES = [
    # opened by the prompt, text, reasoning, content
    (False, "<think>\nFirst, look.\n\nThen say.\n</think>\n\nHello!", "First, look.\n\nThen say.", "Hello!"),
    (False, "\n<think>a</think>b", "a", "b"),
    (False, "<think></think>\n\nHello", "", "Hello"),
    (False, "<think>\n\n</think>\n\n", "", ""),
    (False, "<think>cut off </th", "cut off </th", ""),
    (False, "<think>1 < 2 </ think > </thin> yes </think> ok", "1 < 2 </ think > </thin> yes", "ok"),
    (False, " <thinner> is a word", "", " <thinner> is a word"),
    (False, "Say <think>this</think>", "", "Say <think>this</think>"),
    (False, "<think>a</think> b <think>c</think>", "a", "b <think>c</think>"),
    (False, "<thi", "", "<thi"),
    (False, "", "", ""),
    (True, "hmm\n</think>\n\nHello", "hmm", "Hello"),
    (True, "<think>\nhmm</think>Hello", "hmm", "Hello"),
    (True, "never ends \n", "never ends", ""),
    (True, "", "", ""),
]


@pytest.mark.parametrize(("opened", "text", "reasoning", "content"), CASES)
def test_a_reasoning_block_is_split_off_however_the_text_is_cut(opened, text, reasoning, content) -> None:
    dice = random.Random(text)
    for most in (1, 2, 3, 8, len(text) + 1):
        stream, found, at = ReasoningStream(opened), [], 0
        while at < len(text):
            size = dice.randint(1, most)
            found.append(stream.push(text[at : at + size]))
            at += size
        found.append(stream.push("", final=True))
        assert ("".join(piece for piece, _ in found), "".join(piece for _, piece in found)) == (reasoning, content)
    closed = opened or text.lstrip().startswith("<think>")
    assert stream.end == (text.index("</think>") + 8 if closed and "</think>" in text else None)


def test_reasoning_is_passed_on_before_the_block_ends() -> None:
    stream = ReasoningStream()
    pieces = [stream.push(piece) for piece in ("<th", "ink>\n", "one ", "two", " </th", "ree")]
    assert pieces == [("", ""), ("", ""), ("one", ""), (" two", ""), ("", ""), (" </three", "")]


def test_templates_and_prompts_with_reasoning_are_recognized() -> None:
    assert has_reasoning("{% if '</think>' in content %}") and not has_reasoning("{{ messages }}")
    assert not has_reasoning(None)
    assert opens_reasoning("<|Assistant|><think>\n") and not opens_reasoning("<think>\n\n</think>\n\n")
    assert leaves_open("<think>hm") and not leaves_open("<think>hm</think>Hi") and not leaves_open("Hi")
