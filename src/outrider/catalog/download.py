"""Download one file over HTTP: continued after an interruption, checked by hash, named only when it is whole.

What has arrived is in `.FILE.part`. Beside it, `.FILE.part.json` holds the version that the server stated (a hash, an
ETag or a date): a part of another version is dropped, and so is one whose server does not send ranges.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .. import __version__
from ..errors import UserError
from ..types import Progress
from .cache import CHUNK, check_free_space

TIMEOUT = 30.0  # seconds without a byte after which a connection counts as lost
MAX_FAILURES = 5  # lost connections in a row that brought no byte, before the download gives up
RETRY_SECONDS = 0.5  # before the first retry; doubled with each failure in a row
MAX_RETRY_SECONDS = 8.0
BUSY = (429, 500, 502, 503, 504)  # statuses of a server that may answer later


@dataclass(frozen=True)
class Remote:
    """A file to download."""

    url: str
    label: str  # for the progress bar and errors
    size: int = 0  # bytes; 0: as the server states
    sha256: str = ""  # empty: not known
    magic: bytes = b""  # first bytes that the file must have
    headers: Mapping[str, str] = field(default_factory=dict)  # not sent to other hosts that the server redirects to


class LostConnectionError(Exception):
    """The connection failed, or the server was busy: it may work later."""


class _OutdatedPartError(Exception):
    """What has arrived cannot be continued."""


@dataclass
class _Part:
    """What has arrived of a file."""

    path: Path

    @property
    def note(self) -> Path:
        return self.path.with_name(self.path.name + ".json")

    def size(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def version(self) -> dict[str, Any]:
        try:
            found = json.loads(self.note.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)


def part_files(path: Path) -> tuple[Path, Path]:
    """Return the files of an interrupted download of `path`."""
    part = _Part(path.with_name(f".{path.name}.part"))
    return part.path, part.note


def download(remote: Remote, path: Path, progress: Progress) -> str:
    """Download a file to `path` and return its sha256. If it is interrupted, the next call continues."""
    part = _Part(part_files(path)[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    continued = part.size() > 0
    sha256 = _receive(remote, part, progress)
    if remote.sha256 and sha256 != remote.sha256 and continued:  # the older bytes may be the damaged ones
        part.drop()
        sha256 = _receive(remote, part, progress)
    if remote.sha256 and sha256 != remote.sha256:
        part.drop()
        raise UserError(
            f"what was fetched for `{remote.label}` has the wrong hash, {sha256} instead of {remote.sha256}: "
            "pull it again, and if that does not help, from another source"
        )
    part.path.replace(path)
    part.drop()
    return sha256


def _receive(remote: Remote, part: _Part, progress: Progress) -> str:
    """Receive a file, over several connections if they are lost; return its hash."""
    failures, arrived = 0, False
    while True:
        before = part.size()
        try:
            return _receive_once(remote, part, progress)
        except _OutdatedPartError:
            if not before:
                raise UserError(f"cannot fetch `{remote.label}`: the server refuses to send its first byte") from None
            part.drop()
        except LostConnectionError as error:
            progressed = part.size() > before
            arrived = arrived or progressed
            failures = 0 if progressed else failures + 1
            if not arrived or failures > MAX_FAILURES:
                left = "; pull again to continue" if part.size() else ""
                raise UserError(f"cannot fetch `{remote.label}`: {error}{left}") from None
            time.sleep(min(RETRY_SECONDS * 2**failures, MAX_RETRY_SECONDS))


def _receive_once(remote: Remote, part: _Part, progress: Progress) -> str:
    known = part.version()
    if part.size() and not _may_continue(remote, known):
        part.drop()
    start = part.size()
    if start and start == remote.size:
        return _digest_start(part.path, start).hexdigest()
    with _request(remote, start, known) as response:
        start, total = _agree(remote, response, start, known)
        check_free_space(part.path.parent, max(total - start, 0), f"`{remote.label}`")
        part.note.write_text(json.dumps(_version(remote, response.headers)))
        if start:
            progress(start, total, remote.label)
        digest = _digest_start(part.path, start)
        with part.path.open("r+b" if start else "wb") as file:
            file.seek(start)
            file.truncate()
            done = start
            while chunk := _read(response):
                if not done and not chunk.startswith(remote.magic):
                    part.drop()
                    raise UserError(f"`{remote.label}` is not a GGUF file: the server sent {_kind(response)}")
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress(done, total, remote.label)
            file.flush()
            os.fsync(file.fileno())
    if total and done < total:
        raise LostConnectionError(f"the connection was lost after {done} of {total} bytes")
    if not done:
        raise UserError(f"`{remote.label}` is empty on the server")
    return digest.hexdigest()


def _may_continue(remote: Remote, known: dict[str, Any]) -> bool:
    if remote.sha256:
        return known.get("sha256") == remote.sha256
    return known.get("url") == remote.url and bool(known.get("etag") or known.get("modified"))


def _version(remote: Remote, headers: Message) -> dict[str, str]:
    if remote.sha256:
        return {"sha256": remote.sha256}
    etag = headers.get("ETag", "")
    return {
        "url": remote.url,
        "etag": "" if etag.startswith("W/") else etag,  # a weak ETag does not promise equal bytes
        "modified": headers.get("Last-Modified", ""),
    }


def _request(remote: Remote, start: int, known: dict[str, Any]) -> http.client.HTTPResponse:
    request = urllib.request.Request(remote.url, headers={"Accept-Encoding": "identity", "User-Agent": agent()})
    for name, value in remote.headers.items():
        request.add_unredirected_header(name, value)
    if start:
        request.add_header("Range", f"bytes={start}-")
        if not remote.sha256:
            request.add_header("If-Range", known.get("etag") or known.get("modified") or "")
    return open_url(request, remote.label)


def agent() -> str:
    return f"outrider/{__version__}"


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but not from https to a scheme that anyone on the way can read and change."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        scheme = urlsplit(newurl).scheme.lower()
        if scheme not in ("http", "https") or (req.type == "https" and scheme != "https"):
            host = urlsplit(req.full_url).hostname
            raise RefusedError(f"`{host}` redirects from {req.type} to {scheme}, which is not followed", code)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def open_url(request: urllib.request.Request, label: str, timeout: float = TIMEOUT) -> http.client.HTTPResponse:
    """Open a URL; raise UserError for a refusal, LostConnectionError if the server is out of reach or busy."""
    try:
        opener = urllib.request.build_opener(_Redirects)
        response: http.client.HTTPResponse = opener.open(request, timeout=timeout)
        return response
    except RefusedError as error:
        raise RefusedError(f"cannot fetch `{label}`: {error}", error.status) from None
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:
            raise _OutdatedPartError from None
        if error.code in BUSY:
            raise LostConnectionError(f"the server answers {error.code} ({error.reason})") from None
        problem = f"cannot fetch `{label}`: the server answers {error.code} ({error.reason})"
        raise RefusedError(problem, error.code) from None
    except urllib.error.URLError as error:
        raise LostConnectionError(_reason(error.reason)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise LostConnectionError(_reason(error)) from None


class RefusedError(UserError):
    """The server refuses a request, with a status from 400 on, or redirects it where it must not go."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _reason(error: object) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__).strip().rstrip(".")


