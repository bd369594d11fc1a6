"""Two vocabularies: which tokens they share, and how ids and logits cross over."""

from __future__ import annotations

import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from outrider.device import Cpu
from outrider.errors import UserError
from outrider.speculation.vocabulary import Pairs, Translation, same_ids, same_strings
from outrider.tokenizer import Tokenizer
from outrider.tokenizer.loading import TokenizerParts
from outrider.tokenizer.tokenizer import BYTES

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?()[]{}<>/*-+=&%$#@"
WORDS = ["a", "the", "sea", "of", "is", "café", "über", "red", "tide", "salt", "wind"]


def byte_level(words: list[str] = WORDS) -> Tokenizer:
    """Every byte, some words after a space, one special token. The alphabet comes from the library, not from us."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spellings = sorted(pre_tokenizers.ByteLevel.alphabet())
    spellings += [splitter.pre_tokenize_str(f" {word}")[0][0] for word in words]
    ids = {spelling: token for token, spelling in enumerate(spellings)}
    backend = tokenizers.Tokenizer(models.BPE(ids, [], ignore_merges=True))
    backend.pre_tokenizer, backend.decoder = splitter, decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(TokenizerParts(backend, eos="<|end|>"))


def pieces(words: list[str] = WORDS, special: bool = True) -> Tokenizer:
    """As SentencePiece has them: an unknown token, named bytes, letters, words with a mark in front."""
    spellings = ["<unk>", "<|end|>", "<0x0A>", "<0xE9>", "\u2581", *LETTERS, *(f"\u2581{word}" for word in words)]
    ids = {spelling: token for token, spelling in enumerate(spellings)}
    backend = tokenizers.Tokenizer(models.BPE(ids, [], unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    if special:
        backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(TokenizerParts(backend, eos="<|end|>"))


def test_the_alphabet_of_byte_level_vocabularies() -> None:
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("\n\t é猫\x00\x7f", "Zürich ist schön"):
        spelling = splitter.pre_tokenize_str(text)[0][0]
        assert bytes(BYTES[letter] for letter in spelling) == text.encode()
    assert sorted(BYTES) == sorted(pre_tokenizers.ByteLevel.alphabet())


def test_texts_that_are_one_token_in_both() -> None:
    target, draft = byte_level(), pieces()
    pairs = same_strings(target, draft, target.vocabulary_size, draft.vocabulary_size)
    shared = dict(zip(pairs.target, pairs.draft, strict=True))
    assert len(set(pairs.target)) == len(pairs.target) == len(set(pairs.draft))
    for text in ("a", "?", " ", " a", " sea", " café"):
        spellings = [token for token in range(target.vocabulary_size) if target.decode([token]) == text]
        assert len(spellings) == 1
        assert (draft.spelling(shared[spellings[0]]) or "").replace("\u2581", " ") == text
    newline = next(token for token in range(target.vocabulary_size) if target.spelling(token) == "\u010a")
    assert draft.spelling(shared[newline]) == "<0x0A>"
    assert shared[target.eos_id or 0] == draft.eos_id
    assert draft.unknown_id == 0 and 0 not in pairs.draft  # no text of the target's is spelled so
    back = same_strings(draft, target, draft.vocabulary_size, target.vocabulary_size)
    assert {own: theirs for theirs, own in zip(back.target, back.draft, strict=True)} == shared


def test_a_special_token_is_no_word_of_the_same_spelling() -> None:
    target, draft = byte_level(), pieces(special=False)
    pairs = same_strings(target, draft, target.vocabulary_size, draft.vocabulary_size)
    assert target.eos_id is not None and target.eos_id not in pairs.target


def test_ids_beyond_the_models_vocabulary_are_not_shared() -> None:
    target = byte_level()
    pairs = same_strings(target, target, 150, target.vocabulary_size)
    assert pairs == Pairs(list(range(150)), list(range(150)))


def test_too_few_shared_tokens_are_refused() -> None:
    with pytest.raises(UserError, match="shares 90 tokens with the target's, fewer than 100"):
        same_strings(byte_level([]), pieces([]), 300, 300)


def test_the_same_ids_must_be_the_same_tokens() -> None:
    target, other = byte_level(), byte_level(["a", "the", "lake"])
    assert same_ids(target, target, 268, 300).target == list(range(268))
    with pytest.raises(UserError, match=r"token 258 is `Ġlake` in its vocabulary and `Ġsea`.*`vocabulary=strings`"):
        same_ids(target, other, 268, 300)
    assert same_ids(target, other, 258, 300).draft == list(range(258))  # what differs belongs to no model's ids
    assert same_ids(target, None, 9, 9) == Pairs(list(range(9)), list(range(9)))
    with pytest.raises(UserError, match="has 8 tokens and the target's 9, and it has no tokenizer"):
        same_ids(target, None, 9, 8)


def test_ids_and_logits_cross_over() -> None:
    words = Translation(Pairs([4, 0, 3], [1, 2, 0]), target_size=5, draft_size=4, fallback=3, mask=None, device=Cpu())
    assert words.read(torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32)).tolist() == [2, 3, 3, 0, 1]
    assert words.read(torch.tensor([0], dtype=torch.int32)).dtype is torch.int32
    said = words.say(torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]))
    none = -torch.inf
    assert said.tolist() == [[3.0, none, none, 1.0, 2.0], [7.0, none, none, 5.0, 6.0]]
    assert words.mask == -1


def test_a_larger_draft_model_says_only_what_the_target_has() -> None:
    pairs = Pairs([0, 1, 2], [0, 1, 2])
    words = Translation(pairs, target_size=3, draft_size=5, fallback=None, mask=4, device=Cpu())
    assert words.say(torch.arange(10.0).view(2, 5)).tolist() == [[0.0, 1.0, 2.0], [5.0, 6.0, 7.0]]
    assert words.mask == 3  # not the target's token 4, if it had one
    assert words.read(torch.tensor([2, words.mask], dtype=torch.int32)).tolist() == [2, 4]


def test_one_vocabulary_costs_nothing() -> None:
    words = Translation(Pairs([0, 1], [0, 1]), target_size=2, draft_size=2, fallback=None, mask=None, device=Cpu())
    tokens, logits = torch.tensor([1], dtype=torch.int32), torch.zeros(1, 2)
    assert words.read(tokens) is tokens and words.say(logits) is logits


def test_lacking_tokens_need_something_to_be_read_as() -> None:
    with pytest.raises(UserError, match="lacks 2 of the target's tokens and has neither"):
        Translation(Pairs([0], [0]), target_size=3, draft_size=1, fallback=None, mask=None, device=Cpu())
