"""Grammars over our vocabularies: what may come next, forth and back along a draft, and what is refused."""

from __future__ import annotations

import gc
import json
import random
import re
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from test_tokenizer import byte_level, sentence_piece

import tiny
from outrider.errors import UserError
from outrider.request import Request
from outrider.structured_output.compiler import Compiler, backend_vocabulary
from outrider.structured_output.matcher import GrammarMatcher, Matcher
from outrider.tokenizer import Tokenizer
from outrider.types import Draft, SamplingParams, StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
SHAPES = {
    "json": StructuredOutput("json", json.dumps(SCHEMA)),
    "any object": StructuredOutput("json_object"),
    "regex": StructuredOutput("regex", r"(ab|cd+){1,3} [0-9]{2}é?"),
    "choice": StructuredOutput("choice", json.dumps(["yes", "yesterday", 'no "x"', "naïve 猫"])),
    "lark": StructuredOutput("grammar", 'start: "a" start "b" | "c"'),
    "gbnf": StructuredOutput("grammar", 'root ::= "a" root "b" | "c"'),
}


@cache
def tokenizer(name: str) -> Tokenizer:
    """One of each kind of vocabulary."""
    if name == "characters":
        with tempfile.TemporaryDirectory() as folder:
            return Tokenizer.open(tiny.copy("llama", Path(folder)))
    return Tokenizer.open(byte_level("smollm") if name == "byte level" else sentence_piece())


KINDS = ("characters", "byte level", "sentence piece")


@cache
def compiler(name: str) -> Compiler:
    """With a few rows of logits more than there are tokens, as models have."""
    own = tokenizer(name)
    return Compiler(own, own.vocabulary_size + 13, ends(name))


def ends(name: str) -> frozenset[int]:
    return tokenizer(name).end_ids or frozenset([2])