def _agree(remote: Remote, response: http.client.HTTPResponse, start: int, known: dict[str, Any]) -> tuple[int, int]:
    """Return the first byte that the server sends, and the size of the file (0: unknown); refuse contradictions."""
    length = response.headers.get("Content-Length", "")
    total = int(length) if length.isdigit() else 0
    if response.status == 206:
        span, _, whole = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if not start or span.partition("-")[0] != str(start) or _differs(remote, response, known):
            raise _OutdatedPartError
        total = int(whole) if whole.isdigit() else (start + total if total else 0)
    else:
        start = 0  # the server sends the whole file
    if remote.size and total and total != remote.size:
        raise UserError(f"`{remote.label}` has {total} bytes on the server, but should have {remote.size}")
    return start, total or remote.size


def _differs(remote: Remote, response: http.client.HTTPResponse, known: dict[str, Any]) -> bool:
    return not remote.sha256 and _version(remote, response.headers) != known


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(CHUNK)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise LostConnectionError(_reason(error)) from None


def _kind(response: http.client.HTTPResponse) -> str:
    kind = response.headers.get_content_type()
    return f"`{kind}`" if "html" in kind or "json" in kind else "something else"


def _digest_start(path: Path, size: int) -> hashlib._Hash:
    """Return the running sha256 of the first `size` bytes of a file."""
    digest = hashlib.sha256()
    if size:
        with path.open("rb") as file:
            while size and (chunk := file.read(min(CHUNK, size))):
                digest.update(chunk)
                size -= len(chunk)
    return digest


def read_all(request: urllib.request.Request, label: str, limit: int, timeout: float) -> bytes:
    """Return the body of a short answer."""
    with open_url(request, label, timeout) as response:
        try:
            return response.read(limit)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise LostConnectionError(_reason(error)) from None
