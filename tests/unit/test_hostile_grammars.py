"""Grammars that crash the backend, never end or take gigabytes: refused, and the next grammar compiles."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import endless_grammar
import tiny
from endless_grammar import ENDLESS
from outrider.errors import UserError
from outrider.structured_output.compiler import Compiler
from outrider.structured_output.simple import is_simple
from outrider.tokenizer import Tokenizer
from outrider.types import StructuredOutput
from waiting import TIMEOUT, wait_until

HARMLESS = StructuredOutput("regex", "[ab]{1,3}")
SLOW = StructuredOutput("regex", ".*" * 5000)


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    yield new_compiler()


def new_compiler() -> Compiler:
    with tempfile.TemporaryDirectory() as folder:
        return Compiler(Tokenizer.open(tiny.copy("llama", Path(folder))), tiny.VOCABULARY, [2])


def references(count: int) -> str:
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(count)}
    return json.dumps({"$defs": {**chain, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"})


def objects(count: int) -> str:
    chain = {f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(count)}
    return json.dumps({"$defs": {**chain, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"})


def rules(name: str, count: int) -> str:
    return "\n".join(
        [f"start: {name}0", *(f'{name}{n}: {name}{n + 1} "b"' for n in range(count)), f'{name}{count}: "a"']
    )


def intersection(count: int) -> str:
    return "start: A\nA: " + " & ".join(f"/(.*a.{{{n}}}b.*)/" for n in range(3, 3 + count))


def patterns(count: int) -> str:
    return json.dumps({"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(5, 5 + count)]})


def pattern_properties(count: int) -> str:
    """Return a schema with patterns that are compared in pairs."""
    properties = {f"^{n:03}.*x.{{15}}$": {"type": "integer"} for n in range(count)}
    return json.dumps({"type": "object", "patternProperties": properties})


def multiples(*factors: int) -> str:
    return json.dumps({"allOf": [{"type": "integer", "multipleOf": factor} for factor in factors]})


DEEP, MUCH = "nested too deeply", "more than|too much work|too large|too big|fuel|[Uu]nable|not disjoint|lexer"
HOSTILE: dict[str, tuple[str, str, str]] = {
    "a chain of references": ("json", references(3500), DEEP),
    "a chain of objects": ("json", objects(1000), DEEP),
    "a chain of rules": ("grammar", rules("r", 6000), DEEP),
    "a chain of terminals": ("grammar", rules("T", 6000), DEEP),
    "a schema in a grammar": ("grammar", f"start: %json {references(3500)}", DEEP),
    "a multiple of a large number": ("json", '{"type":"integer","multipleOf":99999999}', "more than"),
    "a multiple of many numbers": ("json", multiples(7, 11, 13, 17, 19, 23), "more than"),
    "an intersection of patterns": ("json", patterns(20), MUCH),
    "patterns of properties": ("json", pattern_properties(500), MUCH),
    "an intersection of terminals": ("grammar", intersection(15), MUCH),
    "a long wait": (SLOW.kind, SLOW.text, MUCH),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_in_one_sentence(compiler: Compiler, name: str) -> None:
    kind, text, reason = HOSTILE[name]
    with pytest.raises(UserError, match=f"^`structured` holds a [^\n]+({reason})[^\n]*: correct it$"):
        compiler.compile(StructuredOutput(kind, text))  # type: ignore[arg-type]
    assert compiler.compile(HARMLESS)


ORDINARY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 80, "description": "what it is called"},
        "kind": {"$ref": "#/$defs/Kind"},
        "pattern": {"anyOf": [{"type": "number", "minimum": 0}, {"type": "null"}]},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/Part"}, "minItems": 1},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
    "$defs": {"Kind": {"enum": ["a", "b"]}, "Part": {"type": "object", "properties": {"id": {"type": "integer"}}}},
}


def test_ordinary_schemas_need_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    own = new_compiler()
    monkeypatch.setattr(
        "outrider.structured_output.checker.start_worker", partial(pytest.fail, "a process was started")
    )
    for structured in (
        StructuredOutput("json", ORDINARY),
        StructuredOutput("json_object"),
        StructuredOutput("choice", ["yes", "no"]),
    ):
        assert own.compile(structured)


@pytest.mark.parametrize(
    "change",
    [
        {"multipleOf": 3},
        {"pattern": "a*"},
        {"patternProperties": {"a": {}}},
        {"allOf": [{}]},
        {"format": "email"},
        {"maxLength": 10**6},
        {"minItems": 2000},
        {"$ref": "#/$defs/Kind"},  # next to other keys
        {"anyOf": [{}]},
        {"x-guidance": {}},
        {"not": {}},
        {"properties": {str(n): {} for n in range(500)}},
        {"items": json.loads('{"items":' * 30 + "{}" + "}" * 30)},
        {"properties": {str(n): {"$ref": "#/$defs/Kind"} for n in range(70)}},
        {"properties": 1},
    ],
)
def test_schemas_that_may_be_expensive_are_checked_first(change: dict) -> None:
    assert is_simple("json", json.dumps(ORDINARY))
    assert not is_simple("json", json.dumps({**ORDINARY, **change}))


def worker_children(compiler: Compiler) -> list[int]:
    """Return the processes that compile grammars at this moment."""
    process = compiler._checker._link._process
    if process is None:
        return []
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """A compiler whose check of ENDLESS never ends by itself."""
    endless_grammar.use(monkeypatch)
    return new_compiler()


def test_a_cancelled_check_ends_its_process(patient: Compiler) -> None:
    check = patient.check(ENDLESS)
    wait_until(lambda: len(worker_children(patient)) == 1)
    assert check.cancel()
    wait_until(lambda: not worker_children(patient))
    assert patient.compile(HARMLESS)


def test_a_slow_grammar_does_not_hold_up_another(patient: Compiler) -> None:
    slow = patient.check(ENDLESS)
    assert patient.check(StructuredOutput("regex", "[cd]+")).result(TIMEOUT)
    assert not slow.done() and slow.cancel()


def test_a_lost_worker_is_replaced(patient: Compiler) -> None:
    check = patient.check(ENDLESS)
    wait_until(lambda: worker_children(patient))
    process, (child,) = patient._checker._link._process, worker_children(patient)
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="ended"):
        check.result(TIMEOUT)
    os.kill(child, signal.SIGKILL)
    assert patient.check(StructuredOutput("regex", "[ef]+")).result(TIMEOUT)


def test_the_worker_ends_with_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.structured_output.checker.EXIT_SECONDS", TIMEOUT)  # it is not killed
    own = new_compiler()
    own.compile(HARMLESS)
    process = own._checker._link._process
    assert process is not None and process.poll() is None
    del own
    assert process.wait(TIMEOUT) == 0


def test_the_cache_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.structured_output.compiler.CACHE_BYTES", 100)
    own = new_compiler()
    one, two, three = (StructuredOutput("choice", [text]) for text in "abc")
    own.compile_checked(one, 60)
    own.compile_checked(two, 40)
    assert own.find(one) and own.find(two)
    own.compile(one)  # used last
    own.compile_checked(three, 30)
    assert own.find(one) and own.find(three) and own.find(two) is None
    own.compile_checked(two, 1000)  # alone beyond the limit: kept until the next one
    assert own.find(two) and own.find(one) is None and own.find(three) is None
