"""`outrider pull`, `list`, `show` and `rm`, as a user meets them; the hub is a local server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from model_server import ModelServer, model_server, sha256
from outrider import LLM, SamplingParams, catalog

NAME = "tiny/Tiny-GGUF:F32"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with model_server() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        running.repositories["tiny/Tiny-GGUF"] = {"tiny-F32.gguf": tiny.gguf("llama")}
        running.files["/tiny.gguf"] = tiny.gguf("llama")
        yield running


def lines(result: Any) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_model_is_pulled_listed_used_and_removed(outrider: Any, server: ModelServer) -> None:
    assert outrider("list").stdout == ""
    assert "no model is in the cache" in outrider("list").stderr
    (pulled,) = lines(outrider("pull", NAME, "--json"))
    assert pulled["bytes"] == len(tiny.gguf("llama"))
    assert f"{NAME}: {pulled['path']} (" in outrider("pull", NAME).stdout
    (listed,) = lines(outrider("list", "--json"))
    assert listed == {**pulled, "format": "GGUF", "quantization": "F32", "heads": [], "modified": listed["modified"]}
    header, row = outrider("list").stdout.splitlines()
    assert header.split() == ["NAME", "SIZE", "FORMAT", "MODIFIED", "HEADS"]
    assert row.startswith(NAME) and "just now" in row
    server.requests.clear()
    (answer,) = lines(outrider("generate", "The sea", "-m", NAME, "--max-tokens", 4, "--raw", "--json"))
    assert answer["token_ids"] and server.requests == []
    removed = outrider("rm", NAME)
    assert removed.exit_code == 0 and removed.stdout.startswith(f"removed {NAME} (")
    assert lines(outrider("list", "--json")) == []
    assert not Path(pulled["path"]).exists()


def test_a_missing_model_is_pulled_where_it_is_named(outrider: Any, server: ModelServer) -> None:
    url = f"{server.url}/tiny.gguf"
    for name in (NAME, url):
        (answer,) = lines(outrider("generate", "The sea", "-m", name, "--max-tokens", 4, "--raw", "--json"))
        assert answer["token_ids"]
    rows = lines(outrider("list", "--json"))
    assert sorted(row["name"] for row in rows) == sorted([NAME, url])
    assert {row["quantization"] for row in rows} == {"F32"}, "one states it in its name, the other in its metadata"
    drafted = ("--speculate", f"draft_model:model={NAME},adaptive=no")
    (same,) = lines(outrider("generate", "The sea", "-m", url, *drafted, "--max-tokens", 4, "--raw", "--json"))
    assert same["token_ids"] == answer["token_ids"] and same["stats"]["drafted"] > 0
    (output,) = LLM(NAME).generate("The sea", SamplingParams(max_tokens=4, temperature=0))
    assert list(output.completions[0].token_ids) == answer["token_ids"]
    assert len(server.fetched()) == 2


def test_show_describes_a_pulled_model(outrider: Any, server: ModelServer) -> None:
    outrider("pull", NAME)
    (facts,) = lines(outrider("show", NAME, "--json"))
    parameters = sum(parameter.numel() for parameter in tiny.original("llama").parameters())
    assert facts["architecture"] == "llama" and facts["parameters"] == parameters
    assert (facts["context"], facts["layers"], facts["vocabulary"]) == (128, 3, tiny.VOCABULARY)
    assert facts["sha256"] == sha256(tiny.gguf("llama"))
    assert (facts["source"], facts["revision"], facts["license"]) == ("hub:tiny/Tiny-GGUF", server.commit, "apache-2.0")
    per_token = 2 * 3 * 2 * 16 * 4  # keys and values, layers, heads, width of a head, bytes of a float32
    assert facts["memory"]["kv_bytes_per_1k_tokens"] == 1000 * per_token
    assert facts["drafter"]["speculate"] == "ngram" and facts["heads"] == []
    text = outrider("show", NAME).stdout
    for part in ("context length   128 tokens", "quantization     F32 (GGUF", f"sha256           {facts['sha256']}"):
        assert part in text
    refused = outrider("show", NAME, "--template")
    assert refused.exit_code == 1 and "has no chat template" in refused.stderr


def test_a_hub_model_with_safetensors(outrider: Any, server: ModelServer, model: Path) -> None:
    server.repositories["tiny/Folder"] = {file.name: file.read_bytes() for file in model.iterdir() if file.is_file()}
    (answer,) = lines(outrider("generate", "The sea", "-m", "tiny/Folder", "--max-tokens", 4, "--json"))
    (same,) = lines(outrider("generate", "The sea", "-m", model, "--max-tokens", 4, "--json"))
    assert answer["token_ids"] == same["token_ids"]
    (facts,) = lines(outrider("show", "tiny/Folder", "--json"))
    assert facts["pulled"] and (facts["source"], facts["revision"]) == ("hub:tiny/Folder", server.commit)
    (row,) = lines(outrider("list", "--json"))
    assert (row["name"], row["format"]) == ("tiny/Folder", "safetensors")
    assert outrider("rm", "tiny/Folder").exit_code == 0
    assert lines(outrider("list", "--json")) == []


def test_show_describes_folders_and_files(outrider: Any, model: Path, tmp_path: Path) -> None:
    (facts,) = lines(outrider("show", model, "--json"))
    assert facts["format"] == "safetensors" and not facts["pulled"]
    assert facts["stop_tokens"] == [{"id": 2, "text": "</s>"}]
    assert outrider("show", model, "--template").stdout.rstrip("\n") == facts["chat_template"]
    (tmp_path / "mine.gguf").write_bytes(tiny.gguf("llama"))
    (facts,) = lines(outrider("show", tmp_path / "mine.gguf", "--json"))
    assert facts["quantization"] == "F32" and facts["title"] == "tiny"


def test_show_tells_what_the_catalog_knows_of_other_models(outrider: Any, server: ModelServer) -> None:
    (facts,) = lines(outrider("show", "llama3.2-1b", "--json"))
    assert not facts["pulled"] and facts["license"] == "Llama 3.2 Community" and facts["sha256"] is None
    shown = outrider("show", "smollm2-135m")
    assert shown.exit_code == 0 and "eagle3" in shown.stdout and "outrider pull smollm2-135m" in shown.stderr
    assert server.requests == [], "nothing is downloaded"
    missing = outrider("show", NAME)
    assert missing.exit_code == 1 and f"`outrider pull {NAME}`" in missing.stderr
    unknown = outrider("show", "lama3.2-1b")
    assert unknown.exit_code == 1 and "did you mean `llama3.2-1b`" in unknown.stderr


def test_the_catalog_is_listed(outrider: Any) -> None:
    rows = lines(outrider("list", "--catalog", "--json"))
    assert [row["name"] for row in rows] == list(catalog.CATALOG)
    small = next(row for row in rows if row["name"] == "smollm2-135m")
    assert small["heads"] == ["draft_model", "dspark", "eagle3", "medusa"] and not small["pulled"]
    text = outrider("list", "--catalog")
    assert len(text.stdout.splitlines()) == len(rows) + 1, "one line for each model, however narrow the terminal is"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("pull", "qwen3-4"), "did you mean `qwen3-4b`"),
        (("pull", "tiny/Tiny-GGUF:Q4_0"), "no file of the quantisation `Q4_0`: pick `tiny/Tiny-GGUF:F32`"),
        (("pull", "tiny/Missing"), "the hub has no model of that name"),
        (("pull", "../../etc/passwd"), "the catalog has no model `../../etc/passwd`"),
        (("generate", "x", "-m", "tiny/Tiny-GGUF:Q4_0"), "no file of the quantisation `Q4_0`"),
        (("generate", "x", "-m", "https://host/page.html"), "is not the URL of a GGUF file"),
        (("rm", "smollm2-135m"), "is not in the cache, nothing was removed"),
        (("rm", "/etc"), "is not in the cache, nothing was removed"),
        (("rm", "tiny/Tiny-GGUF"), "is not in the cache, nothing was removed"),
    ],
)
def test_a_mistake_is_explained_in_one_sentence(
    arguments: tuple[str, ...], problem: str, outrider: Any, server: ModelServer
) -> None:
    result = outrider(*arguments)
    assert result.exit_code == 1 and problem in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_full_disk_is_explained(outrider: Any, server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1}))
    for command in (("pull", NAME), ("generate", "x", "-m", NAME), ("pull", "smollm2-135m")):
        result = outrider(*command)
        assert result.exit_code == 1 and "MB free: make room, or set `OUTRIDER_CACHE`" in result.stderr


LIST = """
import sys
from outrider import cli
sys.argv = ["outrider", "list", "--json"]
try:
    cli.main()
finally:
    assert "torch" not in sys.modules
"""


def test_list_imports_no_torch() -> None:
    subprocess.run([sys.executable, "-c", LIST], check=True, capture_output=True)
