"""Hub models with safetensors: folders in the cache of huggingface_hub, which other programs share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from ..errors import UserError
from ..types import Progress, unwatched
from .cache import check_free_space, digest
from .hub import HubUnreachableError, Repository, read_repository

PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer*")  # of files that a model consists of
NO_FOLDERS = ("*/*",)
POLL_SECONDS = 0.1


def hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repository_folder(name: str) -> Path:
    """Return the folder of a repository in the cache of huggingface_hub."""
    return hub_cache() / f"models--{name.replace('/', '--')}"


def find_folder(name: str) -> Path | None:
    """Return the snapshot of a hub model that was downloaded completely; None if there is none."""
    folder = repository_folder(name)
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / revision
    has_weights = any(file.exists() for file in snapshot.glob("*.safetensors"))
    return snapshot if has_weights and (snapshot / "config.json").is_file() else None


def pull_hub(name: str, also: Sequence[str] = (), progress: Progress = unwatched) -> Path:
    """Download a model or a head from the hub into its cache. `also` names further files."""
    try:
        repository = read_repository(name)
    except HubUnreachableError:
        repository = None
    return pull_folder(name, repository, also, progress)


def pull_folder(
    name: str, repository: Repository | None, also: Sequence[str] = (), progress: Progress = unwatched
) -> Path:
    """Download the files of a hub model; without `repository`, the hub is out of reach: use what is in its cache."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = [*PATTERNS, *also]

    def snapshot() -> Path:
        return Path(
            snapshot_download(
                name,
                allow_patterns=patterns,
                ignore_patterns=list(NO_FOLDERS),
                local_files_only=repository is None,
                endpoint=constants.ENDPOINT,
            )
        )

    try:
        if repository is None:
            return snapshot()
        missing = _missing(repository, patterns)
        total = sum(repository.files[file].size for file in missing)
        if missing:
            hub_cache().mkdir(parents=True, exist_ok=True)
            check_free_space(hub_cache(), total, f"`{name}`")
        with _quiet_bars(), ThreadPoolExecutor(1) as pool:
            running = pool.submit(snapshot)
            before = _bytes_of(name)
            while not running.done():
                progress(min(max(_bytes_of(name) - before, 0), total), total, name)
                time.sleep(POLL_SECONDS)
            folder = running.result()
        _check_hashes(repository, folder, missing, progress)
        return folder
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


def _missing(repository: Repository, patterns: Sequence[str]) -> list[str]:
    """Return the files of a model that are not in the cache of huggingface_hub."""
    wanted = (file for file in repository.files if "/" not in file and any(fnmatch(file, each) for each in patterns))
    snapshot = repository_folder(repository.name) / "snapshots" / repository.revision
    return [file for file in wanted if not (snapshot / file).exists()]


@contextmanager
def _quiet_bars() -> Iterator[None]:
    """Hide the progress bars of huggingface_hub, because the caller shows one."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    if shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


def _bytes_of(name: str) -> int:
    total = 0
    for file in (repository_folder(name) / "blobs").glob("*"):
        try:
            total += file.stat().st_size
        except OSError:  # it was renamed meanwhile
            continue
    return total


def _check_hashes(repository: Repository, folder: Path, files: Sequence[str], progress: Progress) -> None:
    """Compare the files that were downloaded now with the hub's hashes; huggingface_hub compares sizes alone."""
    for file in files:
        expected = repository.files[file].sha256
        if expected and digest(folder / file, progress, f"checking {file}") != expected:
            (folder / file).resolve().unlink(missing_ok=True)
            (folder / file).unlink(missing_ok=True)
            raise UserError(f"what was fetched for `{repository.name}` has the wrong hash, in `{file}`: pull it again")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
