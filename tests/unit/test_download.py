"""Downloads over HTTP: continued, started over if the file changed, checked by hash, never half-written."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from urllib.request import Request
from urllib.response import addinfourl

import pytest

from model_server import ModelServer, model_server, sha256
from outrider.catalog import cache
from outrider.catalog import download as downloads
from outrider.catalog.download import Remote, download, part_files
from outrider.errors import UserError

CONTENT = b"GGUF" + bytes(range(256)) * 12_000  # 3 MB, several chunks
USAGE = namedtuple("USAGE", "total used free")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    monkeypatch.setattr(downloads, "RETRY_SECONDS", 0.0)
    with model_server() as running:
        running.files["/x.gguf"] = CONTENT
        yield running


def get(server: ModelServer, path: Path, **known: object) -> list[tuple[int, int, str]]:
    """Download `x.gguf` to `path`, and return the progress that was reported."""
    seen: list[tuple[int, int, str]] = []
    remote = Remote(f"{server.url}/x.gguf", "x", magic=b"GGUF", **known)  # type: ignore[arg-type]
    assert download(remote, path, lambda *news: seen.append(news)) == sha256(path.read_bytes())
    return seen


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "models" / "x.gguf"


def test_a_download_reports_its_progress_and_leaves_nothing_else(server: ModelServer, path: Path) -> None:
    seen = get(server, path, sha256=sha256(CONTENT), size=len(CONTENT))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT), "x") and len(seen) > 2
    assert [file.name for file in path.parent.iterdir()] == ["x.gguf"]


@pytest.mark.parametrize("known", [{"sha256": sha256(CONTENT), "size": len(CONTENT)}, {}], ids=["hash", "etag"])
def test_a_lost_connection_is_continued_where_it_broke(
    known: dict[str, object], server: ModelServer, path: Path
) -> None:
    server.cuts = [1_500_000, 1_000_000]
    get(server, path, **known)
    assert path.read_bytes() == CONTENT
    assert server.fetched() == ["", "bytes=1500000-", "bytes=2500000-"]


@pytest.mark.parametrize("validator", ["etag", "modified"])
def test_an_interrupted_download_is_continued_by_the_next(validator: str, server: ModelServer, path: Path) -> None:
    server.validator, server.cuts = validator, [1_500_000]

    def interrupt(done: int, total: int, label: str) -> None:
        if done >= 1_500_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(Remote(f"{server.url}/x.gguf", "x"), path, interrupt)
    assert not path.exists() and part_files(path)[0].stat().st_size == 1_500_000
    seen = get(server, path)
    assert path.read_bytes() == CONTENT
    assert server.fetched() == ["", "bytes=1500000-"]
    assert seen[0][0] == 1_500_000, "the bar starts where the download does"


@pytest.mark.parametrize("scheme", ["http", "HTTP", "ftp", "file"])
def test_a_redirect_from_https_to_plain_text_is_refused(
    scheme: str, server: ModelServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = server.url.replace("http", scheme, 1) + "/x.gguf"
    headers = Message()
    headers["Location"] = location

    def redirect(_: object, request: Request) -> addinfourl:
        response = addinfourl(io.BytesIO(b""), headers, request.full_url, 302)
        response.msg = "Found"  # type: ignore[attr-defined]
        return response

    monkeypatch.setattr("urllib.request.HTTPSHandler.https_open", redirect)
    with pytest.raises(UserError, match=r"^cannot fetch `x`: .*(redirects from https to (http|ftp)|.file:)"):
        download(Remote("https://models.example/x.gguf", "x"), path, lambda *_: None)
    assert not server.requests and not path.exists()


def test_a_redirect_within_a_scheme_is_followed(server: ModelServer, path: Path) -> None:
    server.repositories["org/x"], server.elsewhere = {"x.gguf": CONTENT}, server.url
    download(Remote(f"{server.url}/org/x/resolve/main/x.gguf", "x"), path, lambda *_: None)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("validator", ["weak", "none"])
def test_a_part_without_a_strong_validator_is_not_continued(validator: str, server: ModelServer, path: Path) -> None:
    server.validator, server.cuts = validator, [1_500_000]
    get(server, path)
    assert path.read_bytes() == CONTENT
    assert server.fetched() == ["", ""]


def test_a_server_without_ranges_sends_everything_again(server: ModelServer, path: Path) -> None:
    server.ranges, server.cuts = False, [1_500_000]
    get(server, path, sha256=sha256(CONTENT), size=len(CONTENT))
    assert path.read_bytes() == CONTENT
    assert server.fetched() == ["", "bytes=1500000-"]


def test_a_server_that_sends_another_range_is_asked_for_everything(server: ModelServer, path: Path) -> None:
    server.shift, server.cuts = 7, [1_500_000]
    get(server, path)
    assert path.read_bytes() == CONTENT
    assert server.fetched() == ["", "bytes=1500000-", ""]


def leave_part(path: Path, content: bytes, version: dict[str, str]) -> None:
    part, note = part_files(path)
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(content)
    note.write_text(json.dumps(version))


def test_a_file_that_changed_on_the_server_starts_over(server: ModelServer, path: Path) -> None:
    version = {"url": f"{server.url}/x.gguf", "etag": '"older"', "modified": ""}
    leave_part(path, b"GGUF older bytes", version)
    get(server, path)
    assert path.read_bytes() == CONTENT
    server.files["/x.gguf"] = b"GGUF newer" * 1000
    leave_part(path, CONTENT[:1000], {"sha256": sha256(CONTENT)})
    get(server, path, sha256=sha256(server.files["/x.gguf"]))
    assert path.read_bytes() == server.files["/x.gguf"]


def test_a_server_that_ignores_the_condition_of_a_range_is_found_out(
    server: ModelServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        downloads.urllib.request.Request,
        "add_header",
        lambda self, key, value: self.headers.__setitem__(key.capitalize(), value) if key != "If-Range" else None,
    )
    leave_part(path, b"GGUF older bytes", {"url": f"{server.url}/x.gguf", "etag": '"older"', "modified": ""})
    get(server, path)
    assert path.read_bytes() == CONTENT
    assert server.fetched() == ["bytes=16-", ""]


def test_damaged_bytes_of_an_earlier_try_are_fetched_again(server: ModelServer, path: Path) -> None:
    leave_part(path, b"GGUF" + b"x" * 1000, {"sha256": sha256(CONTENT)})
    get(server, path, sha256=sha256(CONTENT), size=len(CONTENT))
    assert path.read_bytes() == CONTENT
    leave_part(path, b"x" * (len(CONTENT) + 5), {"sha256": sha256(CONTENT)})
    get(server, path, sha256=sha256(CONTENT), size=len(CONTENT))
    assert path.read_bytes() == CONTENT


def test_a_complete_part_is_not_fetched_again(server: ModelServer, path: Path) -> None:
    leave_part(path, CONTENT, {"sha256": sha256(CONTENT)})
    get(server, path, sha256=sha256(CONTENT), size=len(CONTENT))
    assert server.fetched() == []


def test_a_wrong_hash_leaves_nothing(server: ModelServer, path: Path) -> None:
    with pytest.raises(UserError, match=f"`x` has the wrong hash, {sha256(CONTENT)} instead of {'0' * 64}"):
        get(server, path, sha256="0" * 64)
    assert not any(path.parent.iterdir())


def test_a_wrong_size_is_refused_before_the_download(server: ModelServer, path: Path) -> None:
    with pytest.raises(UserError, match=f"has {len(CONTENT)} bytes on the server, but should have 17"):
        get(server, path, size=17)


def test_a_page_instead_of_a_model_is_refused_at_its_first_bytes(server: ModelServer, path: Path) -> None:
    server.files["/x.gguf"] = b"<html>log in</html>"
    with pytest.raises(UserError, match="`x` is not a GGUF file"):
        get(server, path)
    assert not any(path.parent.iterdir())


def test_a_busy_server_is_asked_again_only_while_bytes_arrive(server: ModelServer, path: Path) -> None:
    server.statuses = [503]
    with pytest.raises(UserError, match=r"cannot fetch `x`: the server answers 503"):
        get(server, path)
    server.cuts, server.statuses = [1_500_000], []
    server.requests.clear()
    seen: list[int] = []

    def busy_later(done: int, total: int, label: str) -> None:
        if not seen:
            server.statuses.extend([503, 502])
        seen.append(done)

    download(Remote(f"{server.url}/x.gguf", "x"), path, busy_later)
    assert server.fetched() == ["", *["bytes=1500000-"] * 3]
    assert path.read_bytes() == CONTENT


def test_a_server_that_stays_away_is_given_up(server: ModelServer, path: Path) -> None:
    server.cuts = [1_500_000]

    def gone_later(done: int, total: int, label: str) -> None:
        server.statuses[:] = [503] * 20

    with pytest.raises(UserError, match=r"cannot fetch `x`: the server answers 503 .*; pull again to continue"):
        download(Remote(f"{server.url}/x.gguf", "x"), path, gone_later)
    server.statuses.clear()
    server.requests.clear()
    get(server, path)
    assert server.fetched() == ["bytes=1500000-"]


def test_a_server_that_is_not_there(path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot fetch `x`: Connection refused"):
        download(Remote("http://127.0.0.1:9/x.gguf", "x"), path, lambda *_: None)


def test_a_missing_file(server: ModelServer, path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot fetch `x`: the server answers 404"):
        download(Remote(f"{server.url}/y.gguf", "x"), path, lambda *_: None)


def test_a_full_disk_is_noticed_before_the_download(
    server: ModelServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: USAGE(10, 9, 1_000_000))
    with pytest.raises(cache.DiskFullError, match=r"`x` needs 4 MB on the disk of .*, which has 1 MB free: make room"):
        get(server, path)
    assert not path.exists()
    leave_part(path, CONTENT[:-500_000], {"sha256": sha256(CONTENT)})
    get(server, path, sha256=sha256(CONTENT), size=len(CONTENT))  # half a megabyte is missing, and fits
    assert path.read_bytes() == CONTENT


def test_a_disk_that_fills_up_keeps_what_has_arrived(
    server: ModelServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(done: int, total: int, label: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        download(Remote(f"{server.url}/x.gguf", "x", sha256=sha256(CONTENT)), path, full)
    kept = part_files(path)[0].stat().st_size
    assert kept > 0
    get(server, path, sha256=sha256(CONTENT))
    assert server.fetched()[-1] == f"bytes={kept}-"


def test_a_token_is_not_sent_to_another_host(server: ModelServer, path: Path) -> None:
    with model_server() as other:
        other.files["/x.gguf"] = CONTENT
        server.repositories["org/name"], server.elsewhere = {"x.gguf": b""}, other.url
        url = f"{server.url}/org/name/resolve/main/x.gguf"
        download(Remote(url, "x", headers={"Authorization": "Bearer secret"}), path, lambda *_: None)
        assert other.tokens == [""]
    assert path.read_bytes() == CONTENT
