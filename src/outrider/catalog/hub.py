"""The Hugging Face hub: what a repository holds, and one GGUF file of it.

huggingface_hub's settings apply: HF_ENDPOINT, HF_HUB_OFFLINE, and the token of `hf auth login`.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ..errors import UserError
from ..types import Progress
from .download import LostConnectionError, RefusedError, Remote, agent, download, read_all
from .names import split_revision

API_SECONDS = 10.0  # time for the hub to say what a repository holds
MAX_API_BYTES = 64 << 20
SHA256 = re.compile(r"[0-9a-f]{64}")
GGUF_MAGIC = b"GGUF"


class HubUnreachableError(UserError):
    """The hub cannot be asked: no network, or its offline mode."""


@dataclass(frozen=True)
class HubFile:
    size: int  # bytes; 0: not stated
    sha256: str  # empty: not stated


@dataclass(frozen=True)
class Repository:
    name: str  # with `@REVISION`, if that was asked for
    revision: str  # commit
    license: str
    files: Mapping[str, HubFile]

    @property
    def has_weights(self) -> bool:
        """Return whether it holds a model that is not in GGUF files."""
        return any("/" not in file and file.endswith((".safetensors", ".bin", ".pt")) for file in self.files)


def read_repository(name: str) -> Repository:
    """Ask the hub what a repository holds."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise HubUnreachableError(f"cannot fetch `{name}`: the hub's offline mode is on (`HF_HUB_OFFLINE`)")
    repository, revision = split_revision(name)
    where = f"{repository}/revision/{revision}" if revision else repository
    request = urllib.request.Request(f"{constants.ENDPOINT}/api/models/{where}?blobs=true")
    for key, value in _headers().items():
        request.add_unredirected_header(key, value)
    try:
        answer = json.loads(read_all(request, name, MAX_API_BYTES, API_SECONDS))
        return _repository(name, answer)
    except RefusedError as error:
        raise _refusal(name, error) from None
    except LostConnectionError as error:
        raise HubUnreachableError(f"cannot fetch `{name}`: the hub is out of reach ({error})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"cannot fetch `{name}`: the hub's answer is not understood") from None


def _repository(name: str, answer: dict[str, object]) -> Repository:
    files: dict[str, HubFile] = {}
    for each in answer["siblings"]:  # type: ignore[attr-defined]
        lfs = each.get("lfs") or {}
        sha256 = str(lfs.get("sha256") or lfs.get("oid") or "").removeprefix("sha256:").lower()
        size = lfs.get("size") or each.get("size") or 0
        files[each["rfilename"]] = HubFile(int(size), sha256 if SHA256.fullmatch(sha256) else "")
    card = answer.get("cardData")
    license = card.get("license") if isinstance(card, dict) else None
    return Repository(name, str(answer["sha"]), str(license or ""), files)


def fetch_file(repository: Repository, file: str, path: Path, progress: Progress, label: str = "") -> str:
    """Download one file of a repository to `path`; return its sha256, checked against the hub's if it states one."""
    from huggingface_hub import constants

    known = repository.files[file]
    name, _ = split_revision(repository.name)
    url = f"{constants.ENDPOINT}/{name}/resolve/{quote(repository.revision, safe='')}/{quote(file)}"
    magic = GGUF_MAGIC if file.endswith(".gguf") else b""
    remote = Remote(url, label or f"{repository.name}:{file}", known.size, known.sha256, magic, _headers())
    try:
        return download(remote, path, progress)
    except RefusedError as error:
        raise _refusal(repository.name, error) from None


def _headers() -> dict[str, str]:
    from huggingface_hub import get_token

    token = get_token()
    return {"User-Agent": agent(), **({"Authorization": f"Bearer {token}"} if token else {})}


def _refusal(name: str, error: RefusedError) -> UserError:
    if error.status == 403:
        return UserError(f"the hub model `{name}` is gated: accept its terms and log in with `hf auth login`")
    if error.status in (401, 404):
        what = "name and revision" if split_revision(name)[1] else "name"
        return UserError(
            f"there is no folder `{name}`, and the hub has no model of that {what} that you may read: check the "
            "spelling, or log in with `hf auth login` if it is private or gated"
        )
    return error
