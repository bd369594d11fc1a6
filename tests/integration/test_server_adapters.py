"""LoRA adapters over HTTP: as the `model` of every endpoint, loaded and unloaded while requests run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import tiny
import tiny_lora
from outrider import AsyncLLM
from outrider.cli.options import read_loras
from outrider.errors import UserError
from outrider.server.app import build_app
from outrider.server.options import ServerOptions

ASK: dict[str, Any] = {"prompt": tiny.prompt(12), "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: str(tiny_lora.save("llama", folder / name, seed)) for seed, name in enumerate(("poet", "judge"), 1)}


@pytest.fixture(scope="module")
def llm(tiny_folder, adapters: dict[str, str]) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        str(tiny_folder("llama")),
        backend="cpu",
        lora={"poet": adapters["poet"]},
        max_loras=1,
        speculate="ngram:adaptive=no",
    )
    yield engine
    engine.close(timeout=5)


@pytest.fixture(scope="module")
def client(llm: AsyncLLM) -> Iterator[TestClient]:
    with TestClient(build_app(llm, ServerOptions(names=("tiny",), allow_lora_updates=True))) as found:
        yield found


def text(client: TestClient, model: str, **fields: Any) -> str:
    answer = client.post("/v1/completions", json=ASK | {"model": model} | fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


def test_an_adapter_is_a_model_in_every_endpoint(client: TestClient) -> None:
    plain, adapted = text(client, "tiny"), text(client, "poet")
    assert plain != adapted
    response = client.post("/v1/completions", json=ASK | {"model": "poet", "stream": True})
    assert '"model":"poet"' in response.text
    generated = client.post(
        "/api/generate",
        json={"model": "poet:latest", "prompt": "abc", "raw": True, "stream": False, "options": {"num_predict": 4}},
    )
    assert generated.status_code == 200 and generated.json()["model"] == "poet:latest"
    assert client.post("/tokenize", json={"model": "poet", "prompt": "abc"}).status_code == 200
    listed = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
    assert set(listed) == {"tiny", "poet"}
    assert listed["poet"]["parent"] == "tiny" and Path(listed["poet"]["root"]).name == "poet"
    assert client.get("/v1/models/poet").json()["id"] == "poet"
    assert [each["name"] for each in client.get("/api/tags").json()["models"]] == ["tiny", "poet"]
    missing = client.post("/v1/completions", json=ASK | {"model": "judge"})
    assert missing.status_code == 404 and "use `tiny`, `poet`" in missing.json()["error"]["message"]


def test_adapters_are_loaded_and_unloaded_under_load(client: TestClient, adapters: dict[str, str]) -> None:
    wanted = {"tiny": text(client, "tiny"), "poet": text(client, "poet")}
    failures: list[str] = []

    def ask(model: str) -> None:
        for _ in range(6):
            if text(client, model) != wanted[model]:
                failures.append(model)

    threads = [threading.Thread(target=ask, args=(model,)) for model in ("tiny", "poet", "poet")]
    for thread in threads:
        thread.start()
    for _ in range(3):
        loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "judge", "lora_path": adapters["judge"]})
        assert loaded.text == "Success: LoRA adapter 'judge' added successfully."
        judged = text(client, "judge")
        unloaded = client.post("/v1/unload_lora_adapter", json={"lora_name": "judge"})
        assert unloaded.text == "Success: LoRA adapter 'judge' removed successfully."
        assert judged not in wanted.values()
    for thread in threads:
        thread.join()
    assert not failures


def test_an_adapter_may_be_replaced(client: TestClient, adapters: dict[str, str]) -> None:
    before = text(client, "poet")
    fields = {"lora_name": "poet", "lora_path": adapters["judge"]}
    again = client.post("/v1/load_lora_adapter", json=fields)
    assert again.status_code == 400 and "loaded already" in again.json()["error"]["message"]
    assert client.post("/v1/load_lora_adapter", json=fields | {"load_inplace": True}).status_code == 200
    assert text(client, "poet") != before
    fields["lora_path"] = adapters["poet"]
    assert client.post("/v1/load_lora_adapter", json=fields | {"load_inplace": True}).status_code == 200
    assert text(client, "poet") == before


@pytest.mark.parametrize(
    ("path", "fields", "status", "reason"),
    [
        ("load", {"lora_name": "x", "lora_path": "/nowhere"}, 400, "no adapter at `/nowhere`"),
        ("load", {"lora_name": "", "lora_path": "/x"}, 400, "`lora_name` is empty"),
        ("load", {"lora_name": "tiny", "lora_path": "/x"}, 400, "the name of the model"),
        ("load", {"lora_name": "x"}, 400, "lora_path"),
        ("unload", {"lora_name": "x"}, 404, "no adapter called `x`"),
    ],
)
def test_wrong_updates_say_why(client: TestClient, path: str, fields: dict[str, str], status: int, reason: str) -> None:
    answer = client.post(f"/v1/{path}_lora_adapter", json=fields)
    assert answer.status_code == status and reason in answer.json()["error"]["message"]


def test_updates_are_refused_unless_allowed(llm: AsyncLLM) -> None:
    with TestClient(build_app(llm, ServerOptions(names=("tiny",)))) as closed:
        for path in ("load", "unload"):
            answer = closed.post(f"/v1/{path}_lora_adapter", json={"lora_name": "x", "lora_path": "/x"})
            assert answer.status_code == 403 and "--allow-lora-updates" in answer.json()["error"]["message"]


def test_metrics_report_the_acceptance_of_each_adapter(client: TestClient) -> None:
    text(client, "poet", prompt=tiny.prompt(3) * 6, max_tokens=24)
    found = client.get("/metrics").text
    for name in ("draft_tokens_total", "accepted_tokens_total", "acceptance_length"):
        assert f'outrider_adapter_{name}{{adapter="poet",engine="0",method="ngram",model_name="tiny"}}' in found


@pytest.mark.parametrize("wrong", ["poet", "=x", "poet=", '{"name": "poet"}', "{"])
def test_a_wrong_flag_shows_the_form(wrong: str) -> None:
    with pytest.raises(UserError, match="expected NAME=PATH"):
        read_loras([wrong])


def test_flags_take_both_forms() -> None:
    assert read_loras(["a=./x=y", '{"name": "b", "path": "./z"}']) == {"a": "./x=y", "b": "./z"}
    assert read_loras([]) is None
    with pytest.raises(UserError, match="`a` twice"):
        read_loras(["a=1", "a=2"])
