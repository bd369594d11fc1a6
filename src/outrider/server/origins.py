"""Checks of where a request comes from, so that web pages of other sites cannot drive a server on this machine.

A page can send requests to any address that its browser reaches. Browsers name the page's site in `Origin`, and they
send bodies of other types than JSON without asking first. A page whose own host name resolves to this machine (DNS
rebinding) shows its name in `Host`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from starlette.types import Scope

from .api.errors import ApiError

LOCAL_NAMES = ("localhost", "ip6-localhost", "")  # empty: the client sent no Host
DEFAULT_PORTS = {"http": "80", "https": "443"}


def check_source(scope: Scope, headers: Mapping[str, str], allowed: Sequence[str], has_keys: bool) -> None:
    """Raise 403 for a foreign host or origin, and 415 for a body that is not declared as JSON."""
    host, origin = headers.get("host", ""), headers.get("origin")
    if "*" not in allowed:
        # A page under another name has no API key, so with keys a proxy may pass on any host name.
        if not has_keys and is_loopback(server_of(scope)) and not is_local_name(host, allowed):
            message = (
                f"the host name {host[:80]!r} is not one of this machine: use `localhost`, or start the server with"
            )
            raise ApiError(
                403, f"{message} an API key or `--allow-origin`", code="foreign_host", kind="permission_error"
            )
        if origin is not None and not is_same_site(origin, host) and origin not in allowed:
            message = f"web pages of {origin[:80]!r} may not call this server: start it with `--allow-origin`"
            raise ApiError(403, message, code="foreign_origin", kind="permission_error")
    if scope["method"] == "POST":
        check_content_type(headers.get("content-type"), origin, scope["path"])


def check_content_type(content_type: str | None, origin: str | None, path: str) -> None:
    """Raise 415 unless a body is declared as JSON. Programs, which send no Origin, may leave the type out.

    Below `/api` they may also send another one: Ollama's own examples call curl without a type.
    """
    if origin is None and (content_type is None or path.startswith("/api/")):
        return
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        message = f"the body has the type {kind[:80]!r}: send the header `Content-Type: application/json`"
        raise ApiError(415, message, code="unsupported_media_type")


def server_of(scope: Scope) -> str:
    """Return the local address of the connection."""
    return str((scope.get("server") or ("",))[0])


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def is_local_name(host: str, allowed: Sequence[str]) -> bool:
    name = host_name(host)
    others = {host_name(urlsplit(origin).netloc) for origin in allowed}
    return name in LOCAL_NAMES or name.endswith(".localhost") or is_loopback(name) or name in others


def host_name(host: str) -> str:
    """Return a Host header without its port and brackets, in lower case."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:  # invalid brackets: no name at all
        return host


def is_same_site(origin: str, host: str) -> bool:
    """Return whether a page was loaded from this server itself. A proxy may have ended TLS, so schemes may differ."""
    scheme, _, site = origin.lower().partition("://")
    port = DEFAULT_PORTS.get(scheme, "")
    return bool(site) and site.removesuffix(f":{port}") == host.lower().removesuffix(f":{port}")
