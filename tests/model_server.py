"""A local HTTP server that plays the Hugging Face hub and a plain file server, with faults to order."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

PIECE = 1 << 16  # bytes sent at once if there is a delay
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class ModelServer:
    """`repositories` are served as the hub does, `files` by path. Other fields order faults."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True  # whether it sends parts of a file
    shift: int = 0  # bytes by which a part of a file begins too late
    validator: str = "etag"  # etag, weak, modified or none
    delay: float = 0.0  # seconds between two pieces of a file
    cuts: list[int] = field(default_factory=list)  # bytes after which the next answers with a file break off
    stated: dict[str, str] = field(default_factory=dict)  # file -> hash that the hub states, if it is not its own
    statuses: list[int] = field(default_factory=list)  # of the next answers, instead of a file
    token: str = ""  # that clients must send
    license: str = "apache-2.0"
    commit: str = COMMIT
    revisions: dict[str, str] = field(default_factory=dict)  # tag -> commit, whose files are those of `NAME@COMMIT`
    elsewhere: str = ""  # host that holds the hub's files; the hub redirects to it
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    tokens: list[str] = field(default_factory=list)  # Authorization of each request for a file

    def fetched(self, ending: str = ".gguf") -> list[str]:
        """Return the Range of each GET of a file with this ending."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith(ending)]

    def files_of(self, name: str, revision: str) -> tuple[str, dict[str, bytes] | None]:
        """Return the commit of a revision, and its files."""
        commit = self.revisions.get(revision, revision)
        if f"{name}@{commit}" in self.repositories:
            return commit, self.repositories[f"{name}@{commit}"]
        return self.commit, self.repositories.get(name) if revision in ("", "main", self.commit) else None

    def sibling(self, file: str, content: bytes) -> dict[str, object]:
        entry: dict[str, object] = {"rfilename": file, "size": len(content), "blobId": "0" * 40}
        if file.endswith((".gguf", ".safetensors")):
            entry["lfs"] = {"sha256": self.stated.get(file, sha256(content)), "size": len(content), "pointerSize": 134}
        return entry


class StatefulServer(ThreadingHTTPServer):
    state: ModelServer
    daemon_threads = True


class Handler(BaseHTTPRequestHandler):
    server: StatefulServer

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.state.requests.append((self.command, path, self.headers.get("Range", "")))
        if self.server.state.token and self.headers.get("Authorization") != f"Bearer {self.server.state.token}":
            return self.answer(401, b"{}")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/([^/]+))?", path):
            return self.describe(match[1], match[2] or "")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            return self.list_tree(match[1], match[2])
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            commit, files = self.server.state.files_of(match[1], match[2])
            if self.server.state.elsewhere and match[3] in (files or {}):
                self.send_response(302)
                self.send_header("Location", f"{self.server.state.elsewhere}/{match[3]}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return None
            return self.send_file(match[3], (files or {}).get(match[3]), commit)
        return self.send_file(path.lstrip("/"), self.server.state.files.get(path))

    def describe(self, name: str, revision: str) -> None:
        commit, files = self.server.state.files_of(name, revision)
        if files is None:
            return self.answer(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        siblings = [self.server.state.sibling(file, content) for file, content in files.items()]
        info = {
            "id": name,
            "modelId": name,
            "sha": commit,
            "private": False,
            "gated": False,
            "siblings": siblings,
            "cardData": {"license": self.server.state.license},
            "tags": [],
            "downloads": 0,
            "likes": 0,
        }
        return self.answer(200, json.dumps(info).encode())

    def list_tree(self, name: str, revision: str) -> None:
        entries = []
        for file, content in (self.server.state.files_of(name, revision)[1] or {}).items():
            known = self.server.state.sibling(file, content)
            entry = {"type": "file", "path": file, "size": len(content), "oid": known["blobId"]}
            if isinstance(lfs := known.get("lfs"), dict):
                entry["lfs"] = {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": 134}
            entries.append(entry)
        self.answer(200, json.dumps(entries).encode())

    def send_file(self, name: str, content: bytes | None, commit: str = COMMIT) -> None:
        if self.command == "GET":
            self.server.state.tokens.append(self.headers.get("Authorization", ""))
        if content is None:
            return self.answer(404, b"missing", {"X-Error-Code": "EntryNotFound"})
        if self.command == "GET" and self.server.state.statuses:
            return self.answer(self.server.state.statuses.pop(0), b"busy")
        stated = self.server.state.stated.get(name, sha256(content))
        validators = {
            "etag": {"ETag": f'"{stated}"'},
            "weak": {"ETag": f'W/"{stated}"'},
            "modified": {"Last-Modified": f"Mon, 16 Nov 2026 00:00:{len(content) % 60:02} GMT"},
            "none": {},
        }[self.server.state.validator]
        headers = {**validators, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start = 0
        condition = self.headers.get("If-Range")
        if (
            self.server.state.ranges
            and (span := self.headers.get("Range"))
            and condition in (None, *validators.values())
        ):
            start = int(span.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                return self.answer(416, b"")
            start += self.server.state.shift
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.server.state.cuts.pop(0) if self.server.state.cuts and self.command == "GET" else None
        return self.answer(206 if start else 200, content[start:], headers, cut)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True

    def write(self, body: bytes) -> None:
        delay = self.server.state.delay
        size = PIECE if delay else max(len(body), 1)
        with contextlib.suppress(OSError):  # the client is gone
            for start in range(0, len(body), size):
                self.wfile.write(body[start : start + size])
                time.sleep(delay)


@contextmanager
def model_server() -> Iterator[ModelServer]:
    state = ModelServer()
    server = StatefulServer(("127.0.0.1", 0), Handler)
    server.state = state
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
