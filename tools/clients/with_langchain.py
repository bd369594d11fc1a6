"""LangChain's ChatOpenAI: runs `langchain_script.py` in an environment with LangChain."""

from __future__ import annotations

import json
from pathlib import Path

from stage import Environment, Record, Server

PACKAGES = ("langchain-openai",)


def run(server: Server, environment: Environment, scratch: Path, record: Record) -> None:
    script = Path(__file__).with_name("langchain_script.py")
    for line in environment.run("python", script, server.base, server.model).splitlines():
        record.note(*json.loads(line))
