"""Small HTTP servers on loopback: a file server with faults, a package index (PEP 503) and a model hub."""

from __future__ import annotations

import base64
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

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Site:
    """What a server has, how it misbehaves and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)  # close the connection after so many bytes, once each
    statuses: dict[str, list[int]] = field(default_factory=dict)  # answer these first
    has_ranges: bool = True
    token: str | None = None  # files need this bearer token
    basic_login: str | None = None  # user:password for everything
    seconds_per_chunk: float = 0.0
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def asked(self, path: str, method: str = "GET") -> list[dict[str, str]]:
        """Return the headers of every request for a path."""
        return [headers for verb, asked, headers in self.requests if (verb, asked) == (method, path)]


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    """Serve a site on a free loopback port."""
    handler = type("Handler", (_Handler,), {"site": site})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    site.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()


def add_wheel(site: Site, package: str, file_name: str, wheel: bytes, *, sha256: str | None = None) -> None:
    """Put a wheel on a package index at /simple/."""
    digest = sha256 or hashlib.sha256(wheel).hexdigest()
    page = site.files.get(f"/simple/{package}/", b"").decode()
    link = f'<a href="/files/{file_name}#sha256={digest}">{file_name}</a>'
    site.files[f"/simple/{package}/"] = (page + link).encode()
    site.files[f"/files/{file_name}"] = wheel


def add_repository(site: Site, repo: str, files: dict[str, bytes], *, commit: str = COMMIT) -> None:
    """Put a repository on a hub; files over 1,000 bytes are large files with a digest, as on the real one."""
    siblings = []
    for name, body in files.items():
        lfs = {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 100}
        entry = {"rfilename": name, "size": len(body), "blobId": hashlib.sha1(body).hexdigest()}
        siblings.append({**entry, "lfs": lfs} if len(body) > 1000 else entry)
        site.files[f"/{repo}/resolve/{commit}/{name}"] = body
    info = {"id": repo, "modelId": repo, "sha": commit, "private": False, "tags": [], "siblings": siblings}
    for path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main", f"/api/models/{repo}/revision/{commit}"):
        site.files[path] = json.dumps(info).encode()


def _basic(login: str) -> str:
    return "Basic " + base64.b64encode(login.encode()).decode()


class _Handler(BaseHTTPRequestHandler):
    site: Site
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_args: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        site, path = self.site, unquote(urlsplit(self.path).path)
        site.requests.append((self.command, path, dict(self.headers)))
        planned = site.statuses.get(path) if with_body else None
        if planned:
            self._status(planned.pop(0))
        elif path in site.redirects:
            self._status(302, Location=site.redirects[path])
        elif path not in site.files:
            missing = "RevisionNotFound" if "/revision/" in path else "RepoNotFound"
            self._status(404, **{"X-Error-Code": missing})
        elif site.basic_login and self.headers.get("Authorization") != _basic(site.basic_login):
            self._status(401, **{"WWW-Authenticate": 'Basic realm="index"'})
        elif site.token and self.headers.get("Authorization") != f"Bearer {site.token}":
            self._status(401)
        else:
            self._send(path, site.files[path], with_body)

    def _send(self, path: str, body: bytes, with_body: bool) -> None:
        asked = self._asked_range(len(body))
        if asked is not None and asked.start >= len(body):
            self._status(416)
            return
        chosen = body[asked.start : asked.stop] if asked is not None else body
        self.send_response(200 if asked is None else 206)
        is_listing = path.endswith("/")
        content_type = (
            "application/json" if path.startswith("/api/") else "text/html" if is_listing else "application/zip"
        )
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(chosen)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        if self.site.has_ranges:
            self.send_header("Accept-Ranges", "bytes")
        if asked is not None:
            self.send_header("Content-Range", f"bytes {asked.start}-{asked.stop - 1}/{len(body)}")
        self.end_headers()
        if with_body:
            self._send_body(path, chosen)

    def _asked_range(self, size: int) -> range | None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None or not self.site.has_ranges:
            return None
        return range(int(asked[1]), min(size, int(asked[2]) + 1) if asked[2] else size)

    def _send_body(self, path: str, body: bytes) -> None:
        cuts = self.site.cuts.get(path)
        if cuts:
            body, self.close_connection = body[: cuts.pop(0)], True
        chunk = 64 << 10 if self.site.seconds_per_chunk else max(len(body), 1)
        try:
            for offset in range(0, len(body), chunk):
                self.wfile.write(body[offset : offset + chunk])
                time.sleep(self.site.seconds_per_chunk)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _status(self, code: int, **headers: str) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", "0")
        self.end_headers()
