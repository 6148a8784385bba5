"""One file over HTTP: continued where it stopped, checked against its digest, renamed when complete.

Proxies come from the environment and certificates from the system. Knows no models.
"""

from __future__ import annotations

import http.client
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import IO

from kvarn.errors import DownloadError
from kvarn.hub.download.partfile import CHUNK_BYTES, PartFile, sha256_of
from kvarn.hub.progress import OnProgress, silent

TIMEOUT_S = 30.0
MAX_ATTEMPTS = 5
FIRST_PAUSE_S = 0.5  # doubled after each failed attempt

_TEMPORARY = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file to fetch and what is known of it beforehand."""

    url: str
    label: str
    size: int | None = None
    sha256: str | None = None
    # Sent to the first host only: a redirect to a content network must not see an access token.
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    login_hint: str = "log in or check your access"


class ServerRefused(DownloadError):
    """The server cannot be reached or denies access; another client may have the settings for it (proxy, login)."""


class _TransferBroken(Exception):
    """The transfer stopped half-way; worth another attempt."""


def fetch(remote: RemoteFile, destination: Path, on_progress: OnProgress = silent) -> str:
    """Bring a file to `destination` and return its sha256."""
    if destination.exists():
        digest = sha256_of(destination)
        if digest == remote.sha256:
            return digest
        destination.unlink()
    # Without a digest nothing would tell whether an old part belongs to the same file.
    with PartFile(destination, resume=remote.sha256 is not None) as part:
        was_resumed = part.size > 0
        _transfer(remote, part, on_progress)
        if was_resumed and part.sha256 != remote.sha256:
            part.restart()
            _transfer(remote, part, on_progress)
        _verify(remote, part)
        part.finish()
        return part.sha256


def remote_size(remote: RemoteFile) -> int | None:
    """Ask a server how large a file is; None when it does not say."""
    request = _request(remote, method="HEAD")
    try:
        with _opener().open(request, timeout=TIMEOUT_S) as response:
            length: str | None = response.headers.get("Content-Length")
    except (OSError, http.client.HTTPException):
        return None
    return _number(length)


def _transfer(remote: RemoteFile, part: PartFile, on_progress: OnProgress) -> None:
    pause_s = FIRST_PAUSE_S
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            _attempt(remote, part, on_progress)
            break
        except _TransferBroken as reason:
            if attempt == MAX_ATTEMPTS:
                raise _give_up_error(remote, part, reason) from reason
            if remote.sha256 is None:
                part.restart()
            time.sleep(pause_s)
            pause_s *= 2


def _give_up_error(remote: RemoteFile, part: PartFile, reason: _TransferBroken) -> DownloadError:
    if part.size == 0:
        return ServerRefused(f"{remote.label} cannot be fetched: {reason}; check the network and try again")
    return DownloadError(
        f"downloading {remote.label} stopped at {part.size:,} bytes: {reason}; check the network and run the command "
        "again, it continues there"
    )


def _attempt(remote: RemoteFile, part: PartFile, on_progress: OnProgress) -> None:
    if remote.size is not None and part.size >= remote.size:
        return
    try:
        with _open(remote, part) as response:
            total = _total(response, part.size) or remote.size
            _receive(response, part, total, lambda done: on_progress(done, total, remote.label))
    except urllib.error.HTTPError as error:
        _raise_for_status(remote, part, error)
    except ssl.SSLError as error:
        raise ServerRefused(f"no secure connection for {remote.label}: {error}; check the certificates") from error
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise ServerRefused(f"no secure connection for {remote.label}: {reason}; check the certificates") from error
        raise _TransferBroken(str(reason) or type(reason).__name__) from error


def _open(remote: RemoteFile, part: PartFile) -> http.client.HTTPResponse:
    request = _request(remote)
    if part.size:
        request.add_header("Range", f"bytes={part.size}-")
    response: http.client.HTTPResponse = _opener().open(request, timeout=TIMEOUT_S)
    if part.size and not _continues_at(response, part.size):
        part.restart()
    return response


def _continues_at(response: http.client.HTTPResponse, offset: int) -> bool:
    content_range = response.headers.get("Content-Range", "")
    return response.status == 206 and content_range.startswith(f"bytes {offset}-")


def _total(response: http.client.HTTPResponse, offset: int) -> int | None:
    length = _number(response.headers.get("Content-Length"))
    return None if length is None else offset + length


def _number(header: str | None) -> int | None:
    """A length as a server gave it; None for what is none."""
    return int(header) if header and header.isascii() and header.isdigit() and len(header) < 20 else None


def _receive(response: IO[bytes], part: PartFile, total: int | None, report: Callable[[int], None]) -> None:
    report(part.size)
    while chunk := response.read(CHUNK_BYTES):
        part.write(chunk)
        report(part.size)
        if total is not None and part.size > total:
            raise DownloadError(f"the server sent more than the {total:,} bytes it announced; try another source")
    if total is not None and part.size < total:
        raise _TransferBroken(f"the connection closed {total - part.size:,} bytes early")


def _raise_for_status(remote: RemoteFile, part: PartFile, error: urllib.error.HTTPError) -> None:
    if error.code == 416 and part.size:  # the part is longer than the file: not a part of it
        part.restart()
        raise _TransferBroken("the server has a different file now") from error
    if error.code in _TEMPORARY:
        raise _TransferBroken(f"the server answers {error.code} {error.reason}") from error
    remedy = remote.login_hint if error.code in {401, 403, 407} else "check the name"
    raise ServerRefused(f"the server answers {error.code} {error.reason} for {remote.label}; {remedy}") from error


def _verify(remote: RemoteFile, part: PartFile) -> None:
    if remote.sha256 == part.sha256:
        return
    if remote.sha256 is not None:
        part.discard()
        raise DownloadError(
            f"{remote.label} has sha256 {part.sha256}, expected {remote.sha256}; the file was removed: "
            "try again, and if it stays so do not trust this source"
        )
    if remote.size is not None and part.size != remote.size:
        part.discard()
        raise DownloadError(
            f"{remote.label} has {part.size:,} bytes, expected {remote.size:,}; the file was removed: try again"
        )


def _request(remote: RemoteFile, method: str = "GET") -> urllib.request.Request:
    if not remote.url.startswith(("https://", "http://")):
        raise DownloadError(f"{remote.label} would come from {remote.url!r}; only http and https are fetched")
    request = urllib.request.Request(remote.url, method=method)
    request.add_header("User-Agent", "kvarn")
    for key, value in remote.headers.items():
        request.add_unredirected_header(key, value)
    return request


@cache
def _opener() -> urllib.request.OpenerDirector:
    context = ssl.create_default_context()
    try:  # some Python builds know no certificates of their own
        import certifi
    except ImportError:
        pass
    else:
        context.load_verify_locations(certifi.where())
    return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
