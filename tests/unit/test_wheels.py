"""`make wheel` builds for each ABI and architecture once, and says what it needs. tests/slow builds one."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

import build_wheels
from build_wheels import BuildError, Interpreter, interpreters, targets

HERE = platform.machine()
OTHER = next(name for name in build_wheels.ARCHITECTURES if name != HERE)


def test_the_stable_abi_serves_python_3_12_and_later(monkeypatch) -> None:
    versions = {"a": (3, 13), "b": (3, 11), "c": (3, 12), "d": (3, 11)}
    monkeypatch.setattr(build_wheels, "python_version", versions.get)
    assert [(each.command, each.abi) for each in interpreters(list("abcd"))] == [("a", "cp312-abi3"), ("b", "cp311")]


def test_a_python_that_does_not_run_is_refused_only_if_it_was_asked_for(monkeypatch, capsys, tmp_path: Path) -> None:
    missing = str(tmp_path / "python3.11")
    with pytest.raises(BuildError, match=r"`.*python3.11` is not a Python that runs: pass another `--python`"):
        interpreters([missing])
    monkeypatch.setattr(build_wheels, "PYTHONS", (missing,))
    (own,) = interpreters([])  # the one that runs this test
    (other,) = (served for abi, served in build_wheels.ABIS.items() if abi != own.abi)
    assert f"not built for {other}: it is not on the PATH; pass `--python`" in capsys.readouterr().out


def test_an_architecture_without_a_compiler_is_refused_only_if_it_was_asked_for(monkeypatch, capsys) -> None:
    monkeypatch.setattr(build_wheels, "compiler", lambda name: "g++" if name == HERE else None)
    package = f"g++-{OTHER.replace('_', '-')}-linux-gnu"
    with pytest.raises(BuildError, match=rf"no C\+\+ compiler for {OTHER} is installed: run `apt install .*`"):
        targets([OTHER])
    assert targets([]) == {HERE: "g++"}
    assert package in capsys.readouterr().out


def test_a_cross_compiler_is_found_with_and_without_a_version(monkeypatch) -> None:
    monkeypatch.setattr(build_wheels.shutil, "which", lambda name: f"/bin/{name}" if name.endswith("g++-12") else None)
    assert build_wheels.compiler(OTHER) == f"/bin/{OTHER}-linux-gnu-g++-12"


def test_a_cross_built_module_has_the_name_that_its_python_imports() -> None:
    settings, variables = build_wheels.cross_settings("x86_64", Interpreter("python3.11", (3, 11)))
    assert "CMAKE_SYSTEM_PROCESSOR=x86_64" in settings
    assert variables["SETUPTOOLS_EXT_SUFFIX"] == ".cpython-311-x86_64-linux-gnu.so"


def test_a_failed_build_shows_the_output_of_the_command() -> None:
    with pytest.raises(BuildError, match=r"(?s)no such header.*`python3 -c .* failed: see above"):
        build_wheels.run(["python3", "-c", "print('no such header'); raise SystemExit(1)"], {})
