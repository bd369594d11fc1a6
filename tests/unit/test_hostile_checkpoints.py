"""Checkpoints that crash a library, never end or take all memory: refused in one sentence that names file and key."""

from __future__ import annotations

import base64
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_gguf import HEAD_DIM, HEADS, WIDTH, floats, make, metadata
from test_tokenizer import byte_level, sentence_piece

import tiny
from outrider import LLM
from outrider.errors import UserError
from outrider.tokenizer import Tokenizer
from outrider.tokenizer.chat import ChatTemplate
from outrider.weights import open_checkpoint

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.copy("llama", tmp_path / "model")


def change(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(file.read_text())
    edit(value)
    file.write_text(json.dumps(value))


# ---- chat templates ----

TEMPLATES = {
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 0.3 s"),
    "macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "more than 0.3 s",
    ),
    "power": ("{{ 2 ** (2 ** 40) }}", "4096 bits"),
    "powers": ("{% set x = 2 ** 4000 %}{{ (x * x) % 7 }}", "4096 bits"),
    "repeated text": ("{{ 'a' * 10 ** 11 }}", "268435456 characters"),
    "repeated list": ("{{ (range(99999) | list * 1000) | length }}", "268435456 characters"),
    "doubled text": (
        "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "268435456 characters",
    ),
    "added text": (
        "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "268435456 characters",
    ),
    "doubled block": (
        "{% set ns = namespace(s='aa') %}"
        "{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
        "268435456 characters",
    ),
    "padded by a filter": ("{{ 'a' | center(10 ** 11) }}", "pads"),
    "padded by a method": ("{{ 'a'.ljust(10 ** 11) }}", "pads"),
    "indented": ("{{ 'a\nb' | indent(width=10 ** 11) }}", "pads"),
    "formatted": ("{{ '%99999999999d' % 1 }}", "width"),
    "formatted by a filter": ("{{ '%99999999999d' | format(1) }}", "width"),
    "formatted by a method": ("{{ '{:>99999999999}'.format(1) }}", "width"),
    "replaced": ("{% set a = 'a' * 1000000 %}{{ a.replace('a', a) }}", "268435456 characters"),
    "replaced by a filter": ("{% set a = 'a' * 1000000 %}{{ a | replace('a', a) }}", "268435456 characters"),
    "joined": ("{% set a = 'a' * 1000000 %}{{ range(99999) | join(a) }}", "268435456 characters"),
    "words": ("{{ lipsum(n=100000) }}", "undefined"),
    "nested": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "recursion"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_without_end_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, reason = TEMPLATES[name]
    # Others reach their own limit first, on a slow machine too.
    monkeypatch.setattr("outrider.tokenizer.sandbox.MAX_SECONDS", 0.3 if "0.3 s" in reason else 60)
    began = time.monotonic()
    with pytest.raises(UserError, match=f"the model's chat template .*({reason})"):
        ChatTemplate(source).render(MESSAGES, True, {})
    assert time.monotonic() - began < 20


def test_limits_leave_ordinary_templates_alone() -> None:
    source = (
        "{% for message in messages %}{{ loop.index0 % 2 }}/{{ loop.length }}{{ '%s: ' % message.role }}"
        "{{ message.content | trim | indent(2) ~ '!' * 2 + '{}'.format(3) }}{% endfor %}"
        "{{ ['a', 'b'] | join(', ') }}{{ 'xyx'.replace('x', 'zz') }}{{ 2 ** 10 }}{{ {'a': [1]} | tojson(indent=1) }}"
    )
    expected = '0/2user: hello!!31/2user: hello!!3a, bzzyzz1024{\n "a": [\n  1\n ]\n}'
    assert ChatTemplate(source).render(MESSAGES * 2, True, {}) == expected


@pytest.mark.parametrize(
    "file, content, key",
    [
        ("chat_template.jinja", b"\xff{{ messages }}", "UTF-8"),
        ("tokenizer_config.json", b'{"eos_token": "\\ud800"}', "`eos_token`"),
        ("tokenizer_config.json", b'{"chat_template": "\\ud800"}', "`chat_template`"),
    ],
)
def test_texts_that_are_no_text_are_refused(folder: Path, file: str, content: bytes, key: str) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(UserError, match=f"{file}.*{key}"):
        Tokenizer.open(folder)


# ---- tokenizers ----


def character_map(data: bytes) -> dict[str, str]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def replacements(count: int, content: str) -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": {"Regex": "."}, "content": content}] * count


TOKENIZERS: dict[str, dict[str, Any]] = {
    "an unknown token that is unknown": {"model": {"unk_token": "<none>"}},
    "a prefix longer than a merge": {
        "model": {"continuing_subword_prefix": "####", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    },
    "an empty map": {"normalizer": character_map(b"")},
    "a map of 4 GB": {"normalizer": character_map(struct.pack("<I", 0xFFFFFFF0) + b"\xff" * 64)},
    "a map that points beyond its end": {"normalizer": character_map(struct.pack("<I", 8) + b"\xff" * 8 + b"abc\0")},
    "replacements that double": {"normalizer": {"type": "Sequence", "normalizers": replacements(40, "aa")}},
    "decoders that double": {"decoder": {"type": "Sequence", "decoders": replacements(40, "aa")}},
    "very many steps": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 101}},
    "words of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "a strip of a billion": {"decoder": {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}},
    "a template without its token": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {},
        }
    },
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_panics_or_grows_is_refused(folder: Path, name: str) -> None:
    def edit(parts: dict[str, Any]) -> None:
        for key, value in TOKENIZERS[name].items():
            parts[key] = {**parts[key], **value} if key == "model" else value

    change(folder / "tokenizer.json", edit)
    with pytest.raises(UserError, match=r"tokenizer\.json` is not a usable tokenizer \([^\n]+\): fetch it again"):
        Tokenizer.open(folder)


