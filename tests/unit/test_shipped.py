"""Heads that ship: found for their model without a path, checked, and never for another model."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
import tiny_heads
import tiny_modules
from outrider import LLM, SamplingParams, catalog
from outrider.catalog import shipped
from refusals import refusal

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of the catalog, in the cache: `tiny`."""
    content = tiny.gguf("llama")
    entry = catalog.CatalogEntry("tiny.gguf", len(content), hashlib.sha256(content).hexdigest(), ())
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(catalog.CATALOG, "tiny", entry)
    path = catalog.path("tiny")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def heads(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What ships: an EAGLE-3 head, modules and a draft model, which is the target itself."""
    folder = tmp_path / "heads"
    monkeypatch.setattr(shipped, "FOLDER", folder)
    tiny_heads.write(tiny_heads.Plan(), folder / "tiny" / "eagle3", "speculators")
    tiny_modules.mtp(tiny_modules.ModulePlan(), folder / "tiny" / "mtp", "qwen")
    (folder / "tiny" / "draft_model").mkdir()
    shutil.copy(target, folder / "tiny" / "draft_model" / "model.gguf")
    (folder / "tiny" / "draft_model" / "card.json").write_text("{}")
    shipped.write_index(folder)
    return folder


def load(model: str | Path, speculate: str) -> LLM:
    return LLM(str(model), backend="reference", speculate=speculate)


def test_what_ships_is_found_by_name_and_by_file(heads: Path, target: Path, tmp_path: Path) -> None:
    assert shipped.find("tiny", "eagle3") == heads / "tiny" / "eagle3"
    assert shipped.find("tiny", "draft_model") == heads / "tiny" / "draft_model" / "model.gguf"
    assert shipped.find(target, "eagle3") == shipped.find(str(target), "eagle3") == heads / "tiny" / "eagle3"
    copied = shutil.copy(target, tmp_path / "mine.gguf")
    assert shipped.find(copied, "eagle3") == heads / "tiny" / "eagle3"
    linked = tmp_path / "link.gguf"
    linked.symlink_to(target)
    assert shipped.find(linked, "eagle3") == heads / "tiny" / "eagle3"


def test_nothing_is_found_for_others(heads: Path, target: Path, tmp_path: Path) -> None:
    changed = bytearray(target.read_bytes())
    changed[-40] ^= 1
    alike = tmp_path / "alike.gguf"
    alike.write_bytes(changed)
    sources = ("smollm2-135m", alike, tmp_path, "someone/model", "random/tiny", "x" * 5000, "", tmp_path / "nowhere")
    assert [shipped.find(source, "eagle3") for source in sources] == [None] * len(sources)
    assert shipped.find("tiny", "medusa") is None


def test_without_an_index_nothing_ships(heads: Path) -> None:
    (heads / "index.json").write_text('{"heads": []}')
    assert shipped.find("tiny", "eagle3") is None
    (heads / "index.json").unlink()
    assert shipped.find("tiny", "eagle3") is None
    shutil.rmtree(heads)
    assert shipped.find("tiny", "eagle3") is None


@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model"])
def test_speculation_needs_no_path(method: str, heads: Path) -> None:
    llm = load("tiny", f"{method}:adaptive=false")
    found = llm.generate([tiny.prompt(8)], PARAMS)[0]
    plain = load("tiny", "none").generate([tiny.prompt(8)], PARAMS)[0]
    assert found.completions[0].token_ids == plain.completions[0].token_ids
    assert llm.method_stats[method].drafted > 0
    if method == "draft_model":
        assert llm.method_stats[method].rates == [1.0] * 4


def test_a_head_of_the_users_own_comes_first(heads: Path, tmp_path: Path) -> None:
    tiny_heads.write(tiny_heads.Plan(), tmp_path / "own", "specforge")
    (heads / "tiny" / "eagle3" / "model.safetensors").unlink()  # no longer read
    assert load("tiny", f"eagle3:model={tmp_path / 'own'}").generate([tiny.prompt(8)], PARAMS)


def test_what_is_damaged_is_refused(heads: Path) -> None:
    file = heads / "tiny" / "eagle3" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert (
        refusal(lambda: load("tiny", "eagle3"))
        == f"`{file}`, which ships with outrider, is damaged: " + shipped.REINSTALL
    )
    file.write_bytes(content[:-1])
    assert "is damaged" in refusal(lambda: load("tiny", "eagle3"))
    file.unlink()
    assert "No such file or directory; install outrider again" in refusal(lambda: load("tiny", "eagle3"))
    for nonsense in ("{", "[]", '{"heads": [{"model": "tiny"}]}', '{"heads": 3}', '{"heads": [7]}'):
        (heads / "index.json").write_text(nonsense)
        assert "lists the heads that ship, is damaged" in refusal(lambda: load("tiny", "eagle3"))


def test_a_refusal_says_what_to_do(heads: Path, tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder()
    assert refusal(lambda: load(folder, "eagle3")) == (
        "`eagle3` needs a head: pass its folder as `model`, or train one with "
        f"`outrider train eagle3 --model {folder} --prompts prompts.jsonl --out heads`; "
        f"none for `{folder}` ships with outrider, only for `tiny`"
    )
    said = refusal(lambda: load("tiny", "medusa"))
    assert (
        "--model tiny --prompts prompts.jsonl --out heads`; none for `tiny` ships with outrider" in said
        and "only" not in said
    )
    assert "`outrider train peagle --model tiny " in refusal(lambda: load("tiny", "peagle"))
    assert "`draft_model` needs a model that drafts" in refusal(lambda: load(folder, "draft_model"))
    assert "has no modules" in refusal(lambda: load(folder, "mtp"))


def test_a_head_for_another_model_of_this_shape_is_announced(
    heads: Path, target: Path, tiny_folder: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = tmp_path / "own"
    tiny_heads.write(tiny_heads.Plan(), head, "specforge")

    def warned(model: str | Path, record: object) -> bool:
        (head / "card.json").write_text(json.dumps({"target": record}))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load(model, f"eagle3:model={head}")
        assert all("few of its draft tokens" in each.getMessage() for each in caplog.records)
        return bool(caplog.records)

    folder = tiny_folder()
    own = shipped.target_record("tiny", target)
    assert own == {"model": "tiny", "bytes": target.stat().st_size, "sha256": catalog.CATALOG["tiny"].sha256}
    assert not warned("tiny", own) and not warned(target, own)
    assert warned(folder, own)
    other = shipped.target_record(folder, folder)
    assert other["sha256"] == shipped.digest(folder) != own["sha256"]
    assert not warned(folder, other)
    assert warned("tiny", other) and warned(target, other)
    assert not any(warned("tiny", nothing) for nothing in (None, {}, "tiny", {"model": "x"}))


def test_the_index_of_this_package_is_sound() -> None:
    for entry in shipped.entries():
        assert shipped.find(entry.model, entry.method) is not None
        known = catalog.CATALOG[entry.model]
        assert (entry.target_bytes, entry.target_sha256) == (known.size, known.sha256)


def test_only_models_of_the_catalog_can_be_listed(heads: Path) -> None:
    (heads / "stranger" / "eagle3").mkdir(parents=True)
    assert "is not in the catalog" in refusal(lambda: shipped.write_index(heads))
