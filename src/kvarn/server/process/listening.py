"""The listening socket: an address or a file, bound before anything is loaded, so that a mistake is told at once."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvarn.errors import ConfigError
from kvarn.server.http.connections import Listener
from kvarn.server.process.settings import ServerConfig
from kvarn.server.process.tls import TlsListener

SOCKET_MODE = 0o660  # its owner and group may connect
PROBE_S = 2.0  # for a server that listens on the same file to show itself


@contextmanager
def listening(config: ServerConfig) -> Iterator[Listener]:
    """A bound socket; a file that was made for it is removed in the end."""
    family = socket.AF_UNIX if config.uds else socket.AF_INET6 if ":" in config.host else socket.AF_INET
    kind = Listener if config.tls_cert is None else TlsListener
    listener = kind(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        if config.uds is None:
            _bind_address(listener, config)
        else:
            _bind_file(listener, config.uds)
        yield listener
    finally:
        remove_file(listener)
        listener.close()


def remove_file(listener: Listener) -> None:
    """Remove the file of a Unix socket, if there is one; for every way out, also those that end the process at once."""
    if listener.file is None:
        return
    path, *made = listener.file
    with suppress(OSError):  # it may be gone, or belong to the next server already
        found = path.lstat()
        if [found.st_dev, found.st_ino] == made:
            path.unlink()


def shown_address(listener: socket.socket, config: ServerConfig) -> str:
    """Where clients find the server: a URL, or unix: and the path of the socket."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.tls_cert is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _bind_address(listener: socket.socket, config: ServerConfig) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}; {_remedy(error)}"
        ) from None


def _remedy(error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return "choose a --host that this machine has, or 0.0.0.0 for all of its addresses"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "this user may not; choose another --port, above 1023, or put a reverse proxy before it"
    return "choose another --port"


def _bind_file(listener: Listener, path: Path) -> None:
    _remove_stale(path)
    mask = os.umask(0o777 & ~SOCKET_MODE)  # from the first moment: there is no thread yet that makes other files
    try:
        listener.bind(os.fspath(path))
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}; choose another --uds") from None
    finally:
        os.umask(mask)
    made = os.stat(path)
    listener.file = path, made.st_dev, made.st_ino


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that has ended; whatever else is there is refused."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot listen on {path}: {getattr(error, 'strerror', '') or error}") from None
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"cannot listen on {path}: a file that is no socket is there; choose another --uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                path.unlink(missing_ok=True)
                return
            raise ConfigError(f"cannot listen on {path}: {error.strerror or error}; choose another --uds") from None
    raise ConfigError(f"cannot listen on {path}: another server does; choose another --uds")
