"""Fixtures: tiny random models, an engine with a server and a client, the command line, a browser."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import Scripted
from scripted_server import ScriptedServer, serve
from starlette.testclient import TestClient
from typer.testing import CliRunner

from outrider import LLM, AsyncLLM
from outrider.cli import app
from outrider.server.app import build_app
from outrider.server.options import ServerOptions

TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}|{% endfor %}[assistant] "


@pytest.fixture(scope="session")
def plain_model(tiny_folder: Callable[..., Path]) -> Path:
    """A model without a chat template."""
    return tiny_folder()


@pytest.fixture(scope="session")
def model(plain_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a chat template."""
    folder = tmp_path_factory.mktemp("integration") / "with-template"
    shutil.copytree(plain_model, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest, model: Path) -> Iterator[AsyncLLM]:
    """An engine for all tests of a module, with the options in the module's constant `ENGINE`."""
    engine = AsyncLLM(str(model), **{"max_requests": 4, **getattr(request.module, "ENGINE", {})})
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def client(llm: AsyncLLM) -> TestClient:
    """A client of a server over `llm`, whose model is called `tiny`."""
    return TestClient(build_app(llm, ServerOptions(names=("tiny",))))


@pytest.fixture(scope="module")
def plain(model: Path) -> LLM:
    """A second engine over the same model, without a server and without speculation."""
    return LLM(str(model))


@pytest.fixture
def scripted(plain_model: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[Scripted, TestClient]]]:
    """Make an engine with this chat template that answers `script`, and a client of its server."""
    engines: list[Scripted] = []

    def make(
        template: str, script: str = "", special: tuple[str, ...] = (), **options: Any
    ) -> tuple[Scripted, TestClient]:
        folder = tmp_path / f"model-{len(engines)}"
        shutil.copytree(plain_model, folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": template}))
        words = json.loads((folder / "tokenizer.json").read_text())
        for index, text in enumerate(special):
            words["added_tokens"].append({**words["added_tokens"][0], "id": 101 + index, "content": text})
            words["model"]["vocab"][text] = 101 + index
        (folder / "tokenizer.json").write_text(json.dumps(words))
        engine = Scripted(str(folder), max_requests=2)
        engine.script = script
        engines.append(engine)
        return engine, TestClient(build_app(engine, ServerOptions(**{"names": ("tiny",), **options})))

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def outrider(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run a command line in this process, with an empty model cache and without network."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))

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


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Open the page of an application; afterwards check that it contacted no other host and no script failed."""
    troubles: list[str] = []
    asked: set[str] = set()
    served: set[str] = set()
    with ExitStack() as stack:

        def opened(app: Any, width: int = 1280, height: int = 800, **options: Any) -> Any:
            url = stack.enter_context(serve(app))
            context = chromium.new_context(viewport={"width": width, "height": height}, **options)
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(20_000)
            page.on("pageerror", lambda error: troubles.append(str(error)))
            page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
            page.on("request", lambda request: asked.add(request.url.split("/")[2]))
            served.add(url.split("/")[2])
            page.goto(url)
            return page

        yield opened
    assert asked == served, "another host was asked"
    assert not [text for text in troubles if "Failed to load resource" not in text]  # what a refusal looks like
