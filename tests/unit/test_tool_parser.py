"""Parsing of tool calls: notations, text that only resembles calls, and streams that equal the whole parse."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.server.tools.call_reader import JsonScanner
from outrider.server.tools.parser import FORCED, GENERIC, HERMES, LLAMA, MISTRAL, ToolCallStyle, ToolParser
from outrider.server.tools.resolve import parser_for

STYLES = {style.name: style for style in (HERMES, LLAMA, MISTRAL, GENERIC, FORCED)}
END = "<|im_end|>"


def parser(style: ToolCallStyle, parallel: bool = True, ends: tuple[str, ...] = (END,)) -> ToolParser:
    return ToolParser(style, frozenset(("f", "get_time")), lambda answer, call: f"{answer}-{call}", parallel, ends)


def read(style: ToolCallStyle, text: str) -> tuple[str | None, list[tuple[str, str]]]:
    content, calls = parser(style).parse(text)
    return content, [(call.name, call.arguments) for call in calls]


F = ("f", '{"a": 1}')
OTHER = ("get_time", "{}")
CALL = '{"name": "f", "arguments": {"a": 1}}'
TIME = '{"name": "get_time", "arguments": {}}'

CALLS: dict[str, tuple[ToolCallStyle, str, str | None, list[tuple[str, str]]]] = {
    "hermes": (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", None, [F]),
    "hermes, two": (HERMES, f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{TIME}</tool_call>", None, [F, OTHER]),
    "hermes, words before": (HERMES, f"Well.\n\n<tool_call>{CALL}</tool_call>", "Well.", [F]),
    "hermes, words around": (HERMES, f"A <tool_call>{CALL}</tool_call> B", "A B", [F]),
    "hermes, words after": (HERMES, f"<tool_call>{CALL}</tool_call>\nB\n", "B", [F]),
    "hermes, not closed": (HERMES, f"<tool_call>{CALL}", None, [F]),
    "hermes, closed by half": (HERMES, f"<tool_call>{CALL}</tool_", None, [F]),
    "hermes, ended": (HERMES, f"<tool_call>{CALL}</tool_call>{END}", None, [F]),
    "hermes, a brace short": (HERMES, f"<tool_call>{CALL[:-1]}</tool_call>", None, [F]),
    "hermes, cut off": (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "lo', None, [("f", '{"a": "lo')]),
    "hermes, arguments first": (
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        None,
        [F],
    ),
    "hermes, no arguments": (HERMES, '<tool_call>{"name": "get_time"}</tool_call>', None, [OTHER]),
    "hermes, a string": (HERMES, r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', None, [F]),
    "hermes, as written": (
        HERMES,
        '<tool_call>{"name":"f","arguments":{ "a":1.50e1 ,"b" : "\\u00e9é}{" }}</tool_call>',
        None,
        [("f", '{ "a":1.50e1 ,"b" : "\\u00e9é}{" }')],
    ),
    "hermes, a raw line break": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
        None,
        [("f", '{"a": "x\\ny"}')],
    ),
    "hermes, wrong late": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1, b: 2}}</tool_call> so',
        "so",
        [("f", '{"a": 1, b: 2}}')],
    ),
    "hermes, one in one": (HERMES, f"<tool_call> <tool_call>{CALL}</tool_call>", "<tool_call>", [F]),
    "llama": (LLAMA, '{"name": "f", "parameters": {"a": 1}}', None, [F]),
    "llama, typed": (LLAMA, '\n{"type": "function", "name": "f", "parameters": {"a": 1}}', None, [F]),
    "llama, tagged": (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}' + END, None, [F]),
    "llama, two": (LLAMA, f"{CALL}; {TIME}", None, [F, OTHER]),
    "llama, two lines": (LLAMA, f"{CALL}\n{TIME}\n", None, [F, OTHER]),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{CALL}]", None, [F]),
    "mistral, two": (MISTRAL, f"[TOOL_CALLS][{CALL}, {TIME}]", None, [F, OTHER]),
    "mistral, with an id": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "123456789"}]</s>',
        "</s>",
        [F],
    ),
    "mistral, named": (MISTRAL, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]get_time{}', None, [F, OTHER]),
    "mistral, marked": (MISTRAL, 'Hm [TOOL_CALLS]f[CALL_ID]12345[ARGS]{"a": 1}', "Hm", [F]),
    "json": (GENERIC, f"  {CALL}", None, [F]),
    "json list": (GENERIC, f"[{CALL},\n{TIME}]", None, [F, OTHER]),
    "json fenced": (GENERIC, f"Sure:\n```json\n{CALL}\n```\n", "Sure:", [F]),
    "json tagged": (GENERIC, f"<tool_call>{CALL}</tool_call>", None, [F]),
    "forced": (FORCED, CALL, None, [F]),
    "forced list": (FORCED, f"[{CALL}, {TIME}]", None, [F, OTHER]),
    "forced, cut off": (FORCED, f'[{CALL}, {{"name": "f", "arguments": {{"a"', None, [F]),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_notation_of_calls_is_parsed(name: str) -> None:
    style, text, content, calls = CALLS[name]
    assert read(style, text) == (content, calls)


CONTENT = {
    "words": (HERMES, " Hello, world. \n"),
    "nothing": (HERMES, ""),
    "space": (LLAMA, " \n "),
    "unknown name": (HERMES, '<tool_call>{"name": "g", "arguments": {}}</tool_call>'),
    "no name": (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    "name is a number": (HERMES, '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
    "arguments are a list": (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    "arguments are a word": (HERMES, '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
    "no JSON": (HERMES, "<tool_call>f(a=1)</tool_call>"),
    "single quotes": (HERMES, """<tool_call>{"name": "f", "arguments": {'a': 1}}</tool_call>"""),
    "python's None": (HERMES, '<tool_call>{"name": "f", "arguments": {"a": None}}</tool_call>'),
    "cut off early": (HERMES, '<tool_call>\n{"name": "f", "argum'),
    "half a marker": (HERMES, "a <tool_cal"),
    "only a marker": (HERMES, "<tool_call>"),
    "an answer in JSON": (LLAMA, '{"a": 1, "name": "f"}'),
    "a call in the middle": (LLAMA, f"Look: {CALL}"),
    "no arguments": (LLAMA, '{"name": "f"}'),
    "a list": (GENERIC, "[1, 2]"),
    "a list of lists": (GENERIC, f"[[{CALL}]]"),
    "other code": (GENERIC, '```json\n{"a": 1}\n```'),
    "a long head": (MISTRAL, "[TOOL_CALLS]" + " " * 300 + "f{}"),
    "no such head": (MISTRAL, "[TOOL_CALLS]g{}"),
    "a tower": (FORCED, '{"name": "f", "arguments": [' + "[" * 100_000),
}


@pytest.mark.parametrize("name", CONTENT)
def test_text_that_resembles_a_call_is_content(name: str) -> None:
    style, text = CONTENT[name]
    assert read(style, text) == (text, [])


def test_deeply_nested_lists_are_content() -> None:
    text = '<tool_call>{"id": ' + "[" * 5000 + "]" * 5000 + ', "name": "f"}</tool_call>'
    assert read(HERMES, text) == (text, [])


def test_text_after_the_end_token_is_dropped() -> None:
    assert read(HERMES, f"Yes.{END}<tool_call>{CALL}</tool_call>") == ("Yes.", [])


def test_without_parallel_calls_only_the_first_counts() -> None:
    content, calls = parser(GENERIC, parallel=False).parse(f"[{CALL}, {TIME}] and words")
    assert (content, [call.name for call in calls]) == (None, ["f"])


def gather(style: ToolCallStyle, pieces: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """Assemble the deltas as a client does."""
    stream = parser(style).stream(3)
    content, calls = "", []
    for delta in [*(stream.push(piece) for piece in pieces), stream.finish()]:
        content += delta.get("content", "")
        assert delta.get("content") != ""
        numbers = [piece["index"] for piece in delta.get("tool_calls", ())]
        assert len(numbers) == len(set(numbers))
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                assert piece["type"] == "function"
                calls.append({"id": piece["id"], **piece["function"]})
            else:
                assert piece.keys() == {"index", "function"} and piece["index"] == len(calls) - 1
                calls[-1]["arguments"] += piece["function"]["arguments"]
    assert stream.called == bool(calls)
    return content, calls


def check_stream(style: ToolCallStyle, text: str, cuts: list[int]) -> None:
    bounds = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[begin:end] for begin, end in pairwise(bounds)]
    content, calls = parser(style).parse(text, 3)
    expected = content or "", [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in calls]
    assert gather(style, pieces) == expected
    assert gather(style, list(text)) == expected


MARKS = [CALL, TIME, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```json", "```", END]
BITS = [*' \n,;{}[]"\\:f1é<', "tru", "</", "Hello", '"name"', '"arguments"', ': "f"']
HEADS = ['{"name": "f", "parameters": {"a": "', '{"name": "f", "arguments": {']
SCRAPS = st.sampled_from([*MARKS, *BITS, *HEADS])


@settings(max_examples=400)
@given(st.sampled_from(list(STYLES)), st.lists(SCRAPS | st.text(max_size=3), max_size=12), st.lists(st.integers(0, 90)))
@example("hermes", ["a ", "<tool_call>", "{", "<tool_call>", CALL], [4, 19])
@example("json", ['{"name": "f", "parameters": {"a": "', "\\", "u", "12", '"'], [36])
def test_a_stream_of_any_pieces_equals_the_whole_parse(name: str, scraps: list[str], cuts: list[int]) -> None:
    check_stream(STYLES[name], "".join(scraps), cuts)


@pytest.mark.parametrize("name", CALLS)
def test_streams_of_the_known_calls_equal_the_whole_parse(name: str) -> None:
    style, text, _, _ = CALLS[name]
    check_stream(style, text, [len(text) // 2])


@settings(max_examples=200)
@given(st.sampled_from(list(STYLES)), st.lists(SCRAPS | st.text(max_size=3), max_size=12))
def test_text_without_calls_is_unchanged(name: str, scraps: list[str]) -> None:
    text = "".join(scraps).replace(END, "")
    content, calls = parser(STYLES[name]).parse(text)
    if not calls:
        assert content == text


ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150)
@given(st.dictionaries(st.text(), ARGUMENTS, max_size=3), st.booleans(), st.sampled_from([None, 2]))
def test_arguments_are_passed_on_unchanged(value: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    written = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    content, calls = read(HERMES, f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>')
    assert (content, calls) == (None, [("f", written)])


def test_a_stream_sends_arguments_early_and_in_pieces() -> None:
    stream = parser(HERMES).stream()
    assert stream.push("Wait") == {"content": "Wait"}
    assert stream.push(" <tool") == {}
    assert stream.push('_call>{"name": "f", "arguments": {"a"') == {}
    named = {"index": 0, "id": "0-0", "type": "function", "function": {"name": "f", "arguments": '{"a": "x'}}
    assert stream.push(': "x') == {"tool_calls": [named]}
    assert stream.push("yz") == {"tool_calls": [{"index": 0, "function": {"arguments": "yz"}}]}
    assert stream.push('"}}') == {"tool_calls": [{"index": 0, "function": {"arguments": '"}'}}]}
    assert stream.finish("</tool_call>") == {}


def test_the_scanner_accepts_the_json_that_the_standard_library_accepts() -> None:
    @settings(max_examples=1000)
    @given(st.text('{}[]",:1-0e.\\utrue nl+', max_size=10).map(lambda text: f"[{text}]"))
    def check(text: str) -> None:
        try:
            json.loads(text)
            valid = True
        except ValueError:
            valid = False
        scanner = JsonScanner()
        assert (all(map(scanner.feed, text)) and scanner.done) == valid

    check()


def test_call_ids_have_the_length_of_the_style() -> None:
    hermes, mistral = parser_for("<tool_call>", ["f"]), parser_for("[TOOL_CALLS]", ["f"], in_json=True)
    _, calls = hermes.parse(f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>")
    names = [call.id for call in calls]
    assert len(set(names)) == 2
    assert all(name.startswith("call_") and len(name) == 29 and name[5:].isalnum() for name in names)
    _, calls = mistral.parse(CALL)
    assert len(calls[0].id) == 9 and calls[0].id.isalnum()
