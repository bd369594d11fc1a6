"""Run chat templates, which come with a checkpoint, within limits of time and memory.

Jinja's sandbox keeps a template from Python's internals, but not from looping for ever or from building a text of
gigabytes. Here every loop, call and filter checks the time, and every operation that makes a larger value from smaller
ones is checked before it runs and counted afterwards.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 5.0  # of CPU time for one conversation; ordinary templates take 10 µs a message
MAX_SIZE = 2**28  # characters that one rendering may make in all; an item of a list counts as POINTER of them
POINTER = 8
MAX_BITS = 2**12  # of a whole number
MAX_PADDING = 1000  # for filters and methods that pad with blanks
PADDING = frozenset(["center", "ljust", "rjust", "zfill", "expandtabs", "indent", "tojson", "wordwrap", "xmlattr"])
WIDE_FORMAT = re.compile(r"\d{4}|\*|\{[^}]*\{")  # a width of a thousand or more, or one that is computed


class LimitError(Exception):
    """The template exceeds a limit."""


class _Budget:
    """What a rendering has used."""

    def __init__(self) -> None:
        self.deadline = time.thread_time() + MAX_SECONDS
        self.size = 0

    def check_time(self) -> None:
        if time.thread_time() > self.deadline:
            raise LimitError(f"it takes more than {MAX_SECONDS:g} s")

    def add(self, size: int) -> None:
        self.size += size
        if self.size > MAX_SIZE:
            raise LimitError(f"it makes texts of more than {MAX_SIZE} characters")


_budget: ContextVar[_Budget | None] = ContextVar("budget", default=None)


@contextmanager
def limited() -> Iterator[None]:
    """Give a rendering its time and memory."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def _current() -> _Budget:
    return _budget.get() or _Budget()  # constant expressions are also evaluated while a template is compiled


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return POINTER * len(value) if isinstance(value, list | tuple | dict) else 0


def _check_whole(bits: int) -> None:
    if bits > MAX_BITS:
        raise LimitError(f"it computes a number of more than {MAX_BITS} bits")


class _Counted:
    """An iterable whose iterations check the time."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        budget = _current()
        for item in self._items:
            budget.check_time()
            yield item


class _Generator(CodeGenerator):
    """Writes `a ~ b` as a call that is counted."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        self.write("environment.concatenate((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits. Render within `limited`."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]  # writes as many words as it is asked for
        self.filters["outrider_counted"] = _Counted

    def limit_filters(self) -> None:
        """Check all filters. Call it once they are registered."""
        self.filters = {name: _limited_filter(name, call) for name, call in self.filters.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "outrider_counted", [], [], None, None, lineno=loop.lineno)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        _current().add(_size(result))
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as Jinja has it
        budget = _current()
        budget.check_time()
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps `format` of a text
        _check_arguments(getattr(method, "__name__", ""), getattr(method, "__self__", None), args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        budget.add(_size(result))
        return result

    def concatenate(self, parts: Iterable[Any]) -> str:
        return self.concat(str(part) for part in parts)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the output of a template, a macro or a block."""
        budget, texts = _current(), []
        for part in parts:
            budget.add(len(part))
            texts.append(part)
        return "".join(texts)


def _limited_filter(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        budget = _current()
        budget.check_time()
        first = 1 if hasattr(call, "jinja_pass_arg") else 0  # the environment or the context
        value = args[first] if len(args) > first else None
        _check_arguments(name, value, args[first + 1 :], kwargs)
        result = call(*args, **kwargs)
        budget.add(_size(result))
        return result

    if hasattr(call, "jinja_pass_arg"):
        checked.jinja_pass_arg = call.jinja_pass_arg  # type: ignore[attr-defined]
    return checked


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result would be too large."""
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**" and right > 0:
            _check_whole(left.bit_length() * right)
        if operator == "*":
            _check_whole(left.bit_length() + right.bit_length())
    elif operator == "*":
        size, count = (_size(left), right) if isinstance(right, int) else (_size(right), left)
        if isinstance(count, int) and size * count > MAX_SIZE:
            raise LimitError(f"it makes texts of more than {MAX_SIZE} characters")
    elif operator == "%" and isinstance(left, str):
        _check_format(left)


def _check_format(text: str) -> None:
    if WIDE_FORMAT.search(text):
        raise LimitError(f"it formats a value with a width of more than {MAX_PADDING}")


def _check_arguments(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call of a method or a filter, on `value`, whose result would be too large."""
    given = [*args, *kwargs.values()]
    numbers = [each for each in given if isinstance(each, int)]
    if name in PADDING and any(number > MAX_PADDING for number in numbers):
        raise LimitError(f"it pads a text with more than {MAX_PADDING} characters")
    if name in ("slice", "batch") and any(number > MAX_SIZE for number in numbers):
        raise LimitError(f"it makes a list of more than {MAX_SIZE} items")
    if name in ("format", "format_map", "strftime_now") and isinstance(value, str):
        _check_format(value)
    sizes = [_size(each) for each in given] or [0]
    if name == "replace" and (1 + _size(value)) * max(sizes) > MAX_SIZE:
        raise LimitError(f"it makes texts of more than {MAX_SIZE} characters")
    if name == "join":
        items, separator = (value, given[0] if given else "") if not isinstance(value, str) else (given[0], value)
        if isinstance(items, list | tuple | dict | range) and len(items) * _size(separator) > MAX_SIZE:
            raise LimitError(f"it makes texts of more than {MAX_SIZE} characters")
