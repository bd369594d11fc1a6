"""Reasoning over HTTP: `reasoning_content` in whole and streamed chats, templates that open the block, options."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider import AsyncLLM
from outrider.errors import UserError
from outrider.server.api.conversation import count_tokens
from outrider.server.app import build_app
from outrider.server.options import ServerOptions

QWEN = """{% for m in messages %}[{{ m.role }}]{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}
{% else %}{{ m.content }}{% endif %}{% endfor %}[assistant]
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}"""
DEEPSEEK = """{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}[assistant]<think>
"""
HERMES = """{% if tools %}{{ tools | tojson }}<tool_call></think>{% endif %}{% for m in messages %}{{ m.content }}
{% endfor %}"""
ASK = [{"role": "user", "content": "go"}]
BLOCK = "<think>\nFirst, I look.\n</think>\n\nHere."
CALL = '<tool_call>{"name": "look", "arguments": {"n": 1}}</tool_call>'
LOOK = {"type": "function", "function": {"name": "look"}}


def whole(client: Any, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    response = client.post("/v1/chat/completions", json={"messages": ASK, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"], response.json()["usage"]


def streamed(client: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the deltas of a stream."""
    text = client.post("/v1/chat/completions", json={"messages": ASK, "stream": True, **fields}).text
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event and "[DONE]" not in event]
    return [json.loads(event)["choices"][0]["delta"] for event in events]


def joined(deltas: list[dict[str, Any]], name: str) -> str:
    return "".join(delta.get(name, "") for delta in deltas)


@pytest.mark.parametrize(("template", "script"), [(QWEN, BLOCK), (DEEPSEEK, BLOCK.removeprefix("<think>\n"))])
def test_reasoning_is_split_from_the_content(scripted, template, script) -> None:
    _, client = scripted(template, script)
    message, _ = whole(client)
    assert (message["reasoning_content"], message["content"]) == ("First, I look.", "Here.")
    deltas = streamed(client)
    assert joined(deltas, "reasoning_content") == "First, I look."
    assert joined(deltas, "content") == "Here."
    assert not any({"reasoning_content", "content"} <= set(delta) for delta in deltas[1:-1])
    assert sum("reasoning_content" in delta for delta in deltas) > 2  # as it is generated


def test_an_answer_without_a_block_is_content(scripted) -> None:
    _, client = scripted(QWEN, "Here.")
    message, _ = whole(client)
    assert message == {"role": "assistant", "content": "Here.", "refusal": None}
    assert joined(streamed(client), "content") == "Here."


def test_an_unfinished_block_is_all_reasoning(scripted) -> None:
    _, client = scripted(DEEPSEEK, "First, I")
    message, _ = whole(client)
    assert (message["reasoning_content"], message["content"]) == ("First, I", "")


def test_tool_calls_follow_the_reasoning(scripted) -> None:
    _, client = scripted(HERMES, f"<think>\nno <tool_call> here\n</think>\n\n{CALL}")
    message, _ = whole(client, tools=[LOOK])
    assert (message["reasoning_content"], message["content"]) == ("no <tool_call> here", None)
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"n": 1}'}
    deltas = streamed(client, tools=[LOOK])
    assert joined(deltas, "reasoning_content") == "no <tool_call> here"
    assert joined(deltas, "content") == ""
    assert sum(len(delta.get("tool_calls", ())) for delta in deltas) >= 1


def test_splitting_can_be_switched_off(scripted) -> None:
    _, client = scripted(QWEN, BLOCK)
    assert whole(client, reasoning_format="none")[0] == {"role": "assistant", "content": BLOCK, "refusal": None}
    assert joined(streamed(client, reasoning_format="none"), "content") == BLOCK
    _, client = scripted(QWEN, BLOCK, reasoning_format="none")
    assert whole(client)[0]["content"] == BLOCK
    assert whole(client, reasoning_format="auto")[0]["content"] == "Here."
    with pytest.raises(UserError, match="reasoning_format"):
        ServerOptions(reasoning_format="maybe")


def test_a_forced_format_is_content_even_after_an_open_block(scripted) -> None:
    _, client = scripted(DEEPSEEK, '{"a": 1}')
    message, _ = whole(client, response_format={"type": "json_object"})
    assert message["content"] == '{"a": 1}' and "reasoning_content" not in message


def test_thinking_is_switched_off_in_the_prompt(scripted) -> None:
    engine, client = scripted(QWEN, "Here.")
    closed = engine.llm.tokenizer.encode("[user]go[assistant]\n<think>\n\n</think>\n\n", add_special=False)
    for fields in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
    ):
        message, _ = whole(client, **fields)
        assert engine.prompt == closed and message["content"] == "Here."
    whole(client, reasoning_effort="high")
    assert engine.prompt == closed[: len(engine.prompt)] and len(engine.prompt) < len(closed)


def test_reasoning_is_counted_in_the_usage(plain_model, tmp_path) -> None:
    shutil.copytree(plain_model, tmp_path / "model")
    config = {"eos_token": "</s>", "chat_template": DEEPSEEK}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    with closing(AsyncLLM(tmp_path / "model")) as llm:
        client = TestClient(build_app(llm, ServerOptions()))
        _, usage = whole(client, max_tokens=6, ignore_eos=True)  # the tiny model never closes the block
        assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"] == 6
        _, usage = whole(client, max_tokens=6, ignore_eos=True, reasoning_format="none")
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
    assert count_tokens([1, 2, 3, 4], 5, lambda tokens: ["ab", "", "cde", "f"]) == 3
    assert count_tokens([1, 2], 9, lambda tokens: ["ab", "c"]) == 2


HARMONY = """{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}
{{ tools | tojson }}<|start|>assistant{# <|channel|>analysis #}"""
MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
THOUGHT = "<|channel|>analysis<|message|>First, I look.<|end|><|start|>assistant"


def test_channels_of_the_harmony_format_are_split(scripted) -> None:
    engine, client = scripted(HARMONY, f"{THOUGHT}<|channel|>final<|message|>Here.<|return|>", MARKS)
    message, _ = whole(client)
    assert (message["reasoning_content"], message["content"]) == ("First, I look.", "Here.")
    assert engine.params.skip_special_tokens is False
    deltas = streamed(client)
    assert joined(deltas, "reasoning_content") == "First, I look." and joined(deltas, "content") == "Here."
    assert sum("reasoning_content" in delta for delta in deltas) > 2  # as it is generated
    whole(client, reasoning_format="none")
    assert engine.params.skip_special_tokens is True


def test_messages_to_functions_are_tool_calls(scripted) -> None:
    call = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"n": 1}<|call|>'
    _, client = scripted(HARMONY, THOUGHT + call, MARKS)
    message, _ = whole(client, tools=[LOOK])
    assert (message["reasoning_content"], message["content"]) == ("First, I look.", None)
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"n": 1}'}
    pieces = [piece for delta in streamed(client, tools=[LOOK]) for piece in delta.get("tool_calls", ())]
    assert pieces[0]["function"]["name"] == "look"
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"n": 1}'
    response = client.post("/v1/chat/completions", json={"messages": ASK, "tools": [LOOK]})
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    found = client.post("/v1/responses", json={"input": "go", "tools": [{"type": "function", "name": "look"}]}).json()
    assert [item["type"] for item in found["output"]] == ["reasoning", "function_call"]
