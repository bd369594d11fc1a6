"""Prompts from files: every form that people have them in, and a sentence for each that is none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import UserError
from outrider.train.data.prompts import read_prompts

FORMS: dict[str, Any] = {
    "prompt": {"prompt": "hello", "source": "x"},
    "text": {"text": "hello"},
    "instruction": {"instruction": "hello", "input": ""},
    "string": "hello",
    "turns": {"turns": ["hello", "and then?"]},
    "messages": {"messages": [{"role": "system", "content": "brief"}, {"role": "user", "content": "hello"}]},
    "others' messages": {"messages": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]},
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json"])
def test_every_notation_of_a_prompt_is_read(tmp_path: Path, name: str, suffix: str) -> None:
    items = [FORMS[name], {"prompt": "grüße\nzwei"}]
    content = json.dumps(items) if suffix == ".json" else "\r\n\n".join(json.dumps(item) for item in items) + "\n"
    path = tmp_path / f"p.q{suffix}"
    path.write_bytes(gzip.compress(content.encode()) if suffix.endswith("gz") else content.encode())
    assert read_prompts([path]) == ["hello", "grüße\nzwei"]


def test_an_instruction_is_joined_with_its_input(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"instruction": "Sum up.", "input": "Long text"}))
    assert read_prompts([path]) == ["Sum up.\n\nLong text"]


def test_every_line_of_a_text_file_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbffirst\r\n\n  \n{not json}\nlast")
    assert read_prompts([path]) == ["first", "{not json}", "last"]


def test_duplicate_prompts_are_dropped_in_file_order(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.jsonl"
    first.write_text("b\na\nb\n")
    second.write_text(json.dumps({"prompt": " a\n"}) + "\n" + json.dumps({"prompt": "c"}) + '\n"b"\n')
    assert read_prompts([first, second]) == ["b", "a", "c"]
    assert read_prompts([second, first]) == [" a\n", "c", "b"]


BROKEN: dict[str, tuple[bytes, str]] = {
    "no JSON": (b'{"prompt": "x"', "is not JSON"),
    "deep": (b"[" * 100_000, "is not JSON"),
    "a number": (b"3", "is neither a text nor an object"),
    "no key": (b'{"question": "x"}', "has none of `prompt`"),
    "no text": (b'{"prompt": 3}', "has none of `prompt`"),
    "empty": (b'{"prompt": " "}', "is an empty prompt"),
    "no user": (b'{"messages": [{"role": "assistant", "content": "x"}]}', "has no user message"),
    "no content": (b'{"messages": [{"role": "user", "content": [1]}, 4]}', "has no user message"),
    "Latin-1": (b'{"prompt": "gr\xfc\xdfe"}', "is not UTF-8 text"),
    "half a character": (b'{"prompt": "\\ud83d"}', "has a lone surrogate"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_line_without_a_prompt_is_named_or_skipped(tmp_path: Path, name: str) -> None:
    line, expected = BROKEN[name]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"prompt": "good"}\n' + line + b"\n\n" + line + b'\n{"prompt": "better"}\n')
    with pytest.raises(UserError, match=expected) as refusal:
        read_prompts([path])
    assert f"`{path}` line 3 " in str(refusal.value) and "1 more lines have errors" in str(refusal.value)
    assert "--skip-broken" in str(refusal.value)
    assert read_prompts([path], skip_broken=True) == ["good", "better"]


def test_broken_lines_of_all_files_are_counted(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.txt", tmp_path / "c.json"]
    paths[0].write_text('"x"\n{\n')
    paths[1].write_bytes(b"y\n\xff\n")
    paths[2].write_text('["z", 4, {}]')
    with pytest.raises(UserError, match=r"a.jsonl` line 2 is not JSON, and 3 more lines have errors"):
        read_prompts(paths)
    assert read_prompts(paths, skip_broken=True) == ["x", "y", "z"]
    with pytest.raises(UserError, match=r"c.json` entry 2 is neither"):
        read_prompts(paths[2:])


@pytest.mark.parametrize("skip", [False, True])
def test_a_file_of_broken_lines_is_refused_even_if_they_are_skipped(tmp_path: Path, skip: bool) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes("x\ny\n".encode("utf-16"))
    with pytest.raises(UserError, match=r"a\.jsonl` line 1"):
        read_prompts([path], skip_broken=skip)


FILES: dict[str, tuple[str, bytes | None, str]] = {
    "missing": ("a.jsonl", None, "cannot read .*no such file"),
    "empty": ("a.jsonl", b"", "holds no prompt"),
    "blank": ("a.txt", b"\n \n", "holds no prompt"),
    "an empty list": ("a.json", b"[]", "holds no prompt"),
    "no list": ("a.json", b'{"prompt": "x"}', "is not a list"),
    "no JSON": ("a.json", b'["x",\n"y"', "line 2 is not JSON"),
    "not UTF-8": ("a.json", b'["\xff"]', "not UTF-8 text"),
    "deep": ("a.json", b"[" * 100_000, "is not valid JSON"),
    "truncated": ("a.jsonl.gz", gzip.compress(b'"hello there"\n' * 50)[:-12], "is truncated"),
    "damaged": ("a.jsonl.gz", gzip.compress(b'"hello"\n')[:10] + b"\xff" * 40, "not a valid gzip file"),
    "not packed": ("a.jsonl.gz", b'"hello"\n', "not a valid gzip file"),
    "another kind": ("a.csv", b"x", "pass .jsonl, .json, .txt"),
    "no kind": ("prompts", b"x", "pass .jsonl, .json, .txt"),
    "packed nothing": ("a.gz", b"x", "pass .jsonl, .json, .txt"),
}


@pytest.mark.parametrize("name", FILES)
def test_invalid_files_are_refused(tmp_path: Path, name: str) -> None:
    file, content, expected = FILES[name]
    path = tmp_path / file
    if content is not None:
        path.write_bytes(content)
    for skip in (False, True):
        with pytest.raises(UserError, match=expected) as refusal:
            read_prompts([path], skip)
        assert f"`{path}`" in str(refusal.value)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(UserError, match="is a directory"):
        read_prompts([tmp_path / "a.jsonl"])
