"""Read prompts from files: JSON lines, JSON lists or plain lines, optionally gzipped."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...errors import UserError
from ..io.disk import reason

SUFFIXES = (".jsonl", ".json", ".txt")
USER_ROLES = ("user", "human")


class _BrokenError(Exception):
    """A line without a prompt; the message is the reason."""


def read_prompts(files: Sequence[Path], skip_broken: bool = False) -> list[str]:
    """Read all prompts, in the order of the files, without duplicates; outer white space is ignored in comparisons."""
    prompts: dict[str, str] = {}
    broken: list[str] = []
    for path in files:
        count = 0
        for location, item in _items(path):
            try:
                prompt = _prompt(item)
            except _BrokenError as error:
                broken.append(f"`{path}` {location} {error}")
                continue
            count += 1
            prompts.setdefault(prompt.strip(), prompt)
        if not count and not broken:
            raise UserError(f"`{path}` holds no prompt: write one per line, or leave the file out")
    if broken and not skip_broken:
        more = f", and {len(broken) - 1} more lines have errors" if len(broken) > 1 else ""
        raise UserError(f"{broken[0]}{more}: fix the lines, or skip them with `--skip-broken` (`skip_broken=True`)")
    if broken and not prompts:
        raise UserError(f"none of {len(broken)} lines holds a prompt: the first is {broken[0]}")
    return list(prompts.values())


def _items(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the location and the content of each line or list entry: a JSON value, or the bytes of a line."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    gzipped = suffixes[-1:] == [".gz"]
    kind = next(iter(suffixes[-2:-1] if gzipped else suffixes[-1:]), "")
    if kind not in SUFFIXES:
        raise UserError(f"`{path}` has an unknown suffix: pass {', '.join(SUFFIXES)}, optionally with .gz")
    content = _content(path, gzipped).removeprefix(b"\xef\xbb\xbf")  # byte order mark
    if kind == ".json":
        yield from ((f"entry {number}", item) for number, item in enumerate(_list(path, content), start=1))
        return
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield f"line {number}", line if kind == ".jsonl" else _PlainLine(line.removesuffix(b"\r"))


class _PlainLine(bytes):
    """A line that is a prompt itself, in contrast to JSON."""


def _content(path: Path, gzipped: bool) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if gzipped else raw
    except EOFError:
        raise UserError(f"`{path}` is truncated: fetch or write it again") from None
    except (gzip.BadGzipFile, zlib.error):  # BadGzipFile is an OSError, too
        raise UserError(f"`{path}` is not a valid gzip file: fetch or write it again") from None
    except OSError as error:
        raise UserError(f"cannot read `{path}`: {reason(error)}") from error


def _list(path: Path, content: bytes) -> list[Any]:
    try:
        value = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"cannot read `{path}`: it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise UserError(f"`{path}` line {error.lineno} is not JSON ({error.msg}): fix the file") from None
    except (ValueError, RecursionError):
        raise UserError(f"`{path}` is not valid JSON: fix the file") from None
    if not isinstance(value, list):
        raise UserError(f"`{path}` is not a list: write prompts as `[...]`, or one JSON object per line into a .jsonl")
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
        raise _BrokenError("has a lone surrogate") from None
    return text


def _decoded(line: bytes) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise _BrokenError("is not UTF-8 text") from None
    if isinstance(line, _PlainLine):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _BrokenError("is not JSON") from None


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
            return _first_user_message(item[key])
    raise _BrokenError("has none of `prompt`, `text`, `instruction`, `messages` and `turns`")


def _first_user_message(messages: list[Any]) -> str:
    for message in messages:
        if isinstance(message, str):
            return message
        if isinstance(message, dict) and message.get("role", message.get("from")) in USER_ROLES:
            content = message.get("content", message.get("value"))
            if isinstance(content, str):
                return content
    raise _BrokenError("has no user message with a text")
