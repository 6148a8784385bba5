"""How much one connection, and all of them together, may take; and how many fit into this process."""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass, replace

from kvarn.server.process.settings import ServerConfig

log = logging.getLogger("kvarn.server.http")

MAX_URL_BYTES = 8192
MAX_PIPELINED = 16  # requests that wait behind the one being answered
MAX_BODIES = 32  # bodies of the largest size that are held at a time
SURPLUS_S = 1.0  # a connection beyond the limit has so long to send the head of a probe
LINGER_S = 2.0  # a refused client may still send for this long, so that it can read the refusal
MIN_TAKEN_BYTES = 64 << 10  # a client that reads takes so much, or all there is, within write_timeout_s
CHUNK_OVERHEAD = 8  # bytes on the wire for one of the body: chunks of a single byte need six ...
CHUNK_ALLOWANCE = 64 << 10  # ... and so much besides, for extensions and trailers
MAX_HANDSHAKES = 512  # of TLS that are under way at a time
BASE_DESCRIPTORS = 96  # files and pipes of our own, and connections accepted but not yet counted
MAX_COLLECTIONS = 32  # that are open at a time ...
COLLECTION_DESCRIPTORS = 9  # ... and what each may take
OWN_DESCRIPTORS = BASE_DESCRIPTORS + MAX_COLLECTIONS * COLLECTION_DESCRIPTORS


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The settings that connections use."""

    header_timeout_s: float
    body_timeout_s: float
    keep_alive_s: float
    write_timeout_s: float
    max_buffered_bytes: int
    max_header_bytes: int
    max_headers: int
    max_connections: int
    max_connections_per_address: int
    max_body_bytes: int
    max_handshakes: int = 0  # connections that are not counted yet, because TLS begins
    max_overflow: int = 256  # connections beyond the limit, for health probes and for reading the refusal

    @classmethod
    def of(cls, config: ServerConfig) -> ConnectionLimits:
        """The limits a server was configured with."""
        return cls(
            header_timeout_s=config.header_timeout_s,
            body_timeout_s=config.body_timeout_s,
            keep_alive_s=config.keep_alive_s,
            write_timeout_s=config.write_timeout_s,
            max_buffered_bytes=config.max_buffered_bytes,
            max_header_bytes=config.max_header_bytes,
            max_headers=config.max_headers,
            max_connections=config.max_connections,
            max_connections_per_address=config.max_connections_per_address or _share(config.max_connections),
            max_body_bytes=config.max_body_bytes,
            max_handshakes=0 if config.tls_cert is None else MAX_HANDSHAKES,
        )

    @property
    def tick_s(self) -> float:
        """Between two checks of all deadlines: an eighth of the shortest, at most a second."""
        shortest = min(self.header_timeout_s, self.body_timeout_s, self.keep_alive_s, self.write_timeout_s)
        return min(1.0, shortest / 8)


def _share(max_connections: int) -> int:
    """Connections of one address by default: a quarter of all, or 64, so that one client has room on a small server."""
    return min(max_connections, max(64, max_connections // 4))


def fit_descriptors(limits: ConnectionLimits) -> ConnectionLimits:
    """Raise the process's limit on open files so that the connections fit, or lower the number of connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + limits.max_overflow + limits.max_handshakes + OWN_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    overflow = min(limits.max_overflow, soft // 8)
    fitting = soft - overflow - _own(soft)
    log.warning(
        "at most %d connections instead of %d: the limit on open files is %d", fitting, limits.max_connections, soft
    )
    return replace(limits, max_connections=fitting, max_overflow=overflow)


def max_open_collections() -> int:
    """How many collections fit beside the connections under the limit on open files as it is now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = OWN_DESCRIPTORS if soft == resource.RLIM_INFINITY else _own(soft)
    return max(1, (own - BASE_DESCRIPTORS) // COLLECTION_DESCRIPTORS)


def _own(limit: int) -> int:
    """Descriptors that are not for connections."""
    return min(OWN_DESCRIPTORS, limit // 2)