SPELLINGS: dict[str, Callable[[str, str], str]] = {
    "a key with an escaped letter": lambda text, _: text.replace("precompiled_", "\\u0070recompiled_"),
    "a key with an escaped underscore": lambda text, _: text.replace("precompiled_", "precompiled\\u005F"),
    "a normalizer before the one that replaces it": lambda text, plain: f'{{"normalizer": {text}, {plain[1:]}',
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_spelling_hides_a_map_of_4_gb(folder: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "tokenizer.json"
    plain, hostile = file.read_text(), json.dumps(TOKENIZERS["a map of 4 GB"]["normalizer"])
    whole = json.dumps({**json.loads(plain), "normalizer": json.loads(hostile)})
    file.write_text(SPELLINGS[spelling](hostile if "before" in spelling else whole, plain))
    monkeypatch.setattr("outrider.tokenizer.loading.Tokenizer", None)  # the library would allocate the 4 GB
    with pytest.raises(UserError, match=r"tokenizer\.json` is not a usable tokenizer \(`precompiled_charsmap` is"):
        Tokenizer.open(folder)


def test_a_panic_in_use_is_an_error_of_the_request() -> None:
    class Panicking:
        def encode(self, *_: object, **__: object) -> None:
            raise type("PanicException", (BaseException,), {})("index out of bounds")

        decode = encode

    tokenizer = Tokenizer.open(byte_level("smollm"))
    tokenizer._backend = Panicking()  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"cannot encode this text .index out of bounds"):
        tokenizer.encode("a")
    with pytest.raises(UserError, match=r"cannot decode these tokens .index out of bounds"):
        tokenizer.decode([1])


@pytest.mark.parametrize("make_metadata", [sentence_piece, lambda: byte_level("smollm")])
def test_a_token_of_a_million_characters_is_refused(make_metadata: Callable[[], dict[str, Any]]) -> None:
    fields = make_metadata()
    fields["tokenizer.ggml.tokens"][-1] = "ab" * 500_000
    with pytest.raises(UserError, match=r"a token of 1000000 characters .`tokenizer.ggml.tokens`"):
        Tokenizer.open(fields)


# ---- weights ----


@pytest.mark.parametrize("heads", [0, -1, "four", [4]])
@pytest.mark.parametrize("key, name", [("num_attention_heads", "q"), ("num_key_value_heads", "k")])
def test_head_counts_that_are_none_are_refused(tmp_path: Path, key: str, name: str, heads: object) -> None:
    fields = {**metadata(), f"outrider.{key}": heads}
    with pytest.raises(UserError, match=rf"m\.gguf`: the metadata `outrider\.{key}` is"):
        make(tmp_path / "m.gguf", fields, floats(f"blk.0.attn_{name}.weight", HEADS * HEAD_DIM, WIDTH))


@pytest.mark.parametrize("shape", [[2**63, 0], [0, 2**63], [2**40, 2**40, 0]])
def test_shapes_beyond_any_tensor_are_refused(folder: Path, shape: list[int]) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["extra"] = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    written = json.dumps(header).encode()
    file.write_bytes(len(written).to_bytes(8, "little") + written + data[8 + size :])
    with pytest.raises(UserError, match=r"model.safetensors`.*(`extra`|[Oo]verflow|shape)"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("token", [tiny.VOCABULARY, [2, 2**40]])
def test_an_end_beyond_the_vocabulary_is_refused(folder: Path, token: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))
    with pytest.raises(UserError, match=rf"{folder}` has the `eos_token_id` \d+, and its vocabulary ends at"):
        LLM(str(folder))


def test_rope_tables_of_gigabytes_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(folder / "config.json", lambda config: config.update(max_position_embeddings=2**22))
    monkeypatch.setattr("outrider.models.layers.MAX_ROPE_BYTES", 2**20)
    with pytest.raises(UserError, match=r"4194304 positions and \d+ dimensions would take 0\.\d GiB.*`max_context`"):
        LLM(str(folder))
    assert LLM(str(folder), max_context=64)
