"""Incremental decoding: whole characters only, and all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import byte_level, sentence_piece
from tokenizer_corpus import TEXTS

from outrider.tokenizer import Stream, Tokenizer

TOKENIZERS = {
    "byte-level": Tokenizer.open(byte_level("smollm")),
    "byte fallback": Tokenizer.open(sentence_piece()),
    "byte fallback, prefix space": Tokenizer.open(sentence_piece(add_space_prefix=True)),
}


def pieces(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    stream = Stream(tokenizer, skip_special)
    return [*(stream.push(token) for token in ids), stream.flush()]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_arrives_in_whole_characters(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    for text in TEXTS:
        given_out = pieces(tokenizer, tokenizer.encode(text), skip_special=False)
        assert all("\ufffd" not in piece for piece in given_out), text
        assert "".join(given_out) == tokenizer.decode(tokenizer.encode(text), skip_special=False)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("skip_special", [True, False])
def test_any_tokens_give_the_text_of_decode(kind: str, skip_special: bool) -> None:
    """Random tokens: broken characters, specials in the middle of one, spaces at the start."""
    tokenizer = TOKENIZERS[kind]

    @settings(max_examples=200)
    @given(st.lists(st.integers(0, tokenizer.vocabulary_size - 1), max_size=24))
    def check(ids: list[int]) -> None:
        assert "".join(pieces(tokenizer, ids, skip_special)) == tokenizer.decode(ids, skip_special)

    check()


def test_text_comes_as_soon_as_it_is_certain() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("ab c")
    assert "" not in pieces(tokenizer, ids)[:-1]
    assert pieces(tokenizer, ids)[-1] == ""


def test_an_unfinished_character_comes_with_the_flush() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    first = tokenizer.encode("\u20ac", add_special=False)[:2]
    assert pieces(tokenizer, first) == ["", "", "\ufffd\ufffd"]
    stream = Stream(tokenizer)
    assert (stream.flush(), stream.flush()) == ("", "")


def incomplete(kind: str) -> list[int]:
    """Return tokens whose text stays uncertain for long: parts of characters, with skipped tokens in between."""
    tokenizer = TOKENIZERS[kind]
    part = tokenizer.encode("\U0001f600", add_special=False)[0 if kind == "byte-level" else 1]
    return [part, *sorted(tokenizer.special_ids)[:1], part, part] * 500


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_incomplete_characters_take_linear_time(kind: str, monkeypatch) -> None:
    tokenizer, ids = TOKENIZERS[kind], incomplete(kind)
    expected = tokenizer.decode(ids)
    decoded, decode = 0, tokenizer.decode

    def counted(ids: list[int], skip_special: bool = True) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids, skip_special)

    monkeypatch.setattr(tokenizer, "decode", counted)
    assert "".join(pieces(tokenizer, ids)) == expected
    assert decoded <= 8 * len(ids)
