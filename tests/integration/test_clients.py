"""The openai SDK against a real server: texts, streams, usage, errors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from live_server import serving

from outrider import LLM
from outrider.async_llm import AsyncLLM
from waiting import wait_until

NAME = "tiny"
HELLO = [{"role": "user", "content": "hello"}]
ABAB = [{"role": "user", "content": "abababab"}]
KEY = "a long random key"


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(LLM(str(model), speculate="ngram:adaptive=no"))
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def address(llm: AsyncLLM) -> Iterator[str]:
    with serving(llm, names=(NAME,)) as address:
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **fields):
    """Send a short chat, greedy by default."""
    return client.chat.completions.create(
        **{"model": NAME, "messages": HELLO, "max_completion_tokens": 12, "temperature": 0, **fields}
    )


def is_busy(llm: AsyncLLM) -> bool:
    return bool(llm.load.running or llm.load.waiting or llm.load.pages_used)


# ---- whole answers ----


def test_a_chat_returns_a_message_with_usage(client, llm) -> None:
    reply = ask(client)
    expected = llm.llm.tokenizer.encode("[user] hello|[assistant] ", add_special=False)
    (choice,) = reply.choices
    assert (reply.object, reply.model, choice.index, choice.message.role) == ("chat.completion", NAME, 0, "assistant")
    assert choice.finish_reason == "length"
    assert choice.message.content and len(choice.message.content) <= 12
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(expected), 12)
    assert reply.usage.total_tokens == len(expected) + 12
    assert ask(client).choices[0].message.content == choice.message.content


def test_a_completion_can_echo_its_prompt(client) -> None:
    fields = {"model": NAME, "prompt": "abc", "max_tokens": 5, "temperature": 0}
    reply = client.completions.create(**fields)
    echoed = client.completions.create(**fields, echo=True, logprobs=2)
    assert reply.object == "text_completion"
    assert echoed.choices[0].text == "abc" + reply.choices[0].text
    body = echoed.choices[0].logprobs
    assert body.token_logprobs[0] is None
    assert all(value <= 0 for value in body.token_logprobs[1:])
    assert len(body.tokens) == len(body.token_logprobs) == len(body.text_offset) == len(body.top_logprobs)
    assert len(body.tokens) == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_token_prompts_and_several_prompts_work(client, llm) -> None:
    texts = ["abc", "xyz"]
    tokens = [llm.llm.tokenizer.encode(text) for text in texts]
    fields = {"model": NAME, "max_tokens": 5, "temperature": 0}
    as_text = client.completions.create(prompt=texts, **fields)
    as_tokens = client.completions.create(prompt=tokens, **fields)
    single = client.completions.create(prompt=tokens[1], **fields)
    assert [choice.index for choice in as_text.choices] == [0, 1]
    assert [choice.text for choice in as_text.choices] == [choice.text for choice in as_tokens.choices]
    assert single.choices[0].text == as_text.choices[1].text


def test_samples_are_reproducible_with_a_seed(client) -> None:
    fields = {"n": 3, "temperature": 1.0, "seed": 5}
    first, second = ask(client, **fields), ask(client, **fields)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts == [choice.message.content for choice in second.choices]
    assert texts != [choice.message.content for choice in ask(client, **{**fields, "seed": 6}).choices]
    assert first.usage.completion_tokens == 36


def test_a_stop_string_ends_the_text(client) -> None:
    text = ask(client).choices[0].message.content
    stop = text[4:6]
    (choice,) = ask(client, stop=[stop, "never written"]).choices
    assert choice.finish_reason == "stop"
    assert choice.message.content == text[: text.index(stop)]


def test_logprobs_have_openais_format(client, llm) -> None:
    (choice,) = ask(client, logprobs=True, top_logprobs=3).choices
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    assert len(entries) == 12
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert math.isclose(entry.logprob, entry.top_logprobs[0].logprob, abs_tol=1e-6)  # the argmax
        assert bytes(entry.bytes).decode() == entry.token
    prompt = llm.llm.tokenizer.encode("[user] hello|[assistant] ", add_special=False)
    fields = {"model": NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 3}
    completed = client.completions.create(**fields).choices[0].logprobs
    assert completed.token_logprobs == [entry.logprob for entry in entries]


def test_speculation_changes_only_its_metrics(client) -> None:
    for fields in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
        fields = {**fields, "messages": ABAB, "max_completion_tokens": 40, "logprobs": True}
        drafted, plain = ask(client, **fields), ask(client, **fields, extra_body={"speculate": False})
        assert drafted.choices[0].to_dict() == plain.choices[0].to_dict()
        body = drafted.metrics["speculative_decoding"]
        assert body["num_draft_tokens"] >= body["num_accepted_draft_tokens"] >= 0
        assert sum(body["acceptance_histogram"]) == body["num_spec_steps"]
        assert "metrics" not in plain.to_dict()


def test_predicted_outputs_are_counted(client) -> None:
    fields = {"messages": ABAB, "max_completion_tokens": 40}
    plain = ask(client, **fields)
    text = plain.choices[0].message.content
    right = ask(client, **fields, prediction={"type": "content", "content": text})
    parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    in_parts = ask(client, **fields, prediction={"type": "content", "content": parts})
    wrong = ask(client, **fields, prediction={"type": "content", "content": "~" * 30})
    assert {reply.choices[0].message.content for reply in (right, in_parts, wrong)} == {text}
    details = [reply.usage.completion_tokens_details for reply in (plain, right, in_parts, wrong)]
    accepted = [each.accepted_prediction_tokens for each in details]
    assert accepted[0] == 0 and details[0].rejected_prediction_tokens == 0
    assert accepted[1] == accepted[2] > 20
    assert accepted[3] == 0


def test_models_can_be_listed(client) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).object == "model"


# ---- streams ----


def test_a_stream_adds_up_to_the_whole_response(client) -> None:
    fields = {"messages": ABAB, "max_completion_tokens": 30, "logprobs": True}
    whole = ask(client, **fields)
    chunks = list(ask(client, **fields, stream=True, stream_options={"include_usage": True}))
    *body, last = chunks
    assert body[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == whole.choices[0].message.content
    entries = [entry for chunk in body if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert entries == whole.choices[0].logprobs.content
    reasons = [chunk.choices[0].finish_reason for chunk in body]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert all(chunk.usage is None for chunk in body)
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_a_stream_without_usage_ends_with_its_finish_reason(client) -> None:
    chunks = list(ask(client, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_samples_and_prompts_can_be_streamed(client) -> None:
    fields = {"model": NAME, "prompt": ["abc", "xyz"], "n": 2, "max_tokens": 8, "temperature": 1.0, "seed": 1}
    whole = client.completions.create(**fields)
    texts = [""] * 4
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_a_traced_stream_contains_the_drafts(client) -> None:
    fields = {"messages": ABAB, "max_completion_tokens": 40, "logprobs": True}
    chunks = list(ask(client, **fields, stream=True, extra_body={"trace": True}))
    steps = [step for chunk in chunks if (body := getattr(chunk, "speculation", None)) for step in body["steps"]]
    assert any(step["drafted"] for step in steps)
    assert all(len(step["tokens"]) == step["accepted"] + 1 for step in steps[:-1])
    written = "".join(text for step in steps for text in step["text"])
    assert written == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert all("speculation" not in chunk.to_dict() for chunk in ask(client, **fields, stream=True))


def test_the_sdks_stream_helper_works(client) -> None:
    text = ask(client).choices[0].message.content
    index = next(index for index in range(3, len(text)) if text[index] not in text[:index])
    fields = {"model": NAME, "messages": HELLO, "max_completion_tokens": 12, "temperature": 0, "stop": text[index]}
    with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == text[:index]


def test_closing_a_stream_frees_the_request(client, llm) -> None:
    with ask(client, stream=True, max_completion_tokens=100, extra_body={"ignore_eos": True}) as stream:
        assert next(iter(stream)).choices
        asyncio.run(llm.pause())  # it cannot end by itself now
        assert is_busy(llm)
    wait_until(lambda: not is_busy(llm))
    asyncio.run(llm.resume())
    assert ask(client).choices[0].finish_reason == "length"


# ---- async ----


def test_async_requests_and_streams_run_concurrently(address, client) -> None:
    expected = [ask(client, messages=[{"role": "user", "content": "a" * count}]) for count in range(1, 7)]

    async def whole(client: openai.AsyncOpenAI, count: int) -> str | None:
        reply = await ask(client, messages=[{"role": "user", "content": "a" * count}])
        return reply.choices[0].message.content

    async def streamed(client: openai.AsyncOpenAI, count: int) -> str:
        text = ""
        async for chunk in await ask(client, messages=[{"role": "user", "content": "a" * count}], stream=True):
            text += chunk.choices[0].delta.content or ""
        return text

    async def everybody() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            odd = [whole(client, count) for count in (1, 3, 5)]
            even = [streamed(client, count) for count in (2, 4, 6)]
            return await asyncio.gather(*odd, *even)

    texts = [reply.choices[0].message.content for reply in expected]
    assert asyncio.run(everybody()) == texts[0::2] + texts[1::2]


def test_cancelling_an_async_request_frees_it(address, llm) -> None:
    async def impatient() -> None:
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            await llm.pause()
            task = asyncio.create_task(ask(client))
            while not is_busy(llm):
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(impatient())
    wait_until(lambda: not is_busy(llm))
    asyncio.run(llm.resume())


# ---- mistakes ----


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"audio": {"format": "wav", "voice": "alloy"}}, "audio"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"extra_body": {"speculate": "no such method"}}, "speculate"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stream": True, "logit_bias": {"5": 500}}, "logit_bias"),
        ({"stream": True, "logit_bias": {"100000": 5}}, "logit_bias"),
    ],
)
def test_an_invalid_request_names_the_field(client, fields, param) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert (caught.value.param or "").startswith(param)
    assert f"`{param}" in caught.value.body["message"]


def test_a_prompt_above_the_context_is_rejected(client) -> None:
    with pytest.raises(openai.BadRequestError, match="context"):
        ask(client, messages=[{"role": "user", "content": "long " * 100}])


def test_an_unknown_model_raises_not_found(client) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-4o")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_api_keys_are_required(llm) -> None:
    with serving(llm, names=(NAME,), api_keys=("another key", KEY)) as address:
        base = f"{address}/v1"
        with openai.OpenAI(base_url=base, api_key=KEY) as client:
            assert ask(client).choices
        with openai.OpenAI(base_url=base, api_key="wrong", max_retries=0) as client:
            for call in (lambda: ask(client), lambda: ask(client, stream=True), client.models.list):
                with pytest.raises(openai.AuthenticationError):
                    call()
