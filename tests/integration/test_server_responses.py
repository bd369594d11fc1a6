"""`/v1/responses`: items, events, tools, stored conversations, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider import LLM, SamplingParams
from outrider.server.app import build_app
from outrider.server.options import ServerOptions
from outrider.server.response_store import ResponseStore, StoredResponse

PATH = "/v1/responses"
ENDLESS = {"temperature": 0, "ignore_eos": True, "max_output_tokens": 12}
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Looks somewhere",
    "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    "strict": True,
}
CALL = '{"name": "look", "arguments": {"where": "here"}}'
HERMES = """{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}[{{ m.role }}]
{{ m.reasoning_content or '' }}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}
{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}[assistant]{# </think> #}"""


def post(client: TestClient, given: Any = "Hello", **fields: Any) -> Any:
    response = client.post(PATH, json={"input": given, **fields})
    assert response.status_code == 200, response.text
    return response


def ask(client: TestClient, given: Any = "Hello", **fields: Any) -> dict[str, Any]:
    return post(client, given, **{**ENDLESS, **fields}).json()


def events(client: TestClient, given: Any = "Hello", **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names and numbers are checked."""
    response = post(client, given, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(found)
        found.append(event)
    return found


def engine_text(plain: LLM, prompt: str) -> str:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return plain.generate([plain.tokenizer.encode(prompt, add_special=False)], params)[0].completions[0].text


# ---- texts ----


def test_a_response_has_openais_fields(client, plain) -> None:
    body = ask(client, instructions="Be brief.", metadata={"a": "b"})
    text = engine_text(plain, "[system] Be brief.|[user] Hello|[assistant] ")
    assert body["id"].startswith("resp_") and body["object"] == "response"
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    [item] = body["output"]
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    assert item == {"type": "message", "role": "assistant", "status": "incomplete", "content": [part]}
    assert (body["model"], body["instructions"], body["metadata"]) == ("tiny", "Be brief.", {"a": "b"})
    assert (body["error"], body["tools"], body["tool_choice"], body["store"]) == (None, [], "auto", True)
    usage = body["usage"]
    assert usage["output_tokens"] == 12 and usage["total_tokens"] == usage["input_tokens"] + 12
    assert set(usage["input_tokens_details"]) >= {"cached_tokens"}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_a_response_that_ends_by_itself_is_completed(client) -> None:
    body = post(client, "Hello", text={"format": {"type": "json_object"}}, temperature=0).json()
    if body["status"] == "completed":
        assert json.loads(body["output"][0]["content"][0]["text"]) is not None
    choice = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "x", "schema": choice, "strict": True}}
    body = post(client, "Hello", text=text).json()
    assert (body["status"], body["incomplete_details"]) == ("completed", None)
    assert json.loads(body["output"][0]["content"][0]["text"]) == {"a": 1}
    assert body["text"]["format"]["schema"] == choice


def test_items_become_the_messages_of_a_chat(client, plain) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes?", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "Hello"},
    ]
    text = engine_text(plain, "[system] Be brief.|[user] Hi|[assistant] Yes?|[user] Hello|[assistant] ")
    assert ask(client, items)["output"][0]["content"][0]["text"] == text


def test_the_events_of_a_text(client, plain) -> None:
    found = events(client, **ENDLESS)
    kinds = [event["type"].removeprefix("response.") for event in found]
    deltas = kinds.count("output_text.delta")
    assert deltas
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert found[0]["response"]["status"] == "in_progress" and found[0]["response"]["output"] == []
    added = found[2]["item"]
    assert (added["status"], added["content"]) == ("in_progress", [])
    text = engine_text(plain, "[user] Hello|[assistant] ")
    assert "".join(event["delta"] for event in found if "delta" in event) == text
    assert found[-4]["text"] == found[-3]["part"]["text"] == text
    assert {event["item_id"] for event in found if "item_id" in event} == {added["id"]}
    assert found[-1]["response"]["output"] == [found[-2]["item"]]
    assert found[-1]["response"]["usage"]["output_tokens"] == 12
    assert found[-1]["response"]["id"] == found[0]["response"]["id"]


# ---- tools and reasoning ----


def kinds_of(found: list[dict[str, Any]]) -> list[str]:
    kinds = [event["type"].removeprefix("response.") for event in found]
    return [kind for index, kind in enumerate(kinds) if kind != kinds[index - 1]]


def test_calls_and_reasoning_are_items_of_their_own(scripted) -> None:
    engine, client = scripted(HERMES, f"<think>\nHm.\n</think>\n\nWait.\n<tool_call>{CALL}</tool_call>")
    body = post(client, "go", tools=[LOOK]).json()
    reasoning, message, call = body["output"]
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Wait."
    assert call["type"] == "function_call" and call["call_id"] and call["id"] != call["call_id"]
    assert (call["name"], json.loads(call["arguments"]), call["status"]) == ("look", {"where": "here"}, "completed")
    assert body["tools"] == [LOOK]
    found = events(client, "go", tools=[LOOK], seed=1)
    part = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    assert kinds_of(found) == [
        *("created", "in_progress"),
        *("output_item.added", *(kind.format("reasoning_text") for kind in part), "output_item.done"),
        *("output_item.added", *(kind.format("output_text") for kind in part), "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event["output_index"] for event in found if event["type"] == "response.output_item.done"] == [0, 1, 2]
    streamed = [{**item, "id": "", "call_id": ""} for item in found[-1]["response"]["output"]]
    assert streamed == [{**item, "id": "", "call_id": ""} for item in body["output"]]
    # The items go back with the result, and the prompt shows them as one answer.
    more = [{"type": "function_call_output", "call_id": call["call_id"], "output": "a wall"}]
    post(client, [{"role": "user", "content": "go"}, *body["output"], *more])
    prompt = engine.llm.tokenizer.decode(engine.prompt)
    assert '[user]go[assistant]Hm.Wait.<tool_call>look{"where": "here"}</tool_call>[tool]a wall' in prompt


def test_a_forced_call_is_a_call(scripted) -> None:
    engine, client = scripted(HERMES, CALL)
    choice = {"type": "function", "name": "look"}
    body = post(client, "go", tools=[LOOK], tool_choice=choice).json()
    [item] = body["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "look", '{"where": "here"}')
    assert (body["status"], body["tool_choice"]) == ("completed", choice)
    assert engine.params.structured.kind == "json"


# ---- stored responses ----


def test_a_stored_response_can_be_continued(client, plain) -> None:
    first = ask(client, "Hello", instructions="Be brief.")
    said = first["output"][0]["content"][0]["text"]
    second = ask(client, "More", previous_response_id=first["id"])
    prompt = f"[user] Hello|[assistant] {said}|[user] More|[assistant] "  # the instructions are not inherited
    assert second["output"][0]["content"][0]["text"] == engine_text(plain, prompt)
    assert second["previous_response_id"] == first["id"]
    streamed = events(client, "Hello", instructions="Be brief.", **ENDLESS)[-1]["response"]
    assert (
        ask(client, "More", previous_response_id=streamed["id"])["output"][0]["content"]
        == (second["output"][0]["content"])
    )


def test_a_stored_response_can_be_fetched_and_deleted(client) -> None:
    body = ask(client)
    assert client.get(f"{PATH}/{body['id']}").json() == body
    assert client.delete(f"{PATH}/{body['id']}").json() == {"id": body["id"], "object": "response", "deleted": True}
    for response in (client.get(f"{PATH}/{body['id']}"), client.delete(f"{PATH}/{body['id']}")):
        assert response.status_code == 404
    refused = client.post(PATH, json={"input": "a", "previous_response_id": body["id"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")


def test_store_false_and_the_option_keep_nothing(client, llm) -> None:
    body = ask(client, store=False)
    assert body["store"] is False and client.get(f"{PATH}/{body['id']}").status_code == 404
    forgetful = TestClient(build_app(llm, ServerOptions(max_stored_responses=0)))
    body = ask(forgetful)
    assert body["store"] is False and forgetful.get(f"{PATH}/{body['id']}").status_code == 404


def test_a_response_belongs_to_its_key(llm) -> None:
    client = TestClient(build_app(llm, ServerOptions(api_keys=("one", "two"))))
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    body = client.post(PATH, json={"input": "a", **ENDLESS}, headers=one).json()
    assert client.get(f"{PATH}/{body['id']}", headers=two).status_code == 404
    more = {"input": "b", "previous_response_id": body["id"], **ENDLESS}
    assert client.post(PATH, json=more, headers=two).status_code == 400
    assert client.post(PATH, json=more, headers=one).status_code == 200
    assert client.get(f"{PATH}/{body['id']}", headers=one).json() == body


def test_the_store_is_bounded_by_count_and_bytes() -> None:
    store = ResponseStore(limit=3, max_bytes=100)
    for name in "abc":
        store.add(name, StoredResponse(b"", [], 10, b""))
    assert store.get("a", b"") is not None  # used again, so `b` is the oldest
    store.add("d", StoredResponse(b"", [], 10, b""))
    assert [store.get(name, b"") is None for name in "abcd"] == [False, True, False, False]
    store.add("e", StoredResponse(b"", [], 95, b""))
    assert (len(store), store.size) == (1, 95)
    store.add("f", StoredResponse(b"", [], 101, b""))
    assert (len(store), store.size) == (0, 0)


# ---- refusals ----


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [LOOK, LOOK], "tool_choice": "required"}, "tools[1].name"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 51}, "max_output_tokens"),
        ({"min_tokens": 20, "max_output_tokens": 10}, "min_tokens"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"temprature": 1}, "temprature"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_request_names_the_field(llm, body, param, stream) -> None:
    client = TestClient(build_app(llm, ServerOptions(max_tokens=50)))
    response = client.post(PATH, json={"input": "a", "stream": stream, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert f"`{param}`" in error["message"]
    assert "completion_tokens" not in error["message"] and "response_format" not in error["message"]


def test_fields_without_effect_are_named_in_a_header(client) -> None:
    fields = {
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "user": "me",
        "service_tier": "auto",
        "truncation": "disabled",
        "metadata": {"a": "b"},
        "store": True,
    }
    response = post(client, **ENDLESS, **fields)
    ignored = {"include", "reasoning.effort", "reasoning.summary", "text.verbosity", "user"}
    assert set(response.headers["x-outrider-ignored"].split(", ")) == ignored
    assert response.json()["output"][0]["content"] == ask(client)["output"][0]["content"]


def test_a_failing_stream_ends_with_a_failed_response(client, llm, monkeypatch) -> None:
    step, count = llm.engine.runner.step, 0

    def sometimes(given: Any) -> Any:
        nonlocal count
        count += 1
        if count > 4:
            raise RuntimeError("a secret of the inside")
        return step(given)

    monkeypatch.setattr(llm.engine.runner, "step", sometimes)
    response = client.post(PATH, json={"input": "a", **ENDLESS, "stream": True, "speculate": False})
    if response.status_code == 200:  # else the failure came before the first event was sent
        last = json.loads(response.text.split("\n\n")[-2].split("data: ")[1])
        assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"
    assert "secret" not in response.text
