"""Hub models with safetensors: folders in the cache of huggingface_hub, which other programs share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from ..errors import UserError
from ..types import Progress, unwatched
from .cache import check_free_space, digest, hub_path, lock
from .download import part_files
from .hub import HubUnreachableError, Repository, fetch_file, read_repository
from .names import MAIN, split_revision

PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer*")  # of files that a model consists of
NO_FOLDERS = ("*/*",)


def hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repository_folder(name: str) -> Path:
    """Return the folder of a repository, with all its revisions, in the cache of huggingface_hub."""
    return hub_cache() / f"models--{split_revision(name)[0].replace('/', '--')}"


def find_folder(name: str) -> Path | None:
    """Return the snapshot of a hub model that was downloaded completely; None if there is none."""
    folder, revision = repository_folder(name), split_revision(name)[1]
    try:
        commit = (folder / "refs" / (revision or MAIN)).read_text().strip()
    except OSError:
        commit = revision  # it may be one
    if not commit:
        return None
    snapshot = folder / "snapshots" / commit
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
    name: str,
    repository: Repository | None,
    also: Sequence[str] = (),
    progress: Progress = unwatched,
    verify: bool = False,
) -> Path:
    """Download the files of a hub model; without `repository`, the hub is out of reach: use what is in its cache.

    Large files are downloaded here, because huggingface_hub does not continue them after an interruption, and compares
    sizes alone. It takes them over as blobs, whose names are their hashes.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = [*PATTERNS, *also]
    base, revision = split_revision(name)
    try:
        if repository is not None:
            if verify:
                _drop_damaged_files(repository, progress)
            _fetch_large_files(repository, patterns, progress)
        with _quiet_bars():
            return Path(
                snapshot_download(
                    base,
                    revision=revision or None,
                    allow_patterns=patterns,
                    ignore_patterns=list(NO_FOLDERS),
                    local_files_only=repository is None,
                    endpoint=constants.ENDPOINT,
                )
            )
    except UserError:
        raise
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


def _fetch_large_files(repository: Repository, patterns: Sequence[str], progress: Progress) -> None:
    """Download the files whose hash the hub states into the blobs of its cache, except those that are there."""
    missing = _missing(repository, patterns)
    if not missing:
        return
    blobs = repository_folder(repository.name) / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    with lock(hub_path(repository.name), progress, repository.name):
        large = {file: known for file in missing if (known := repository.files[file]).sha256}
        total = sum(repository.files[file].size for file in missing)
        here = sum(_arrived(blobs / known.sha256) for known in large.values())
        check_free_space(blobs, max(total - here, 0), f"`{repository.name}`")
        done = 0
        for file, known in large.items():
            if not (blobs / known.sha256).is_file():
                fetch_file(repository, file, blobs / known.sha256, after(progress, done, total), repository.name)
            done += known.size


def _drop_damaged_files(repository: Repository, progress: Progress) -> None:
    """Remove the blobs that do not have the hash in their name, so that they are fetched again."""
    blobs = repository_folder(repository.name) / "blobs"
    for file, known in repository.files.items():
        blob = blobs / known.sha256
        if known.sha256 and blob.is_file() and digest(blob, progress, f"checking {file}") != known.sha256:
            blob.unlink()


def _arrived(blob: Path) -> int:
    """Return the bytes of a blob that are on disk, complete or not."""
    return max(file.stat().st_size if file.is_file() else 0 for file in (blob, part_files(blob)[0]))


def after(progress: Progress, before: int, total: int) -> Progress:
    """Report the bytes of one file as part of the total."""

    def report(done: int, size: int, label: str) -> None:
        progress(min(before + done, total), total, label)

    return report


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


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
