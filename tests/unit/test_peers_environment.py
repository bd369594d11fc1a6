"""Environments of peers are made once for each recipe, and a failure has a reason."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.peers import environment, registry
from outrider.bench.peers.registry import Peer, PipStep, llama_build, processor_flags
from outrider.bench.peers.worker import WORKERS
from outrider.errors import UserError


def wheel(folder: Path, name: str, requires: tuple[str, ...] = ()) -> None:
    """Write a package that contains one number."""
    stem = f"{name}-1.0"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    files = {
        f"{name}.py": "number = 7\n",
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{stem}.dist-info/RECORD"] = "".join(f"{each},,\n" for each in files)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which pip finds packages."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def quick_venv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Link our own pip into new environments: to install it there takes seconds."""
    run = environment.run_logged

    def run_quickly(command: list[str], *arguments: Any) -> None:
        if "venv" not in command:
            run(command, *arguments)
            return
        run([*command[:3], "--without-pip", *command[3:]], *arguments)
        (packages,) = Path(command[3]).glob("lib/python*/site-packages")
        (packages / "pip").symlink_to(Path(pip.__file__).parent)

    pip = pytest.importorskip("pip")
    monkeypatch.setattr(environment, "run_logged", run_quickly)


def peer(*steps: PipStep) -> Peer:
    return Peer("engine", "given", steps)


def has(python: Path, name: str) -> bool:
    return subprocess.run([str(python), "-c", f"import {name}"], capture_output=True).returncode == 0


def test_an_environment_is_made_once_and_leaves_out_broken_requirements(shelf: Path, quick_venv: None) -> None:
    wheel(shelf, "engine", ("helper", "breaks>=0.1", 'elsewhere; sys_platform == "nowhere"', 'more; extra == "more"'))
    wheel(shelf, "helper")
    wheel(shelf, "breaks")
    steps = (PipStep(("engine==1.0",), dependencies=False), PipStep(rest_of="engine", without=("breaks",)))
    messages: list[str] = []
    python = environment.install(peer(*steps), messages.append)
    assert [has(python, name) for name in ("engine", "helper", "breaks")] == [True, True, False]
    assert len(messages) == 1 and messages[0].startswith("setting up engine in ")
    assert environment.install(peer(*steps), messages.append) == python and len(messages) == 1
    trace = python.parent.parent / "trace"
    trace.write_text("")
    environment.install(peer(PipStep(("breaks",))), messages.append)  # another recipe
    assert len(messages) == 2 and not trace.exists()
    assert [has(python, name) for name in ("engine", "breaks")] == [False, True]


def test_a_failed_installation_has_a_reason_and_is_tried_again(shelf: Path, quick_venv: None) -> None:
    with pytest.raises(environment.CannotInstallError) as caught:
        environment.install(peer(PipStep(("no-such-engine==1.0",))), print)
    assert "no-such-engine==1.0" in str(caught.value) and "setup.log`" in str(caught.value)
    assert not (environment.folder_of(peer()) / "venv" / environment.MARK).exists()  # and is tried again next time


def test_nothing_is_compiled_without_a_compiler(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(shelf))
    with pytest.raises(environment.CannotInstallError, match="there is no C\\+\\+ compiler: install one"):
        environment.install(peer(PipStep(("engine",), compiled=True)), print)
    assert not environment.folder_of(peer()).exists()


def test_an_unwritable_cache_is_a_user_error(shelf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot write `.*file"):
        environment.install(peer(PipStep(("engine",))), print)


def test_requirements_do_not_replace_the_installed_torch(tmp_path: Path) -> None:
    (tmp_path / "venv/lib/python3/site-packages/torch-2.13.0+cpu.dist-info").mkdir(parents=True)
    assert environment.torch_constraint(tmp_path / "venv", tmp_path).read_text() == "torch==2.13.0+cpu\n"
    assert environment.torch_constraint(tmp_path, tmp_path).read_text() == ""


def test_the_reason_is_pips_first_error() -> None:
    assert environment.reason(["Collecting x", "ERROR: No wheel for this machine.", "ERROR: see the log"]) == (
        "No wheel for this machine"
    )
    assert environment.reason(["Collecting x", "Killed", ""]) == "Killed"
    assert environment.reason([]) == "pip failed without a message"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, set[str]], str]:
    def build(name: str, flags: set[str]) -> str:
        monkeypatch.setattr("platform.machine", lambda: name)
        monkeypatch.setattr(registry, "processor_flags", lambda: flags)
        return llama_build()["CMAKE_ARGS"]

    return build


def test_llama_is_compiled_for_the_processor_but_without_amx(machine: Callable[[str, set[str]], str]) -> None:
    wide = {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"}
    built = machine("x86_64", wide | {"avx2", "avx512_vnni", "amx_tile", "amx_int8"})
    for option in ("AVX512=ON", "AVX512_VNNI=ON", "AVX512_BF16=OFF", "AVX2=ON", "NATIVE=OFF", "AMX_INT8=OFF"):
        assert f"-DGGML_{option}" in built.split()
    assert "-DGGML_AVX512=OFF" in machine("x86_64", wide - {"avx512vl"}).split()
    arm = machine("aarch64", set())
    assert "-DGGML_NATIVE=ON" in arm and "AMX" not in arm and "AVX" not in arm


def test_flags_are_read_from_the_first_processor(tmp_path: Path) -> None:
    source = tmp_path / "cpuinfo"
    source.write_text("processor : 0\nflags\t\t: fpu avx2 fma\nprocessor : 1\nflags : other\n")
    assert processor_flags(source) == {"fpu", "avx2", "fma"}
    assert processor_flags(tmp_path / "none") == set()


def test_peers_are_chosen_by_name() -> None:
    assert [one.name for one in registry.choose([])] == ["llama.cpp", "openvino", "transformers", "vllm"]
    assert [one.name for one in registry.choose(["vllm", "llama.cpp"])] == ["llama.cpp", "vllm"]
    with pytest.raises(UserError, match=r"no peer called `llama`: expected one of llama\.cpp, openvino"):
        registry.choose(["llama"])


def test_every_peer_has_a_worker_and_a_recipe() -> None:
    for one in registry.PEERS:
        assert one.name in WORKERS
        assert (
            one.recipe
            and one.speculation
            and environment.recipe_text(one) != environment.recipe_text(replace(one, recipe=()))
        )
