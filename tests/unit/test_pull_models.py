"""Pull, find, list and remove models of the hub and of URLs, against a local server that plays both."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_server import ModelServer, model_server, sha256
from outrider import UserError, catalog
from outrider.catalog import cache, pulling
from outrider.catalog import download as downloads
from outrider.catalog.pulled import ARCHITECTURES
from outrider.models import architectures
from outrider.weights import locate

NAME = "tiny/Tiny-GGUF:Q4_0"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    from huggingface_hub import constants

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(downloads, "RETRY_SECONDS", 0.0)
    with model_server() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        model = b"GGUF" + b"q" * 3_000_000
        running.repositories["tiny/Tiny-GGUF"] = {
            "README.md": b"# Tiny",
            "tiny-Q4_0.gguf": model,
            "tiny-Q8_0.gguf": b"GGUF" + b"8" * 1000,
            "tiny-IQ2_XS.gguf": b"GGUF",
            "tiny-F16-00001-of-00002.gguf": b"GGUF" + b"1" * 500,
            "tiny-F16-00002-of-00002.gguf": b"GGUF" + b"2" * 300,
            "tiny-F32-00001-of-00002.gguf": b"GGUF",
        }
        running.files["/files/mine-Q5_0.gguf"] = b"GGUF" + b"m" * 1000
        yield running


def content(server: ModelServer, file: str) -> bytes:
    return server.repositories["tiny/Tiny-GGUF"][file]


def test_a_quantisation_is_pulled_once_and_used_without_the_hub(server: ModelServer, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    path = catalog.pull(NAME, progress=lambda *news: seen.append(news))
    assert path == tmp_path / "cache" / "hub" / "tiny" / "Tiny-GGUF" / "tiny-Q4_0.gguf"
    assert path.read_bytes() == content(server, "tiny-Q4_0.gguf")
    assert seen[-1] == (3_000_004, 3_000_004, NAME)
    record = cache.read_record(path)
    assert record["sha256"] == sha256(path.read_bytes())
    assert (record["source"], record["revision"], record["license"]) == (
        "hub:tiny/Tiny-GGUF",
        server.commit,
        "apache-2.0",
    )
    server.requests.clear()
    for name in (
        NAME,
        NAME.lower().replace("tiny/tiny-gguf", "tiny/Tiny-GGUF"),
        f"hf.co/{NAME}",
        "tiny/Tiny-GGUF:tiny-Q4_0.gguf",
    ):
        assert locate(name) == catalog.find(name) == path
    assert server.requests == []


def test_a_refreshed_pull_fetches_a_newer_file(server: ModelServer) -> None:
    path = catalog.pull(NAME)
    catalog.pull(NAME, refresh=True)
    assert len(server.fetched()) == 1
    server.repositories["tiny/Tiny-GGUF"]["tiny-Q4_0.gguf"] = b"GGUF newer"
    assert catalog.pull(NAME) == path and path.stat().st_size == 3_000_004
    assert catalog.pull(NAME, refresh=True).read_bytes() == b"GGUF newer"


def test_a_refreshed_pull_without_a_network_keeps_the_file(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    path = catalog.pull(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert catalog.pull(NAME, refresh=True) == path
    with pytest.raises(
        UserError, match=r"cannot fetch `tiny/Tiny-GGUF`: the hub is out of reach \(Connection refused\)"
    ):
        catalog.pull("tiny/Tiny-GGUF:Q8_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert catalog.pull(NAME, refresh=True) == path
    with pytest.raises(UserError, match="offline mode"):
        catalog.pull("tiny/Tiny-GGUF:Q8_0")


def test_a_file_that_was_damaged_on_disk_is_fetched_again(server: ModelServer) -> None:
    path = catalog.pull(NAME)
    path.write_bytes(b"GGUF" + b"x" * 3_000_000)
    assert catalog.pull(NAME).read_bytes() == content(server, "tiny-Q4_0.gguf")
    dates = path.stat()
    path.write_bytes(b"GGUF" + b"x" * 3_000_000)
    os.utime(path, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    assert catalog.pull(NAME, verify=True).read_bytes() == content(server, "tiny-Q4_0.gguf")


def test_a_pull_that_breaks_off_is_continued(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "MAX_FAILURES", 0)
    server.cuts = [1_000_000, 0]
    with pytest.raises(UserError, match=f"cannot fetch `{NAME}`: .*; pull again to continue"):
        catalog.pull(NAME)
    assert catalog.find(NAME) is None
    assert catalog.pull(NAME).read_bytes() == content(server, "tiny-Q4_0.gguf")
    assert server.fetched()[-1] == "bytes=1000000-"


def test_a_part_of_an_older_version_is_dropped(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "MAX_FAILURES", 0)
    server.cuts = [1_000_000, 0]
    with pytest.raises(UserError, match="pull again"):
        catalog.pull(NAME)
    server.repositories["tiny/Tiny-GGUF"]["tiny-Q4_0.gguf"] = newer = b"GGUF" + b"n" * 2_000_000
    server.requests.clear()
    assert catalog.pull(NAME).read_bytes() == newer
    assert server.fetched() == [""]


def test_a_file_with_another_hash_than_the_hub_states_is_refused(server: ModelServer) -> None:
    server.stated["tiny-Q4_0.gguf"] = "0" * 64
    with pytest.raises(UserError, match="has the wrong hash"):
        catalog.pull(NAME)
    assert catalog.find(NAME) is None
    assert catalog.pulled() == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tiny/Tiny-GGUF:IQ2_XS", "quantised as IQ2_XS, which Outrider cannot read: pick `tiny/Tiny-GGUF:F16` or"),
        ("tiny/Tiny-GGUF:F32", "is split into 2 files, of which `tiny-F32-00002-of-00002.gguf` is missing"),
        (
            "tiny/Tiny-GGUF:Q6_K",
            "no file of the quantisation `Q6_K`: pick `tiny/Tiny-GGUF:F16` or .*`tiny/Tiny-GGUF:Q8_0`",
        ),
        ("tiny/Nothing:Q4_0", "the hub has no model of that name"),
        ("tiny/Tiny-GGUF:../../x.gguf", "the catalog has no model"),
        ("http://127.0.0.1:9/x.gguf", "Connection refused"),
    ],
)
def test_a_name_that_cannot_be_pulled(name: str, problem: str, server: ModelServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem):
        catalog.pull(name)
    assert server.fetched() == []
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file() and file.name != "lock"] == []


def test_a_hub_that_names_files_outside_of_the_repository(server: ModelServer, tmp_path: Path) -> None:
    server.repositories["tiny/Evil"] = {"../../../evil-Q4_0.gguf": b"GGUF", "/tmp/evil-Q8_0.gguf": b"GGUF"}
    for tag in ("Q4_0", "Q8_0"):
        with pytest.raises(UserError, match="has no GGUF file"):
            catalog.pull(f"tiny/Evil:{tag}")
    assert list(tmp_path.rglob("evil*")) == []


def test_several_pulls_at_once_download_once(server: ModelServer) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(catalog.pull(NAME))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4 and len(set(paths)) == 1
    assert server.fetched() == [""]


def test_the_token_of_the_hub_is_sent(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.token = "secret"
    with pytest.raises(UserError, match="log in with `hf auth login`"):
        catalog.pull(NAME)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert catalog.pull(NAME).is_file()


def test_a_repository_of_gguf_files_without_a_quantisation(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    path = catalog.pull("tiny/Tiny-GGUF")
    assert path.name == "tiny-Q8_0.gguf"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate("tiny/Tiny-GGUF") == path
    assert [model.name for model in catalog.pulled()] == ["tiny/Tiny-GGUF"]


def test_all_parts_of_a_split_model_are_pulled_listed_and_removed_as_one(server: ModelServer, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    name = "tiny/Tiny-GGUF:F16"
    path = catalog.pull(name, progress=lambda *news: seen.append(news))
    second = path.with_name("tiny-F16-00002-of-00002.gguf")
    assert path.name == "tiny-F16-00001-of-00002.gguf"
    assert second.read_bytes() == content(server, second.name)
    assert seen[-1] == (808, 808, name)
    (model,) = catalog.pulled()
    assert (model.name, model.path, model.bytes) == (name, path, 808)
    assert catalog.find(name) == path and catalog.file_bytes(path) == 808
    server.requests.clear()
    second.write_bytes(b"GGUF damaged")
    assert catalog.pull(name) == path
    assert second.read_bytes() == content(server, second.name) and server.fetched() == [""]
    assert catalog.remove(name) >= 808
    assert catalog.pulled() == [] and list((tmp_path / "cache" / "hub").rglob("*.gguf")) == []


OLD = "89abcdef" * 5


def test_a_revision_of_a_quantisation_is_a_model_of_its_own(server: ModelServer, tmp_path: Path) -> None:
    server.revisions["v1"] = OLD
    server.repositories[f"tiny/Tiny-GGUF@{OLD}"] = {"tiny-Q4_0.gguf": b"GGUF" + b"old" * 1000}
    path = catalog.pull("tiny/Tiny-GGUF@v1:Q4_0")
    assert path == tmp_path / "cache" / "hub" / "tiny" / "Tiny-GGUF@v1" / "tiny-Q4_0.gguf"
    assert path.read_bytes().endswith(b"oldold") and cache.read_record(path)["revision"] == OLD
    newest = catalog.pull(NAME)
    assert newest.read_bytes() == content(server, "tiny-Q4_0.gguf")
    server.requests.clear()
    assert catalog.find("tiny/Tiny-GGUF@v1:Q4_0") == locate("tiny/Tiny-GGUF@v1:Q4_0") == path
    assert not server.requests
    assert {model.name for model in catalog.pulled()} == {NAME, "tiny/Tiny-GGUF@v1:Q4_0"}
    assert catalog.remove("tiny/Tiny-GGUF@v1:Q4_0") > 3000
    assert newest.exists() and not path.exists()
    with pytest.raises(UserError, match="the hub has no model of that name and revision"):
        catalog.pull("tiny/Tiny-GGUF@v9:Q4_0")


def test_a_revision_of_a_folder_is_read_beside_others(server: ModelServer) -> None:
    server.revisions["v1"] = OLD
    server.repositories["tiny/Folder"] = folder_files()
    server.repositories[f"tiny/Folder@{OLD}"] = folder_files() | {"model.safetensors": b"earlier" * 1000}
    newest, old = catalog.pull("tiny/Folder"), catalog.pull("tiny/Folder@v1")
    assert old.name == OLD and (old / "model.safetensors").read_bytes() == b"earlier" * 1000
    assert (newest / "model.safetensors").read_bytes() == b"weights" * 1000
    for name in ("tiny/Folder@v1", f"tiny/Folder@{OLD}"):
        assert catalog.find(name) == old
    assert catalog.pull_hub("tiny/Folder@v1") == old == locate("tiny/Folder@v1", kind="draft head")
    assert catalog.remove("tiny/Folder@v1") >= 7000
    assert catalog.find("tiny/Folder@v1") is None and catalog.find("tiny/Folder") == newest


def test_a_full_disk_is_an_error_of_the_user(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    for name in (NAME, f"{server.url}/files/mine-Q5_0.gguf", "tiny/Folder"):
        server.repositories["tiny/Folder"] = folder_files()
        with pytest.raises(UserError, match=r"needs .* MB on the disk of .*, which has 0 MB free"):
            catalog.pull(name)
    assert catalog.pulled() == []


# ---- URLs ----


def test_a_url_is_pulled_and_used_by_its_name(server: ModelServer, tmp_path: Path) -> None:
    url = f"{server.url}/files/mine-Q5_0.gguf"
    path = catalog.pull(url)
    assert path.read_bytes() == server.files["/files/mine-Q5_0.gguf"]
    assert path.is_relative_to(tmp_path / "cache" / "urls") and path.name == "mine-Q5_0.gguf"
    assert cache.read_record(path)["sha256"] == sha256(path.read_bytes())
    assert locate(url) == path
    assert len(server.fetched()) == 1
    (model,) = catalog.pulled()
    assert (model.name, model.quantization, model.bytes) == (url, "Q5_0", 1004)
    catalog.remove(url)
    assert catalog.find(url) is None and catalog.pulled() == []


def test_a_password_in_a_url_is_sent_but_not_stored(server: ModelServer, tmp_path: Path) -> None:
    url = f"{server.url}/files/mine-Q5_0.gguf".replace("http://", "http://me:pass@")
    catalog.pull(url)
    assert server.tokens == ["Basic bWU6cGFzcw=="]
    stored = [file.read_bytes() for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert not any(b"pass" in each for each in stored)


def test_a_missing_file_of_a_url(server: ModelServer) -> None:
    with pytest.raises(UserError, match=r"the server answers 404 .*: check the address"):
        catalog.pull(f"{server.url}/none.gguf")


# ---- folders of the hub ----


def folder_files() -> dict[str, bytes]:
    return {
        "config.json": json.dumps({"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": b"weights" * 1000,
        "model-Q4_0.gguf": b"GGUF unwanted",
        "onnx/model.onnx": b"unwanted",
    }


def test_a_folder_of_safetensors(server: ModelServer, tmp_path: Path) -> None:
    server.repositories["tiny/Folder"] = folder_files()
    seen: list[tuple[int, int, str]] = []
    path = catalog.pull("tiny/Folder", progress=lambda *news: seen.append(news))
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert path.is_relative_to(tmp_path / "hub-cache")
    assert catalog.find("tiny/Folder") == locate("tiny/Folder") == path
    (model,) = catalog.pulled()
    assert (model.name, model.format, model.quantization, model.bytes) == (
        "tiny/Folder",
        "safetensors",
        "bfloat16",
        7000,
    )
    total = sum(len(each) for file, each in folder_files().items() if file.endswith((".json", ".safetensors")))
    assert seen[-1] == (7000, total, "tiny/Folder")
    assert catalog.remove("tiny/Folder") >= 7000
    assert catalog.find("tiny/Folder") is None and catalog.pulled() == []
    assert not path.parents[1].exists() and list((tmp_path / "cache" / "hub").rglob("*")) == []


def test_an_interrupted_pull_of_a_folder_ends_at_once_and_is_continued(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    server.repositories["tiny/Folder"] = folder_files() | {"model.safetensors": b"weights" * 1_000_000}
    server.delay = 0.05  # 5 seconds for the file

    def interrupt(done: int, total: int, label: str) -> None:
        if done > 200_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        catalog.pull("tiny/Folder", progress=interrupt)
    assert catalog.find("tiny/Folder") is None
    server.delay = 0.0
    assert (catalog.pull("tiny/Folder") / "model.safetensors").stat().st_size == 7_000_000
    assert server.fetched("model.safetensors")[-1].startswith("bytes=")  # it had not been downloaded whole


def test_a_damaged_folder_is_found_by_verify(server: ModelServer) -> None:
    server.repositories["tiny/Folder"] = folder_files()
    weights = catalog.pull("tiny/Folder") / "model.safetensors"
    weights.resolve().write_bytes(b"damaged" * 1000)
    assert (catalog.pull("tiny/Folder") / "model.safetensors").read_bytes() == b"damaged" * 1000
    assert (catalog.pull("tiny/Folder", verify=True) / "model.safetensors").read_bytes() == b"weights" * 1000


def test_a_folder_with_a_wrong_hash_is_refused(server: ModelServer) -> None:
    server.repositories["tiny/Folder"] = folder_files()
    catalog.pull("tiny/Folder")
    server.repositories["tiny/Folder"]["model.safetensors"] = b"changed on the way"
    server.commit, server.stated["model.safetensors"] = "f" * 40, "0" * 64
    with pytest.raises(UserError, match="`tiny/Folder` has the wrong hash"):
        catalog.pull("tiny/Folder")
    with pytest.raises(UserError, match="`tiny/Folder` has the wrong hash"):
        catalog.pull("tiny/Folder")


def test_models_of_other_kinds_in_the_hubs_cache_are_not_listed(server: ModelServer) -> None:
    files = folder_files() | {"config.json": b'{"architectures": ["BertModel"]}'}
    server.repositories["tiny/Bert"] = files
    catalog.pull("tiny/Bert")
    assert catalog.pulled() == []


def test_the_listed_architectures_are_those_that_run() -> None:
    known = {architecture.class_name for architecture in architectures.ARCHITECTURES.values()}
    texts = {f"{name}ForConditionalGeneration" for name in ("Gemma3", "Qwen3_5", "Qwen3_5Moe")}  # their text models run
    assert set(ARCHITECTURES) == known | texts


# ---- removal ----


def test_removal_frees_one_file_and_keeps_the_others(server: ModelServer, tmp_path: Path) -> None:
    other = catalog.pull("tiny/Tiny-GGUF:Q8_0")
    path = catalog.pull(NAME)
    assert catalog.remove(NAME) >= 3_000_004
    assert not path.exists() and other.is_file()
    catalog.remove("tiny/Tiny-GGUF:Q8_0")
    assert not other.parent.exists()
    assert catalog.pull(NAME).is_file()


@pytest.mark.parametrize(
    "name", ["nothing", NAME, "tiny/Tiny-GGUF", "smollm2-135m", "https://host/x.gguf", "../cache", "./x", "/etc", "."]
)
def test_what_is_not_in_the_cache_is_not_removed(name: str, server: ModelServer, tmp_path: Path) -> None:
    (tmp_path / "cache" / "models").mkdir(parents=True)
    kept = catalog.pull("tiny/Tiny-GGUF:Q8_0")
    with pytest.raises(UserError, match="is not in the cache, nothing was removed"):
        catalog.remove(name)
    assert kept.is_file()


def test_a_link_out_of_the_cache_is_not_followed(server: ModelServer, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"precious")
    (tmp_path / "cache" / "models").mkdir(parents=True)
    (tmp_path / "cache" / "models" / "smollm2-135m").symlink_to(outside)
    with pytest.raises(UserError, match=r"is a link to .*outside of the cache"):
        catalog.remove("smollm2-135m")
    path = catalog.pull(NAME)
    path.unlink()
    path.symlink_to(outside / "SmolLM2-135M-Instruct.Q4_1.gguf")
    catalog.remove(NAME)
    assert (outside / "SmolLM2-135M-Instruct.Q4_1.gguf").read_bytes() == b"precious"


def test_what_an_interrupted_pull_left_can_be_removed(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "MAX_FAILURES", 0)
    for name in (NAME, f"{server.url}/files/mine-Q5_0.gguf"):
        server.cuts = [500, 0]
        with pytest.raises(UserError, match="pull again"):
            catalog.pull(name)
        assert catalog.remove(name) >= 500
    assert list((tmp_path / "cache").rglob("*")) == []


def test_a_model_that_is_being_pulled_is_not_removed(server: ModelServer) -> None:
    path = catalog.pull(NAME)
    with cache.lock(path.parent), pytest.raises(UserError, match="is being pulled now"):
        catalog.remove(NAME)
    assert path.is_file()


def test_a_lock_that_was_removed_while_another_waited_still_excludes(tmp_path: Path) -> None:
    waits, holds, done = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        with cache.lock(tmp_path, lambda *_: waits.set(), "tiny"):
            holds.set()
            done.wait(10)

    with cache.lock(tmp_path):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert waits.wait(10)
        (tmp_path / "lock").unlink()
    assert holds.wait(10)
    with pytest.raises(BlockingIOError), cache.lock(tmp_path):
        pass
    done.set()
    waiting.join()


# ---- models of the catalog ----


def test_a_catalog_model_without_a_known_hash_takes_the_hubs(server: ModelServer) -> None:
    entries = {"tiny": catalog.CatalogEntry("tiny-Q4_0.gguf", 3_000_000, repository="tiny/Tiny-GGUF", license="MIT")}
    path = catalog.pull("tiny", entries=entries)
    record = cache.read_record(path)
    assert record["sha256"] == sha256(content(server, "tiny-Q4_0.gguf"))
    assert (record["source"], record["license"]) == ("hub:tiny/Tiny-GGUF", "MIT")
    server.requests.clear()
    assert catalog.pull("tiny", entries=entries) == path
    assert server.requests == []


def test_a_catalog_model_that_the_hub_replaced_is_refused(server: ModelServer) -> None:
    entry = catalog.CatalogEntry("tiny-Q4_0.gguf", 3_000_004, "0" * 64, repository="tiny/Tiny-GGUF")
    with pytest.raises(UserError, match="has another hash than the catalog"):
        catalog.pull("tiny", entries={"tiny": entry})
    gone = catalog.CatalogEntry("gone.gguf", 1, repository="tiny/Tiny-GGUF")
    with pytest.raises(UserError, match=r"cannot pull `tiny`: .* no longer has the file `gone\.gguf`"):
        catalog.pull("tiny", entries={"tiny": gone})


@pytest.mark.parametrize("name", catalog.CATALOG)
def test_every_entry_says_what_a_user_needs_to_know(name: str) -> None:
    entry = catalog.CATALOG[name]
    assert entry.title and entry.parameters and entry.license and entry.size > 50_000_000
    assert entry.repository or entry.parts
    assert bool(entry.sha256) == (len(entry.sha256) == 64)
    assert not entry.parts or entry.sha256, "wheels are other people's: only a hash makes them a mirror"
    assert pulling.choose_file("o/x", [entry.file], entry.file) == entry.file
