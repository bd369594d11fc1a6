"""Chat templates: rendered as transformers renders them, in a sandbox, with one sentence for every mistake."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from outrider.errors import UserError
from outrider.tokenizer.chat import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße <b>?"},
    {"role": "assistant", "content": "Hi"},
]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "description": "\u00e9"}}]

TEMPLATES = {
    "plain": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    "trimmed": "{%- for m in messages %}\n  {% if loop.first %}\n{{ bos_token }}\n  {% endif %}\nx\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation prompt": "{{ messages|length }}{% if add_generation_prompt %}<assistant>{% endif %}",
    "generation block": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tools": "{% if tools %}{{ tools | tojson }}|{{ tools | tojson(indent=2) }}{% endif %}",
    "methods": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}


def render(source: str, conversation: Any = MESSAGES, **variables: Any) -> str:
    return ChatTemplate(source).render(conversation, True, variables)


@pytest.mark.parametrize("name", TEMPLATES)
def test_equals_transformers(name: str) -> None:
    rendered: Any = render_jinja_template(
        conversations=[MESSAGES],
        tools=TOOLS,
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        bos_token="<s>",
    )
    assert render(TEMPLATES[name], tools=TOOLS, bos_token="<s>") == rendered[0][0]


def test_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"


MALFORMED = {
    "no list": ("hello", "a list of messages"),
    "empty": ([], "at least one"),
    "no message": ([["user", "hi"]], "message 0 is a list"),
    "no role": ([{"content": "x"}], "message 0 has no `role`"),
    "role is a number": ([{"role": 1, "content": "x"}], "message 0 has no `role`"),
    "no content": ([MESSAGES[0], {"role": "user"}], "message 1 has no `content`"),
    "content is a number": ([{"role": "user", "content": 3}], "message 0 has no `content`"),
    "a picture": ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "type `image`"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_chats(name: str) -> None:
    messages, expected = MALFORMED[name]
    with pytest.raises(UserError) as refusal:
        render("{{ messages }}", messages)
    assert expected in str(refusal.value)


BROKEN = {
    "refusal": ("{{ raise_exception('roles must\nalternate.') }}", "refuses these messages: roles must alternate"),
    "syntax": ("{% for %}", "fails on these messages"),
    "undefined": ("{{ messages[0].missing.deeper }}", "fails on these messages"),
    "division": ("{{ 1 / 0 }}", "fails on these messages: division by zero"),
    "endless range": ("{% for i in range(10**9) %}x{% endfor %}", "fails on these messages"),
}
ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['os'].system('true') }}",
    "attribute filter": "{{ (''|attr('__class__')).__mro__ }}",
    "format string": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "changing its input": "{{ messages.append(1) }}",
    "code object": "{% set f = cycler.__init__ %}{{ f.__globals__ }}",
}


@pytest.mark.parametrize("name", BROKEN)
def test_templates_that_fail(name: str) -> None:
    source, expected = BROKEN[name]
    with pytest.raises(UserError) as refusal:
        render(source)
    assert expected in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ESCAPES)
def test_templates_that_leave_the_sandbox(name: str) -> None:
    with pytest.raises(UserError, match="leaves its sandbox"):
        render(ESCAPES[name])


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
CALLED = [
    {"role": "user", "content": "Please"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "done"},
]
KNOWS_CALLS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{{ c.function.arguments.a[0] }}{% endfor %}{{ m.tool_call_id }};{% endfor %}"
)


def test_arguments_of_calls_become_objects() -> None:
    assert render(KNOWS_CALLS, CALLED) == ';call_1 f {"a": [1, "é"]}1;call_1;'
    assert CALL["function"] == {"name": "f", "arguments": '{"a": [1, "é"]}'}  # the caller's own is not touched


@pytest.mark.parametrize(("written", "shown"), [("", "{}"), (None, "{}"), ("{oh", '"{oh"'), ("[1]", '"[1]"')])
def test_arguments_that_are_no_object(written: str | None, shown: str) -> None:
    call = {"id": "x", "function": {"name": "f", "arguments": written}}
    source = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    assert render(source, [{"role": "assistant", "content": "", "tool_calls": [call]}]) == shown


@pytest.mark.parametrize("content", [None, "", "Wait."])
def test_calls_are_words_where_the_template_knows_none(content: str | None) -> None:
    source = "{% for m in messages %}{{ m.role + ': ' + m.content }};{% endfor %}"
    calls = [CALLED[0], {**CALLED[1], "content": content}, CALLED[2]]
    words = (content + "\n" if content else "") + '{"name": "f", "arguments": {"a": [1, "é"]}}'
    assert render(source, calls) == f"user: Please;assistant: {words};tool: done;"


def test_malformed_calls() -> None:
    for calls, expected in (("f", "`tool_calls` that are not a list"), ([{"function": {}}], "a tool call 0 without")):
        with pytest.raises(UserError, match=expected):
            render("{{ messages }}", [{"role": "assistant", "content": "", "tool_calls": calls}])


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</end>\n{% endfor %}{{ '<assistant>' * more }}"


def unfinished(source: str, messages: Any, add_generation_prompt: bool = False) -> str:
    return ChatTemplate(source).render(messages, add_generation_prompt, {"more": 0}, continue_final_message=True)


@pytest.mark.parametrize("begun", ["The cat", "The cat ", "The", "", " cat </end>"])
def test_the_last_message_is_continued(begun: str) -> None:
    messages = [{"role": "user", "content": "The"}, {"role": "assistant", "content": begun}]
    assert unfinished(TEMPLATE, messages) == f"<user>The</end>\n<assistant>{begun.lstrip()}"


def test_what_cannot_be_continued() -> None:
    with pytest.raises(UserError, match="either continued or begun"):
        unfinished(TEMPLATE, MESSAGES, add_generation_prompt=True)
    with pytest.raises(UserError, match="does not show the last message"):
        unfinished("{{ messages[0].content }}", MESSAGES)


def test_variables_of_the_template() -> None:
    template = ChatTemplate("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}{{ self_made }}")
    assert {"tools", "self_made"} <= template.names
    assert "tools" not in ChatTemplate("{% for tools_of in messages %}{{ tools_of }} tools{% endfor %}").names
    assert ChatTemplate("{% for %}").names == frozenset()
    with pytest.raises(UserError, match="`messages` comes from the request itself"):
        render("x", messages=MESSAGES)
