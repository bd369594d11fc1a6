"""Check LangChain's ChatOpenAI against a server: `python langchain_script.py http://HOST:PORT/v1 MODEL`."""

from __future__ import annotations

import json
import sys
from typing import Literal

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = [SystemMessage("You are brief."), HumanMessage("Name three colours of the rainbow.")]


class Weather(BaseModel):
    """The weather of a day."""

    sky: Literal["blue", "grey"]
    warm: bool


class Look(BaseModel):
    """Look somewhere."""

    where: Literal["up", "down"]


def note(check: str, passed: bool, detail: object = "") -> None:
    sys.stdout.write(json.dumps([check, passed, str(detail)]) + "\n")


def main(base: str, model: str) -> None:
    chat = ChatOpenAI(base_url=base, model=model, api_key="none", temperature=0, max_tokens=200, stream_usage=True)
    whole = chat.invoke(QUESTION)
    note("invoke", bool(whole.content), whole.content)
    usage = whole.usage_metadata
    note("usage is told", usage["output_tokens"] > 0 and usage["input_tokens"] > 0, usage)
    chunks = list(chat.stream(QUESTION))
    note(
        "stream adds up to invoke", "".join(chunk.content for chunk in chunks) == whole.content, f"{len(chunks)} chunks"
    )
    usages = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    note("a stream reports its usage once", len(usages) == 1 and usages[0]["output_tokens"] == usage["output_tokens"])
    several = chat.batch([QUESTION, [HumanMessage("Is the sea wide?")]])
    note("batch", several[0].content == whole.content and bool(several[1].content))

    called = chat.bind_tools([Look], tool_choice="required", strict=True).invoke("Look up at the sky.")
    calls = called.tool_calls
    fits = bool(calls) and all(call["name"] == "Look" and call["args"]["where"] in ("up", "down") for call in calls)
    note("bind_tools, a call is required", fits, calls)
    named = chat.bind_tools([Look], tool_choice="Look", strict=True)
    pieces = [piece for chunk in named.stream("Look down.") for piece in chunk.tool_call_chunks]
    arguments = json.loads("".join(piece["args"] or "" for piece in pieces))
    note("bind_tools, a named call, streamed", arguments["where"] in ("up", "down"), f"{len(pieces)} pieces")

    for method in ("json_schema", "function_calling"):
        shaped = chat.with_structured_output(Weather, method=method).invoke("Describe the weather.")
        note(f"with_structured_output by {method}", isinstance(shaped, Weather), shaped)
    try:
        chat.bind(top_logprobs=3).invoke(QUESTION)
        note("a mistake raises", False)
    except Exception as error:
        note("a mistake raises", "top_logprobs" in str(error), type(error).__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
