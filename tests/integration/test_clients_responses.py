"""The openai SDK's Responses API against a real server: texts, streams, structured output, conversations, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import openai
import pytest
from live_server import serving
from pydantic import BaseModel

from outrider import LLM
from outrider.async_llm import AsyncLLM

NAME = "tiny"


class Choice(BaseModel):
    a: Literal[1]


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[openai.OpenAI]:
    llm = AsyncLLM(LLM(str(model), speculate="ngram:adaptive=no"))
    with (
        serving(llm, names=(NAME,)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client
    llm.close()


def ask(client: openai.OpenAI, **fields):
    return client.responses.create(
        **{"model": NAME, "input": "hello", "max_output_tokens": 12, "temperature": 0, **fields}
    )


def test_a_response_and_its_continuation(client) -> None:
    first = ask(client, instructions="Be brief.")
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert first.output_text and first.usage.output_tokens == 12
    second = ask(client, input="more", previous_response_id=first.id)
    repeated = [{"role": "user", "content": "hello"}, *first.output, {"role": "user", "content": "more"}]
    assert ask(client, input=repeated).output_text == second.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="not stored"):
        ask(client, previous_response_id=first.id)


def test_a_stream_gathers_the_same_response(client) -> None:
    expected = ask(client).output_text
    events = list(ask(client, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == expected
    fields = {"model": NAME, "input": "hello", "max_output_tokens": 12, "temperature": 0}
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"


def test_structured_output_is_parsed(client) -> None:
    reply = client.responses.parse(model=NAME, input="hi", text_format=Choice)
    assert reply.status == "completed" and reply.output_parsed == Choice(a=1)
    with client.responses.stream(model=NAME, input="hi", text_format=Choice) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_parsed == Choice(a=1)


def test_an_invalid_field_raises_the_sdks_error(client) -> None:
    with pytest.raises(openai.BadRequestError, match="tools"):
        ask(client, tools=[{"type": "web_search"}])
    with pytest.raises(openai.NotFoundError, match="not served here"):
        ask(client, model="gpt")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_none")


def test_the_async_client_streams_too(client) -> None:
    async def text() -> str:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as other:
            fields = {"model": NAME, "input": "hello", "max_output_tokens": 12, "temperature": 0}
            stream = await other.responses.create(**fields, stream=True)
            return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    assert asyncio.run(text()) == ask(client).output_text
