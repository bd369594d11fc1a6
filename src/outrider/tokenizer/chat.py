"""Chat templates: Jinja from the checkpoint. It is untrusted code, so it runs in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from ..errors import UserError
from .sandbox import LimitedEnvironment, LimitError, limited

MARKER = "\ue000\ue001here\ue001\ue000"  # private-use characters that no conversation contains


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks assistant text for training: render its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's way to declare them

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RefusalError(Exception):
    """The template called `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _RefusalError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _environment() -> LimitedEnvironment:
    extensions: list[str | type[Extension]] = [loopcontrols, _Generation]
    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.limit_filters()
    return environment


class ChatTemplate:
    def __init__(self, source: str) -> None:
        self._source = source
        self._compiled: jinja2.Template | None = None
        self._names: frozenset[str] | None = None

    @property
    def names(self) -> frozenset[str]:
        """Return every variable that the template reads; empty if the template is invalid."""
        if self._names is None:
            try:
                tree = _environment().parse(self._source)
                self._names = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
            except (jinja2.TemplateError, RecursionError):  # `render` reports the error
                self._names = frozenset()
        return self._names

    def render(
        self,
        messages: Any,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        continue_final_message: bool = False,
        change: Callable[[Any], Any] = lambda message: message,
    ) -> str:
        """Return the prompt. change: applied to each message once its content is plain text."""
        plain = check_messages(messages)
        if "tool_calls" not in self._source:
            plain = [_calls_as_text(message) for message in plain]
        plain = [change(message) for message in plain]
        for name in ("messages", "add_generation_prompt"):
            if name in variables:
                raise UserError(
                    f"a chat template's `{name}` comes from the request itself: leave it out of its variables"
                )
        if not continue_final_message:
            return self._render(plain, add_generation_prompt, variables)
        if add_generation_prompt:
            raise UserError("an answer is either continued or begun: `add_generation_prompt` must be false here")
        return self._unfinished(plain, variables)

    def _unfinished(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the prompt up to the end of the last message's content, for the model to continue."""
        last = messages[-1]
        marked = {**last, "content": (last["content"] or "") + MARKER}
        before, mark, _ = self._render([*messages[:-1], marked], False, variables).rpartition(MARKER)
        if not mark:
            raise UserError("the model's chat template does not show the last message: there is nothing to continue")
        return before

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        settings = {"tools": None, "documents": None, **variables}
        try:
            with limited():
                if self._compiled is None:
                    self._compiled = _environment().from_string(self._source)
                return self._compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **settings)
        except _RefusalError as error:
            raise UserError(f"the model's chat template refuses these messages: {_one_line(error)}") from None
        except LimitError as error:
            raise UserError(f"the model's chat template is not usable, {error}: use another checkpoint") from None
        except jinja2.exceptions.SecurityError as error:
            raise UserError(f"the model's chat template leaves its sandbox: {_one_line(error)}") from None
        except Exception as error:  # untrusted code may raise anything
            raise UserError(f"the model's chat template fails on these messages: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text or type(error).__name__


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Convert the content of messages to plain text; refuse invalid messages by their index."""
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
    checked = {**message, "content": content}
    if message.get("tool_calls"):
        checked["tool_calls"] = _check_calls(index, message["tool_calls"])
    return checked


def _check_calls(index: int, calls: Any) -> list[dict[str, Any]]:
    """Parse the arguments of tool calls: clients send them as a JSON string, templates expect an object."""
    if not isinstance(calls, list | tuple):
        raise UserError(
            f"message {index} has `tool_calls` that are not a list: expected `id`, `type` and `function` of each"
        )
    return [_check_call(f"message {index} has a tool call {number}", call) for number, call in enumerate(calls)]


def _check_call(prefix: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{prefix} without a `function` that has a `name`: pass the call as the model made it")
    return {**call, "function": {**function, "arguments": _as_object(function.get("arguments"))}}


def _as_object(arguments: Any) -> Any:
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):  # show an invalid call to the model as it was
        return arguments
    return value if isinstance(value, dict) else arguments


def _calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Write tool calls as text, for templates without support for them."""
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [{"name": function["name"], "arguments": function["arguments"]} for function in functions]
    text = _tojson(calls[0] if len(calls) == 1 else calls)
    return {**message, "content": f"{message['content']}\n{text}" if message["content"] else text}


def _part_text(index: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UserError(f"message {index} has a part of type `{kind}`: only `text` parts are understood")