def allowed(matcher: Matcher) -> set[int]:
    row = np.zeros(matcher.end_mask.shape, np.int32)
    matcher.fill(row)
    return set(np.nonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_spellings_are_what_tokens_decode_to(kind: str) -> None:
    own = tokenizer(kind)
    spelled = own.spellings()
    assert len(spelled) == own.vocabulary_size
    for text in ("Hello, world 123", '{"naïve": [1, "é"]}', "ab\nc  d", "猫"):
        ids = own.encode(text, add_special=False)
        if own.unknown_id is None or own.unknown_id not in ids:
            written = b"".join(spelled[token] for token in ids).decode()
            assert written.removeprefix(" ") == own.decode(ids).removeprefix(" ")
    plain = [token for token in range(own.vocabulary_size) if token not in own.special_ids | own.byte_ids]
    readable = [token for token in plain if "\ufffd" not in own.token_text(token)]
    assert len(readable) > 90
    assert all(spelled[token].decode() == own.token_text(token) for token in readable)


@pytest.mark.parametrize("kind", KINDS)
def test_forced_texts_are_encoded_to_the_byte(kind: str) -> None:
    words = backend_vocabulary(tokenizer(kind), tokenizer(kind).vocabulary_size, ends(kind))
    for text in ('{"name": "', " a", "b", '", "age": '):
        assert b"".join(words.tokens[token] for token in words(text)) == text.encode()
    assert words(b"a\xff")[:1] == words("a")
    unknown = words("a\u2603b")  # what cannot be spelled is not jumped over
    assert "a\u2603b".encode().startswith(b"".join(words.tokens[token] for token in unknown))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_allowed_depends_on_the_text_alone(kind: str, shape: str) -> None:
    """After any way forth and back the masks are those of a matcher that took the straight one."""
    dice = random.Random(f"{kind} {shape}")
    grammar = compiler(kind).compile(SHAPES[shape])
    walker, path = grammar.matcher(), []
    for _ in range(60):
        fresh = grammar.matcher()
        assert all(fresh.accept(token) for token in path)
        choices = allowed(fresh)
        assert allowed(walker) == choices and choices and walker.finished == fresh.finished
        assert not walker.finished or choices == ends(kind)
        back = dice.randint(0, len(path)) if walker.finished or dice.random() < 0.2 else 0
        walker.rollback(back)
        path = path[: len(path) - back]
        if not back:
            token = dice.choice(sorted(choices - ends(kind)) or sorted(choices))
            taken = walker.accept(token)
            assert taken or token in ends(kind)  # where no token is left, the end is offered, and is none
            path += [token] if taken else []


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_the_shape_are_accepted_and_others_not(kind: str) -> None:
    texts = {
        "json": ('{"name": "Bo", "age": 12}', '{"age": 1}'),
        "any object": ('{"a":[1,{"b":null}]}', "[1]"),
        "regex": ("abcdd 42", "ab 4a"),
        "choice": ("yesterday", "yester "),
        "lark": ("aacbb", "aacb!"),
        "gbnf": ("acb", "ab"),
    }
    words = backend_vocabulary(tokenizer(kind), tokenizer(kind).vocabulary_size, ends(kind))
    end = min(ends(kind))
    for shape, (good, bad) in texts.items():
        grammar = compiler(kind).compile(SHAPES[shape])
        matcher = grammar.matcher()
        assert all(matcher.accept(token) for token in words(good)) and matcher.accept(end) and matcher.ended
        assert matcher.finished and not matcher.accept(end) and allowed(matcher) == ends(kind)
        matcher = grammar.matcher()
        assert not all(matcher.accept(token) for token in [*words(bad), end]), shape


def test_special_tokens_are_no_text() -> None:
    own = tokenizer("byte level")
    matcher = compiler("byte level").compile(StructuredOutput("regex", ".*")).matcher()
    assert allowed(matcher) & own.special_ids == own.end_ids
    assert not any(matcher.accept(token) for token in own.special_ids - own.end_ids)


# ---- beside a request ----


def ids(text: str) -> list[int]:
    return [tiny.VOCABULARY - 1 if letter == "猫" else 3 + ord(letter) - 32 for letter in text]


def make_matcher(shape: str, value: str) -> GrammarMatcher:
    return GrammarMatcher(compiler("characters").compile(StructuredOutput(shape, value)))  # type: ignore[arg-type]


def filled(own: GrammarMatcher, output: list[int], draft: Draft) -> dict[int, set[int]]:
    masks = np.full((1 + len(draft.tokens), own.end_mask.shape[0]), -1, np.int32)
    nodes = own.masks(output, draft, masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return {node: set(np.nonzero(row)[0].tolist()) for node, row in zip(nodes, bits, strict=False)}


def test_masks_along_a_chain_end_where_it_is_refused() -> None:
    own = make_matcher("regex", "ab[cd]e?")
    found = filled(own, [], Draft([*ids("abde"), 2, 5]))
    assert found == {0: {*ids("a")}, 1: {*ids("b")}, 2: {*ids("cd")}, 3: {2, *ids("e")}, 4: {2}, 5: {2}}
    assert filled(own, ids("ab"), Draft(ids("xc"))) == {0: {*ids("cd")}}
    assert filled(own, ids("abc"), Draft([])) == {0: {2, *ids("e")}}


@pytest.mark.parametrize("read", ["abc", "ab", "abx", "ax", "abc end"])
def test_masks_of_an_output_that_lost_tokens(read: str) -> None:
    """Its last tokens came from a multi-step run that failed."""
    own, text = make_matcher("regex", "ab[cd]e?"), ids(read.removesuffix(" end"))
    filled(own, [*text, 2] if read.endswith("end") else text, Draft([]))
    assert filled(own, ids("a"), Draft(ids("bd"))) == {0: {*ids("b")}, 1: {*ids("cd")}, 2: {2, *ids("e")}}
    assert filled(own, ids("abd"), Draft([])) == {0: {2, *ids("e")}}
    assert own.complete([*ids("abde"), 2])


def test_masks_along_a_tree() -> None:
    own = make_matcher("choice", '["ab", "acd", "b"]')
    tree = Draft(ids("axbbcdz"), [-1, -1, -1, 0, 0, 4, 1])
    found = filled(own, [], tree)
    assert found == {0: {*ids("ab")}, 1: {*ids("bc")}, 3: {2}, 4: {2}, 5: {*ids("d")}, 6: {2}}
    assert filled(own, ids("a"), Draft([])) == {0: {*ids("bc")}}  # the walk came back


def test_drafts_lose_tokens_that_the_grammar_excludes() -> None:
    own = make_matcher("choice", '["ab", "acd", "b"]')
    assert own.prune([], Draft(ids("abx"))) == Draft(ids("ab"))
    whole = Draft(ids("acd"))
    assert own.prune([], whole) is whole
    tree = Draft(ids("axbbcdz"), [-1, -1, -1, 0, 0, 4, 1], confidence=[0.1 * n for n in range(7)])
    pruned = own.prune([], tree)
    assert (pruned.tokens, pruned.parents) == (ids("abbcd"), [-1, -1, 0, 0, 3])
    assert own.prune(ids("b"), Draft(ids("ab"))).tokens == []


def test_a_drawn_token_stays_to_be_rejected() -> None:
    """Else the choice in its place would be one from the target's distribution, instead of from what is left of it."""
    own = make_matcher("choice", '["ab", "acd", "b"]')
    chain = own.prune([], Draft(ids("axyz"), logits=torch.zeros(4, 101)))
    assert chain.tokens == ids("ax") and chain.logits.shape == (2, 101)
    tree = own.prune([], Draft(ids("axbz"), [-1, -1, 0, 1], logits=torch.zeros(4, 101)))
    assert (tree.tokens, tree.parents) == (ids("axb"), [-1, -1, 0])


def test_an_output_is_whole_once_its_end_was_allowed() -> None:
    for output, whole in (
        ([*ids("ab"), 2], True),
        ([*ids("a"), 2], False),
        (ids("ab"), False),
        ([*ids("xb"), 2], False),
    ):
        own = make_matcher("choice", '["ab"]')
        assert own.complete(output) is whole
    assert filled(own, [*ids("xb"), 2], Draft(ids("a"))) == {0: {2}}  # it left the grammar: nothing but the end
    assert own.prune([*ids("xb"), 2], Draft(ids("a"))).tokens == []


def test_a_grammar_beyond_the_work_limit_ends_and_leaves_others_alone() -> None:
    own = make_matcher("choice", '["abc"]')
    grammar = own._matcher._grammar
    whole = grammar.native

    class Exhausted:
        """A backend that fails at every mask."""

        def __init__(self) -> None:
            self.native, self.failed = whole.deep_copy(), False

        def __getattr__(self, name: str) -> object:
            return getattr(self.native, name)

        def deep_copy(self) -> Exhausted:
            return Exhausted()

        def is_error(self) -> bool:
            return self.failed

        def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
            self.failed = True

    grammar.native = own._matcher._compiled = Exhausted()
    own._matcher._native, grammar._build = Exhausted(), Exhausted
    assert filled(own, ids("a"), Draft([])) == {0: {2}}
    grammar._build = lambda: whole
    assert filled(own, ids("ab"), Draft([])) == {0: {*ids("c")}}  # another one has read the output again


def test_what_other_texts_needed_of_the_lexer_does_not_end_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.structured_output.backend.LEXER_STATES", 2000)
    own = Compiler(tokenizer("byte level"), tokenizer("byte level").vocabulary_size, ends("byte level"))
    grammar = own.compile(StructuredOutput("regex", r"(.|\n){1,2000}a(.|\n){1,2000}b"))
    first, dice = grammar.native, random.Random(0)
    for _ in range(4):
        matcher = grammar.matcher()
        for step in range(60):
            choices = sorted(allowed(matcher) - ends("byte level"))
            assert choices, step
            assert matcher.accept(dice.choice(choices))
    assert grammar.native is not first  # the limit was reached


def test_a_dead_end_in_a_tree_does_not_close_the_other_branches() -> None:
    """The vocabulary of characters cannot spell what comes after `a`."""
    own = make_matcher("choice", json.dumps(["a\u2603", "bc"]))
    assert filled(own, [], Draft(ids("abc"), [-1, -1, 1])) == {0: {*ids("ab")}, 1: {2}, 2: {*ids("c")}, 3: {2}}


def test_an_end_is_an_end_however_early() -> None:
    request = Request(
        "r", [1], SamplingParams(min_tokens=9, max_tokens=20), 0, end_tokens=frozenset([2]), max_length=50
    )
    assert request.ending(1, 2) is None
    request.grammar = make_matcher("choice", '["a"]')
    assert request.ending(1, 2) == ("stop", None)


# ---- refusals ----

BAD = {
    "no json": (StructuredOutput("json", "{'a': 1}"), "JSON schema that cannot be used .Expecting property name"),
    "no schema": (StructuredOutput("json", "[1]"), "a schema is an object or a boolean"),
    "a type that is none": (StructuredOutput("json", '{"type": "foo"}'), "Invalid type: foo"),
    "an open group": (StructuredOutput("regex", "a("), "regular expression that cannot be used .unclosed group"),
    "a look ahead": (StructuredOutput("regex", "(?=a)b"), "look-around"),
    "an unknown rule": (StructuredOutput("grammar", "start: foo"), 'unknown name: "foo"'),
    "half a rule": (StructuredOutput("grammar", "root ::= ("), "grammar that cannot be used"),
    "no choice": (StructuredOutput("choice", "[]"), "at least one"),
    "an empty choice": (StructuredOutput("choice", '["a", ""]'), "a list of non-empty strings"),
    "no list": (StructuredOutput("choice", '"a"'), "a list of non-empty strings"),
    "a million": (StructuredOutput("regex", "a{1000000}"), "too much work to follow"),
    "a thousand thousands": (StructuredOutput("regex", "(a{1000}){1000}"), "too much work to follow"),
    "a book": (StructuredOutput("regex", "a" * 200_000), "200000 characters, and 131072 is the limit"),
    "depths": (StructuredOutput("json", '{"items":' * 5000 + "{}" + "}" * 5000), "cannot be used"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_compiled_is_refused_in_one_sentence(name: str) -> None:
    structured, reason = BAD[name]
    with pytest.raises(UserError, match=reason) as refusal:
        compiler("characters").compile(structured)
    assert re.fullmatch(r"`structured` holds a [^\n]+: correct it", str(refusal.value))


def test_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.structured_output.compiler.CACHE_SIZE", 2)
    own = Compiler(tokenizer("characters"), tiny.VOCABULARY, [2])
    one, two, three = (StructuredOutput("regex", text) for text in "abc")
    first = own.compile(one)
    own.compile(two)
    assert own.compile(StructuredOutput("regex", "a")) is first
    own.compile(three)  # the one that was not asked for longest goes
    assert own.compile(one) is first and own.find(three) is not None and own.find(two) is None


def test_a_grammar_that_someone_holds_is_found_however_many_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.structured_output.compiler.CACHE_SIZE", 1)
    own = Compiler(tokenizer("characters"), tiny.VOCABULARY, [2])
    first, *others = (StructuredOutput("regex", text) for text in "abc")
    held = own.compile(first)
    for other in others:
        own.compile(other)
    assert own.find(first) is own.compile(first) is held
    own.compile(others[0])
    del held
    gc.collect()
    assert own.find(first) is None and own.find(others[0]) is not None


def test_known_grammars_are_found_while_another_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Compiler(tokenizer("characters"), tiny.VOCABULARY, [2])
    known, slow = StructuredOutput("regex", "a"), StructuredOutput("regex", "b")
    first, compile_now = own.compile(known), own.compile_uncached
    begun, gate = threading.Event(), threading.Event()

    def stuck(structured: StructuredOutput) -> object:
        begun.set()
        gate.wait(20)
        return compile_now(structured)

    monkeypatch.setattr(own, "compile_uncached", stuck)
    thread = threading.Thread(target=own.compile, args=[slow])
    thread.start()
    assert begun.wait(20) and own.compile(known) is first and own.find(slow) is None
    gate.set()
    thread.join(20)
    assert own.find(slow) is not None


def test_thousands_of_choices_are_one_word() -> None:
    texts = [f"value {number}" for number in range(5000)]
    matcher = compiler("byte level").compile(StructuredOutput("choice", json.dumps(texts))).matcher()
    for token in tokenizer("byte level").encode("value 4711", add_special=False):
        assert matcher.accept(token)
    assert matcher.accept(min(ends("byte level"))) and matcher.ended


def test_without_the_library_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"pip install 'outrider\[structured\]'"):
        Compiler(tokenizer("characters"), tiny.VOCABULARY, [2])


def test_a_model_without_an_end_cannot_have_a_shape() -> None:
    with pytest.raises(UserError, match="end-of-text token"):
        Compiler(tokenizer("characters"), tiny.VOCABULARY, [])


def test_parameters_that_make_no_sense() -> None:
    with pytest.raises(UserError, match="`xml`: expected one of json, json_object, regex"):
        StructuredOutput("xml", "a")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="expected a text"):
        StructuredOutput("grammar", {"type": "object"})
    with pytest.raises(UserError, match="`ignore_eos` and `structured` exclude each other"):
        SamplingParams(structured=StructuredOutput("json_object"), ignore_eos=True)
