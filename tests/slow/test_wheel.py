"""A wheel installs into a clean environment without a compiler, and works there. Builds one for this Python."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import build_wheels

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 80 * 10**6  # the package index takes 100 MB; the heads are 45 MB


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (interpreter,) = build_wheels.interpreters([sys.executable])
    (cxx,) = build_wheels.targets([platform.machine()]).values()
    return build_wheels.build(interpreter, platform.machine(), cxx, tmp_path_factory.mktemp("dist"))


def test_a_wheel_holds_every_file_of_the_package_once(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "src/outrider"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = zipfile.ZipFile(wheel).namelist()
    missing = {line.removeprefix("src/") for line in listed.stdout.splitlines()} - set(names)
    assert not missing
    assert len([name for name in names if name.endswith(".so")]) == 1
    assert not [name for name in names if name.startswith(("tests/", "csrc/")) or "__pycache__" in name]
    assert wheel.stat().st_size < MAX_BYTES


def test_a_wheel_has_a_manylinux_tag(wheel: Path) -> None:
    assert "-manylinux_2_" in wheel.name and wheel.name.endswith(f"_{platform.machine()}.whl")


def test_a_wheel_works_in_an_environment_without_a_compiler(
    wheel: Path, tmp_path: Path, tiny_folder: Callable[..., Path]
) -> None:
    folder = tmp_path / "clean"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables |= {"PATH": str(folder / "bin"), "OUTRIDER_CACHE": str(tmp_path / "cache")}

    def run(*command: object) -> str:
        done = subprocess.run(
            [folder / "bin" / str(command[0]), *map(str, command[1:])],
            env=variables,
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    pip = ("python", "-m", "pip", "install", "-q", "--only-binary", ":all:")
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    run(*pip, torch)
    run(*pip, wheel)
    assert "instruction set" in run("outrider", "doctor")
    common = (
        "outrider",
        "generate",
        "--model",
        tiny_folder(),
        "--raw",
        "--max-tokens",
        8,
        "--temperature",
        0,
        "the sea",
    )
    plain, drafted = run(*common, "--speculate", "none"), run(*common, "--speculate", "ngram")
    assert plain.splitlines()[0] == drafted.splitlines()[0]
