"""Texts of single tokens: a character that spans tokens belongs to the token that completes it."""

from __future__ import annotations

import pytest
from test_tokenizer_stream import TOKENIZERS
from tokenizer_corpus import TEXTS

from outrider.tokenizer import TokenTexts, spelled
from outrider.types import Draft

WAVES = "a\U0001f30a猫b\U0001f30a"


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
def test_texts_of_tokens_join_to_the_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    texts = TokenTexts(tokenizer)
    for text in [*TEXTS, WAVES]:
        ids = tokenizer.encode(text, add_special=False)
        for cut in range(len(ids) + 1):  # a stream describes the tokens in parts
            pieces = texts.of(ids[:cut]) + texts.of(ids[cut:], ids[:cut])
            assert "\ufffd" not in "".join(pieces)
            assert "".join(pieces).lstrip() == text.lstrip()


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("\U0001f30a", add_special=False)[-4:]
    assert texts.of(ids) == ["", "", "", "\U0001f30a"]
    assert [spelled(text, texts.spelling(token)) for token, text in zip(ids, texts.of(ids), strict=True)] == [
        "<0xF0>",
        "<0x9F>",
        "<0x8C>",
        "\U0001f30a",
    ]
    assert texts.of(ids[:2], final=True) == ["", "\ufffd"]


def test_each_branch_of_a_draft_continues_its_own_path() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    texts = TokenTexts(tokenizer)
    wave, plain = (tokenizer.encode(text, add_special=False) for text in ("\U0001f30a", "b"))
    draft = Draft([wave[-2], wave[-1], plain[-1]], [-1, 0, -1])
    assert texts.of_draft(draft, wave[:-2])[:2] == ["", "\U0001f30a"]
    assert texts.of_draft(Draft([wave[-1]]), wave[:-1]) == ["\U0001f30a"]
