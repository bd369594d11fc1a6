"""Chat templates: Jinja from the checkpoint, so foreign code, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..types import UserError


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the model's own words for training: here, just its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's way to declare them

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RefusalError(Exception):
    """The template itself says no."""


def _raise_exception(message: str) -> NoReturn:
    raise _RefusalError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    extensions: list[str | type[Extension]] = [loopcontrols, _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    def __init__(self, source: str) -> None:
        self._source = source
        self._compiled: jinja2.Template | None = None

    def render(self, messages: Any, add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        plain = check_messages(messages)
        settings = {"tools": None, "documents": None, **variables}
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self._source)
            return self._compiled.render(messages=plain, add_generation_prompt=add_generation_prompt, **settings)
        except _RefusalError as error:
            raise UserError(f"the model's chat template refuses these messages: {_one_line(error)}") from None
        except jinja2.exceptions.SecurityError as error:
            raise UserError(f"the model's chat template leaves its sandbox: {_one_line(error)}") from None
        except Exception as error:  # a template is foreign code: whatever it raises is its mistake, not the engine's
            raise UserError(f"the model's chat template fails on these messages: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text or type(error).__name__


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with plain text for content, or a refusal that says which one is wrong."""
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError("a chat is a list of messages, each with `role` and `content`: pass at least one")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"message {index} is a {type(message).__name__}: expected `role` and `content`")
    if not isinstance(message.get("role"), str):
        raise UserError(f"message {index} has no `role`: expected system, user or assistant")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_part_text(index, part) for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise UserError(f"message {index} has no `content`: expected a text")
    return {**message, "content": content}


def _part_text(index: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UserError(f"message {index} has a part of type `{kind}`: only `text` parts are understood")
