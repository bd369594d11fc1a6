"""Prompts from files: JSON lines, JSON lists or plain lines, compressed or not."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...errors import UserError
from ..io.disk import reason

KINDS = (".jsonl", ".json", ".txt")
USERS = ("user", "human")


class _BrokenError(Exception):
    """A line that holds no prompt; the text says why."""


def read_prompts(files: Sequence[Path], skip_broken: bool = False) -> list[str]:
    """All prompts, each once, in the order of the files. Texts that differ in outer white space are one prompt."""
    found: dict[str, str] = {}
    broken: list[str] = []
    for path in files:
        count = 0
        for where, item in _items(path):
            try:
                prompt = _prompt(item)
            except _BrokenError as error:
                broken.append(f"`{path}` {where} {error}")
                continue
            count += 1
            found.setdefault(prompt.strip(), prompt)
        if not count and not broken:
            raise UserError(f"`{path}` holds no prompt: write one on each line, or leave the file out")
    if broken and not skip_broken:
        others = f", and {len(broken) - 1} more are broken" if len(broken) > 1 else ""
        raise UserError(
            f"{broken[0]}{others}: repair the lines, or leave them out with `--skip-broken` (`skip_broken=True`)"
        )
    if broken and not found:
        raise UserError(f"none of {len(broken)} lines holds a prompt: the first is {broken[0]}")
    return list(found.values())


def _items(path: Path) -> Iterator[tuple[str, Any]]:
    """What each line, or each entry of a list, holds, and where that is: text, a JSON value, or bytes of a line."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] == [".gz"]
    kind = next(iter(suffixes[-2:-1] if packed else suffixes[-1:]), "")
    if kind not in KINDS:
        raise UserError(f"`{path}` is no file of prompts by its name: expected {', '.join(KINDS)}, perhaps with .gz")
    content = _content(path, packed).removeprefix(b"\xef\xbb\xbf")  # the mark that some editors put first
    if kind == ".json":
        yield from ((f"entry {number}", item) for number, item in enumerate(_list(path, content), start=1))
        return
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield f"line {number}", line if kind == ".jsonl" else _Plain(line.removesuffix(b"\r"))


class _Plain(bytes):
    """A line that is a prompt as it stands."""


def _content(path: Path, packed: bool) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if packed else raw
    except EOFError:
        raise UserError(f"`{path}` breaks off before its end: fetch or write it again") from None
    except (gzip.BadGzipFile, zlib.error):  # the first is an OSError, too
        raise UserError(f"`{path}` is no intact gzip file: fetch or write it again") from None
    except OSError as error:
        raise UserError(f"cannot read `{path}`: {reason(error)}") from error


def _list(path: Path, content: bytes) -> list[Any]:
    try:
        value = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"cannot read `{path}`: it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise UserError(f"`{path}` line {error.lineno} is no JSON ({error.msg}): repair the file") from None
    except (ValueError, RecursionError):
        raise UserError(f"`{path}` is no JSON that can be read: repair the file") from None
    if not isinstance(value, list):
        raise UserError(f"`{path}` holds no list: write prompts as `[...]`, or one JSON object a line into a .jsonl")
    return value


def _prompt(item: Any) -> str:
    if isinstance(item, bytes):
        item = _decoded(item)
    text = item if isinstance(item, str) else _text(item)
    if not text.strip():
        raise _BrokenError("is an empty prompt")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _BrokenError("holds half a character (a lone surrogate)") from None
    return text


def _decoded(line: bytes) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise _BrokenError("is not UTF-8 text") from None
    if isinstance(line, _Plain):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _BrokenError("is no JSON") from None


def _text(item: Any) -> str:
    if not isinstance(item, dict):
        raise _BrokenError("is neither a text nor an object")
    for key in ("prompt", "text"):
        if isinstance(item.get(key), str):
            return str(item[key])
    if isinstance(item.get("instruction"), str):
        given = item.get("input")
        return f"{item['instruction']}\n\n{given}" if isinstance(given, str) and given.strip() else item["instruction"]
    for key in ("messages", "turns"):
        if isinstance(item.get(key), list):
            return _first_turn(item[key])
    raise _BrokenError("has none of `prompt`, `text`, `instruction`, `messages` and `turns`")


def _first_turn(turns: list[Any]) -> str:
    for turn in turns:
        if isinstance(turn, str):
            return turn
        if isinstance(turn, dict) and turn.get("role", turn.get("from")) in USERS:
            content = turn.get("content", turn.get("value"))
            if isinstance(content, str):
                return content
    raise _BrokenError("has no turn of the user with a text")
