"""Tokenizers of Hugging Face folders: tokenizer.json, with its settings in tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import UserError
from .parts import Parts


def read(folder: Path) -> Parts:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"`{folder}` has no `tokenizer.json`: save the model with a fast tokenizer, or fetch the file")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise UserError(f"`{path}` is no usable tokenizer ({str(error).splitlines()[0]}): fetch it again") from None
    # Settings from training that would cut or fill a prompt.
    backend.no_truncation()
    backend.no_padding()
    config = _settings(folder / "tokenizer_config.json")
    return Parts(
        backend=backend,
        bos=_content(config.get("bos_token")),
        eos=_content(config.get("eos_token")),
        chat_template=_chat_template(folder, config),
    )


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"`{path}` is no valid JSON ({error}): fetch it again") from None
    return value if isinstance(value, dict) else {}


def _content(token: Any) -> str | None:
    """A token's text, which older files wrap in its properties."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
