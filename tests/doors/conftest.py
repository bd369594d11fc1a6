"""A tiny random model with a chat template, and a way to type commands at it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli import app

TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}|{% endfor %}[assistant] "


@pytest.fixture(scope="session")
def plain_model(tiny_folder: Callable[..., Path]) -> Path:
    """A model without a chat template."""
    return tiny_folder()


@pytest.fixture(scope="session")
def model(plain_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, tuned for chat as far as its folder says."""
    folder = tmp_path_factory.mktemp("doors") / "chatty"
    shutil.copytree(plain_model, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def outrider(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs a command line in this process, with an empty cache of models and no network."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments: object, stdin: str | None = None) -> Any:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
