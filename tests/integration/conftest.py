"""A tiny random model with a chat template, a way to type commands at it, and a browser to look at its pages."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = os.environ.get("OUTRIDER_CHROMIUM") or shutil.which("chromium")
    assert path, "install chromium, or set `OUTRIDER_CHROMIUM` to where it is"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
