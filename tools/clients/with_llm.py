"""The command line tool `llm`: a chat, a stream and a schema, configured by `extra-openai-models.yaml`."""

from __future__ import annotations

import json
from pathlib import Path

from stage import Environment, Record, Server

PACKAGES = ("llm",)
QUESTION = "Name three colours of the rainbow."
SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}, "warm": {"type": "boolean"}},
    "required": ["sky", "warm"],
    "additionalProperties": False,
}
MODELS = """\
- model_id: served
  model_name: {model}
  api_base: {base}
  supports_schema: true
"""


def run(server: Server, environment: Environment, scratch: Path, record: Record) -> None:
    home = scratch / "llm"
    home.mkdir(parents=True, exist_ok=True)
    (home / "extra-openai-models.yaml").write_text(MODELS.format(model=json.dumps(server.model), base=server.base))

    def ask(*arguments: object) -> str:
        options = ("-o", "temperature", 0, "-o", "max_tokens", 40, "--key", "none", "--no-log")
        output = environment.run("llm", "-m", "served", *arguments, *options, extra={"LLM_USER_PATH": str(home)})
        return output.removesuffix("\n")

    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": server.model, "messages": messages, "temperature": 0, "max_tokens": 40}
    expected = server.ask("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    streamed, whole = ask(QUESTION), ask("--no-stream", QUESTION)
    record.note("a stream reads as the bare request does", streamed == expected, streamed)
    record.note("so does a whole answer", whole == expected)
    shaped = json.loads(ask("--schema", json.dumps(SCHEMA), "Describe the weather as JSON."))
    record.note("a schema is kept", set(shaped) == {"sky", "warm"} and isinstance(shaped["warm"], bool), shaped)
    guided = ask("-s", "Answer in one word.", "-o", "seed", 7, "Is the sea wide?")
    record.note("a system prompt and a seed are taken", bool(guided), guided)
