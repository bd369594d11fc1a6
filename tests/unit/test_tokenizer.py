"""Tokenizers from GGUF metadata and from tokenizer.json equal transformers', both ways."""

from __future__ import annotations

import json
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizer_corpus import TEXTS
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import GemmaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import generate_merges
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from outrider import catalog
from outrider.errors import UserError
from outrider.tokenizer import Tokenizer
from outrider.tokenizer.loading import derive_merges
from outrider.weights import open_checkpoint

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    whole = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([whole, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# How the makers of each family split text, spelled independently of the code under test.
SPLITS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "olmo": pre_tokenizers.ByteLevel(add_prefix_space=False),
    **{
        name: split_by(GGUF_PRE_TOKENIZER_SPLITS[name])
        for name in ("llama-bpe", "smaug-bpe", "dbrx", "qwen2", "qwen35", "tekken", "gpt-4o")
    },
}
MERGED = ("gpt-2", "smollm", "olmo", "dbrx", "gpt-4o", "qwen35")  # a word that is a token is merged nevertheless


@cache
def trained(name: str) -> dict[str, Any]:
    """The model of a small byte-level BPE, trained with the family's own splitting: vocabulary and merges."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = SPLITS[name]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    return model


def byte_level(name: str, **changes: Any) -> dict[str, Any]:
    """The same as GGUF metadata."""
    model = trained(name)
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    fields = {
        "model": "gpt2",
        "pre": name,
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
        **changes,
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}
    return {"path": "tiny.gguf", "tokenizer.chat_template": TEMPLATE, **named}


def reference(name: str) -> Any:
    """transformers' tokenizer over the same vocabulary."""
    model = trained(name)
    merges: Any = [tuple(pair) for pair in model["merges"]]
    if name == "qwen2":
        made = Qwen2Tokenizer(vocab=model["vocab"], merges=merges)
        made.add_special_tokens({"additional_special_tokens": SPECIAL})
        return made
    whole_words = name not in MERGED
    backend = Backend(models.BPE(model["vocab"], merges, ignore_merges=whole_words))
    backend.pre_tokenizer = SPLITS[name]
    if name == "qwen35":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", SPLITS)
def test_byte_level_equals_transformers(name: str) -> None:
    ours, theirs = Tokenizer.open(byte_level(name)), reference(name)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        if not name.startswith("qwen"):  # which composes letters first
            assert ours.decode(ids, skip_special=False) == text


def test_gguf_files_of_gpt_oss_end_texts_at_return_and_call() -> None:
    plain = byte_level("gpt-4o")
    tokens = [*plain["tokenizer.ggml.tokens"], "<|return|>", "<|call|>", "<|end|>"]
    types = [*plain["tokenizer.ggml.token_type"], 3, 3, 3]
    found = Tokenizer.open(plain | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    assert {len(tokens) - 3, len(tokens) - 2} <= found.end_ids
    assert len(tokens) - 1 not in found.end_ids
    assert Tokenizer.open(plain).end_ids == found.end_ids - {len(tokens) - 3, len(tokens) - 2}


PIECES = [
    "\u2581t",
    "he",
    "\u2581the",
    "en",
    "in",
    "\u2581a",
    "er",
    "el",
    "lo",
    "ll",
    "\u2581w",
    "or",
    "\u2581wor",
    "ld",
]
PIECES += [
    "\u2581\u2581",
    "\u2581\u2581\u2581",
    "\u2581\u2581\u2581\u2581",
    "hel",
    "hell",
    "hello",
    "\u2581then",
    "spa",
    "ace",
    "sp",
    "ac",
]


def sentence_piece(**changes: Any) -> dict[str, Any]:
    """Metadata as Gemma has it: control tokens, runs written out, bytes, pieces by score, single letters."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>"]
    runs = ["\n", "\n\n", "  ", "   ", "    ", "<table>"]
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [piece for piece in PIECES if piece.strip("\u2581")]
    letters = ["\u2581", *map(chr, range(33, 127)), "é", "日", "本"]
    tokens = control + runs + raw + pieces + letters
    types = [3] * len(control) + [4] * len(runs) + [6] * len(raw) + [1] * (len(pieces) + len(letters))
    unscored = [-1000.0] * (len(control) + len(runs)) + [0.0] * len(raw)
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": unscored + [-float(rank) for rank in range(len(pieces) + len(letters))],
        "token_type": types,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "add_bos_token": True,
        "add_space_prefix": False,
        **changes,
    }
    return {"path": "tiny.gguf"} | {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def gemma_reference(metadata: dict[str, Any]) -> Any:
    tokens = metadata["tokenizer.ggml.tokens"]
    spelled = ["\u2581" * len(token) if token.strip(" ") == "" else token for token in tokens]
    vocabulary = {token: index for index, token in enumerate(spelled)}
    types = dict(zip(spelled, metadata["tokenizer.ggml.token_type"], strict=True))
    pieces = {token: -index for token, index in vocabulary.items() if types[token] in (1, 4)}
    made = GemmaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary, pieces))
    made.add_special_tokens({"additional_special_tokens": ["<start_of_turn>"]})
    made.add_tokens(["\n", "\n\n", "<table>"])
    return made


def test_sentence_piece_equals_transformers() -> None:
    metadata = sentence_piece()
    ours, theirs = Tokenizer.open(metadata), gemma_reference(metadata)
    texts = [*TEXTS, "hello  then   the world", "the\n\n\nhello<table>  x", "<start_of_turn>hello<eos>", "日本語 é"]
    for text in texts:
        ids = ours.encode(text, add_special=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids) == text
        assert ours.encode(text) == [2, *ids]


def test_merges_follow_from_the_vocabulary_as_in_transformers() -> None:
    """Equal scores aside, the order of merges is the order of scores, then of the longer left side."""
    spellings = ["a", "b", "ab", "ba", "aba", "abab", "bab", "ababa"]
    ids = {text: token for token, text in enumerate(spellings)}
    scores = [0.0, 0.0, -1.0, -4.0, -2.0, -5.0, -3.0, -6.0]
    theirs = generate_merges(ids, dict(zip(spellings, scores, strict=True)))
    assert derive_merges(spellings, ids, [1] * len(spellings), scores) == theirs


def test_a_word_that_is_a_token_needs_no_merges() -> None:
    """Llama 3's way; GPT-2's way is to build every word."""
    for name, whole in (("llama-bpe", True), ("gpt-2", False)):
        tokens = trained(name)["vocab"]
        changed = [*sorted(tokens, key=tokens.get), "zyzzyva"]
        types = [3 if token in SPECIAL else 1 for token in changed]
        tokenizer = Tokenizer.open(byte_level(name, tokens=changed, token_type=types))
        assert (tokenizer.encode("zyzzyva") == [len(tokens)]) is whole


def test_a_prefix_space_comes_and_goes() -> None:
    """Llama 2's way: every text starts with a space, which decoding takes away."""
    tokenizer = Tokenizer.open(sentence_piece(add_space_prefix=True))
    for text in ("hello", " hello", "  hello the", ""):
        ids = tokenizer.encode(text, add_special=False)
        assert tokenizer.decode(ids) == text
    the = tokenizer.encode("the", add_special=False)
    assert [tokenizer.token_text(token) for token in the] == [" the"]


def test_special_tokens_are_parsed_on_request() -> None:
    tokenizer = Tokenizer.open(byte_level("smollm"))
    text = "<|im_start|>user<|im_end|>"
    assert tokenizer.encode(text)[0] == 1 and tokenizer.encode(text)[-1] == 2
    plain = tokenizer.encode(text, parse_special=False)
    assert not tokenizer.special_ids & set(plain)
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(tokenizer.encode(text)) == "user"
    assert tokenizer.encode(text)[0] == 1  # the request before left nothing behind


def test_what_a_tokenizer_knows() -> None:
    tokenizer = Tokenizer.open(byte_level("smollm", add_bos_token=True, add_eos_token=True))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.end_ids == {0, 2}
    assert tokenizer.vocabulary_size == len(trained("smollm")["vocab"])
    assert tokenizer.encode("x")[0] == 1 and tokenizer.encode("x")[-1] == 2
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.token_text(1) == "<|im_start|>"
    (space_the,) = tokenizer.encode(" the", add_special=False)
    assert tokenizer.token_text(space_the) == " the"
    assert Tokenizer.open(byte_level("llama-bpe", add_bos_token=None)).encode("")[0] == 1
    assert Tokenizer.open(byte_level("gpt-2", add_bos_token=None)).encode("") == []


def test_folders(tmp_path: Path) -> None:
    source = reference("smollm")
    source.backend_tokenizer.enable_truncation(4)
    source.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, theirs = Tokenizer.open(tmp_path), reference("smollm")
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert (ours.bos_id, ours.eos_id, ours.chat_template) == (1, 2, TEMPLATE)
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    assert Tokenizer.open(tmp_path).chat_template == "yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.open(tmp_path).chat_template == "file"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown kind": ({"model": "bert"}, "of the kind `bert`"),
    "no vocabulary": ({"tokens": None}, "no `tokenizer.ggml.tokens`"),
    "unknown pre-tokenizer": ({"pre": "klingon"}, "unknown pre-tokenizer `klingon`"),
    "no pre-tokenizer": ({"pre": None}, "does not say how to split text"),
    "no merges": ({"merges": None}, "no `tokenizer.ggml.merges`"),
    "merges of nothing": ({"merges": ["qqq zzz"]}, "unusable merges"),
    "types of other tokens": ({"token_type": [1]}, "but 1 token types"),
    "twice": ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1], "merges": ["a b"]}, "the token `a` twice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_makes_no_tokenizer(name: str) -> None:
    changes, expected = REFUSED[name]
    with pytest.raises(UserError, match=r"`tiny\.gguf`") as refusal:
        Tokenizer.open(byte_level("smollm", **changes))
    assert expected in str(refusal.value)


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no score for every token"):
        Tokenizer.open(sentence_piece(scores=[0.0]))
    with pytest.raises(UserError, match=r"has no `tokenizer\.json`"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a usable tokenizer"):
        Tokenizer.open(tmp_path)
    tokenizer = Tokenizer.open(byte_level("smollm"))
    with pytest.raises(UserError, match="lone surrogate"):
        tokenizer.encode("\ud800")
    with pytest.raises(UserError, match="expected a string"):
        tokenizer.encode(5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="the token -1 is out of range"):
        tokenizer.decode([-1])


@pytest.mark.slow
def test_smollm2_equals_transformers() -> None:
    """transformers splits this vocabulary as GPT-2 did; SmolLM2's own tokenizer.json cuts out digits first."""
    from transformers import AutoTokenizer

    path = catalog.pull("smollm2-135m")
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    theirs.backend_tokenizer.pre_tokenizer = SPLITS["smollm"]
    ours = Tokenizer.open(open_checkpoint("smollm2-135m").tokenizer_source)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids) == text
    assert ours.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert ours.encode("  multiple   spaces") == [216, 2701, 256, 5600]


@pytest.mark.slow
def test_gemma_equals_transformers() -> None:
    from transformers import AutoTokenizer

    path = catalog.pull("gemma3-270m")
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = Tokenizer.open(open_checkpoint("gemma3-270m").tokenizer_source)
    for text in [*TEXTS, "<start_of_turn>user\n<table> <td>  x\t\ty<end_of_turn>"]:
        ids = ours.encode(text, add_special=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids) == text
        assert ours.encode(text) == [2, *ids]


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    tokenizer = Tokenizer.open(byte_level("smollm"))
    text = "the quick brown fox jumps over the lazy dog " * 60_000
    expected: list[int] = []
    encoding = threading.Thread(target=lambda: expected.extend(tokenizer.encode(text)))
    encoding.start()
    ticks = 0
    while encoding.is_alive():
        tokenizer.encode("short")  # needs neither the interpreter lock for long, nor a lock of the tokenizer
        time.sleep(0.001)
        ticks += 1
    assert ticks > 20  # one that holds the lock lets through one or two
    assert expected[:1000] == tokenizer.encode(text[: len(text) // 60])[:1000]
