"""The playground's files: MIME types, consistency with each other, no requests to other hosts."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from scripted_server import KEY, ScriptedServer
from starlette.testclient import TestClient

from outrider import LLM, SamplingParams
from outrider.diagnostics import trace_render
from outrider.server import playground

OWN = sorted(path for path in [*playground.FOLDER.iterdir(), playground.SHARED] if path.is_file())
VENDOR = playground.FOLDER / "vendor"
FILES = [*OWN, *sorted(VENDOR.iterdir())]
SCRIPTS = [path for path in OWN if path.suffix == ".js"]
STYLES = [path for path in playground.FOLDER.iterdir() if path.suffix == ".css"]
VOID = {"meta", "link", "input", "circle", "path"}
BOXES = {"always-draft", "colors", "tokens-while-streaming"}  # inside their labels


class Reader(HTMLParser):
    """Collects the elements in order, and checks that each end tag closes the element opened last."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def all(self, attribute: str) -> list[str]:
        return [value for _, found in self.elements if (value := found.get(attribute)) is not None]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(ScriptedServer().app) as client:
        yield client


@pytest.fixture(scope="module")
def page() -> Reader:
    return Reader((playground.FOLDER / "index.html").read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_has_its_mime_type(client: TestClient, path: Path) -> None:
    address = f"/page/{'vendor/' if path.parent == VENDOR else ''}{path.name}"
    answer = client.get(address)
    assert answer.status_code == 200
    assert answer.content == path.read_bytes()
    expected = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    expected |= {".json": "application/json", ".txt": "text/plain"}
    assert answer.headers["content-type"].split(";")[0] == expected[path.suffix]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    again = client.get(address, headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_page_is_served_at_the_root(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.content == (playground.FOLDER / "index.html").read_bytes()
    assert "unsafe" not in answer.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/page/none.js", "/page/", "/page/../playground.py", "/page/%2e%2e/playground.py"])
def test_no_other_file_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("styles", [STYLES, [trace_render.STYLES[-1]]], ids=["playground", "trace"])
def test_colors_are_defined_once(styles: list[Path]) -> None:
    shared, own = playground.SHARED.read_text(), "\n".join(path.read_text() for path in styles)
    defined = re.findall(r"^(?:  |:root \{ *)(--[\w-]+):", f"{shared}\n{own}", re.M)
    used = set(re.findall(r"var\((--[\w-]+)", own))
    by_scripts = re.findall(r"\"(--[\w-]+)\"", "".join(script.read_text() for script in SCRIPTS))
    assert not [name for name, count in Counter(defined).items() if count > 1]
    assert used <= {*defined, *by_scripts} and used & set(re.findall(r"(--[\w-]+):", shared))


def test_rules_of_both_pages_are_in_the_shared_file() -> None:
    shared, playing, tracing = (
        {re.sub(r"\s+", " ", rule) for rule in re.findall(r"[^{}/]+\{[^{}]*\}", text)}
        for text in (
            playground.SHARED.read_text(),
            "\n".join(path.read_text() for path in STYLES),
            trace_render.STYLES[-1].read_text(),
        )
    )
    assert shared and not (shared & playing or shared & tracing or playing & tracing)


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_no_file_refers_to_another_host(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")  # an XML namespace, which is never fetched
    assert not re.findall(r"(?:\w+:)?//[\w.]+", text)
    assert "@import" not in text


def test_vendored_files_are_those_of_the_manifest() -> None:
    """Every file has the recorded hash, every library has its license, and there is nothing else."""
    packages = json.loads((VENDOR / "manifest.json").read_text())
    hashes = {file["to"]: file["sha256"] for package in packages for file in package["files"]}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()}
    assert found.pop("manifest.json") and found == hashes
    assert {name.split(".")[0] for name in hashes if "LICENSE" in name} == {name.split(".")[0] for name in hashes}
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", package["version"]) for package in packages)


def test_the_page_is_well_formed(page: Reader) -> None:
    assert not page.wrong
    assert not page.open
    assert not [name for name, count in Counter(page.all("id")).items() if count > 1]
    assert not page.all("style"), "the policy forbids styles in the page"
    assert not [name for _, found in page.elements for name in found if name.startswith("on")]
    assert set(page.all("for")) | set(page.all("aria-labelledby")) <= set(page.all("id"))


def test_scripts_and_styles_use_existing_elements(page: Reader) -> None:
    assets = [link for link in page.all("href") + page.all("src") if not link.startswith("#")]
    assert len(assets) == 7
    assert set(assets) <= {f"page/{path.name}" for path in FILES}
    names = set(page.all("id"))
    for script in SCRIPTS:
        text = script.read_text()
        assert set(re.findall(r'byId\("([^"]+)"\)', text)) <= names, script.name
        for module, imported in ((m, names) for names, m in re.findall(r'import \{([^}]+)\} from "\./([^"]+)"', text)):
            source = (playground.FOLDER / module).read_text()
            for name in imported.split(","):
                own = rf"export (?:async )?(?:function\*?|class|const) {name.strip()}\b"
                vendored = rf"export\{{[^}}]*\bas {name.strip()}\b"
                assert re.search(f"{own}|{vendored}", source), (script.name, name)


def test_every_control_has_a_label(page: Reader) -> None:
    labelled = set(page.all("for"))
    controls = {str(found["id"]) for tag, found in page.elements if tag in ("input", "select", "textarea")}
    assert len(controls) == 16
    assert controls - labelled == BOXES


def test_info_describes_the_model(client: TestClient) -> None:
    facts = client.get("/playground/info").json()
    assert facts["model"] == "folder/tiny-model"
    assert facts["method"] == "ngram"
    assert facts["methods"][0] == {"name": "ngram", "width": 8, "trees": False}


def test_info_says_why_drafts_are_suspended(client: TestClient) -> None:
    facts = client.get("/playground/info").json()
    assert facts["adaptive"] is True
    stats = facts["speculation"]["ngram"]
    assert (stats["drafted"], stats["suspended"], stats["steps"]) == (0, 60, 64)
    assert (stats["suspension"]["rows"], stats["suspension"]["cost"]) == (2, 2.1)
    assert stats["suspension"]["acceptance_rate"] == 0.57
    assert stats["suspension"]["reason"].startswith("a step with 2 rows costs 2.10x of one row here")


def test_info_needs_the_api_key() -> None:
    with TestClient(ScriptedServer(key=KEY).app) as client:
        assert client.get("/playground/info").status_code == 401
        assert client.get("/playground/info", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
        assert client.get("/").status_code == 200


def test_every_listed_method_can_be_requested(tiny_folder: Callable[..., Path]) -> None:
    llm = LLM(str(tiny_folder()), speculate="suffix:width=6", cache_tokens=512)
    offered = playground.drafting_methods(llm.engine.spec_manager)
    assert [one["name"] for one in offered] == ["suffix", "ngram"]
    assert offered[0]["width"] == 6
    for one in offered:
        assert llm.engine.spec_manager.assign(SamplingParams(speculate=one["name"])).width == one["width"]
    assert llm.engine.spec_manager.assign(SamplingParams(prediction="so it is")).method == "prediction"
    assert playground.drafting_methods(llm.engine.spec_manager) == offered, "what a request must bring is no choice"
