"""ServerConfig: every setting of `kvarn serve`, validated once. Knows values; setting_sources.py knows where from.

Durations end in _s, sizes in _bytes; 0 is never "unlimited".
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvarn.checks import check_setting
from kvarn.config import EngineConfig, require_milvus_uri
from kvarn.errors import ConfigError
from kvarn.server.access.shared.store import shown_url
from kvarn.server.access.tiers import DEFAULT_TIERS, Tier, read_tiers

UNKNOWN_FIELDS = ("refuse", "ignore")
METRICS_COMPAT = ("", "vllm")
LIMITS_WHEN_AWAY = ("divide", "closed")
LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_QUEUE_LIMIT = 256

# (lowest, highest) of every number, both included
_WHOLE: dict[str, tuple[int, int]] = {
    "port": (0, 65535),  # 0: the system chooses a free one
    "max_buffered_bytes": (4096, 2**30),
    "max_header_bytes": (1024, 2**20),
    "max_headers": (8, 10_000),
    "max_connections": (1, 2**20),
    "max_body_bytes": (1024, 2**32),
    "max_json_depth": (4, 512),
    "max_n": (1, 128),
    "queue_limit": (1, 2**24),
    "response_store_bytes": (0, 2**40),
    "batch_bytes": (1 << 16, 2**44),
}
_REAL: dict[str, tuple[float, float]] = {
    "drain_delay_s": (0.0, 3600.0),
    "drain_timeout_s": (0.0, 86_400.0),
    "header_timeout_s": (0.1, 3600.0),
    "body_timeout_s": (0.1, 86_400.0),
    "request_timeout_s": (0.1, 1e6),
    "keep_alive_s": (0.1, 86_400.0),
    "write_timeout_s": (0.1, 86_400.0),
    "ping_s": (0.05, 3600.0),
    "heartbeat_timeout_s": (2.0, 3600.0),
}
_CHOICES = {
    "unknown_fields": UNKNOWN_FIELDS,
    "metrics_compat": METRICS_COMPAT,
    "log_level": LOG_LEVELS,
    "limits_when_away": LIMITS_WHEN_AWAY,
}
PATHS = {
    "keys": "the path of a TOML file, see `kvarn keys --help`",
    "uds": "the path of a Unix socket",
    "tls_cert": "the path of a PEM file",
    "tls_key": "the path of a PEM file",
    "response_store": "the path of an SQLite file",
    "batch_dir": "the path of a folder for files and batches",
    "lora_dir": "the path of a folder with adapters",
    "milvus_token_file": "the path of a file with Milvus's token",
}
_TEXTS = ("models", "pinned", "loras", "cors_origins", "allowed_hosts")
_check = replace(check_setting, number_format=",", booleans="true or false", quotes_choices=True)
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.\-]{0,252}[A-Za-z0-9])?|[0-9A-Fa-f:.]{2,45}")
_ROOT_PATH = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)*")
_VERSION = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4}")
_REDIS = re.compile(r"(rediss?|unix)://\S+")
_ORIGIN = re.compile(r"https?://[^\s/*,]+")


def default_engine() -> EngineConfig:
    """The engine's settings inside a server: tiers have priorities, so the queue is ordered by them."""
    return EngineConfig(policy="priority", queue_limit=DEFAULT_QUEUE_LIMIT)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How one server process runs; `kvarn config explain` prints it with the source of every value."""

    models: tuple[str, ...] = ("smollm2",)  # paths or names of `kvarn pull`; the first is loaded at start
    host: str = "127.0.0.1"
    port: int = 8000
    keys: Path | None = None  # TOML file of `kvarn keys`; None: no key is needed, so loopback only
    insecure: bool = False  # listen beyond loopback without keys
    uds: Path | None = None  # a Unix socket to listen on, instead of host and port
    tls_cert: Path | None = None  # PEM: the certificate and those it rests on; TLS 1.2 and newer
    tls_key: Path | None = None  # PEM: its key, without a password
    root_path: str = ""  # the prefix under which a reverse proxy offers the server; with or without it, paths are found
    behind_proxy: bool = False  # a proxy on this machine passes strangers' requests on: no connection counts as local
    limits: str = ""  # redis://HOST:PORT/DB: replicas count what keys take together; "": each by itself
    milvus_uri: str = ""  # http://HOST:19530: collections are kept there, shared by replicas; "": in folders here
    milvus_token_file: Path | None = None  # of that Milvus; None: what MILVUS_TOKEN says
    limits_when_away: str = "divide"  # while that Redis does not answer: divide | closed
    unknown_fields: str = "refuse"  # refuse | ignore
    drain_delay_s: float = 5.0  # after SIGTERM new requests are still taken for this long ...
    drain_timeout_s: float = 60.0  # ... then those that run may go on for this long
    header_timeout_s: float = 10.0  # to receive the headers of a request
    body_timeout_s: float = 60.0  # to receive its body
    request_timeout_s: float = 600.0  # to answer it
    keep_alive_s: float = 75.0  # an idle connection is closed
    write_timeout_s: float = 30.0  # a client that does not read is dropped
    max_buffered_bytes: int = 1 << 20  # or when so much waits for it
    max_header_bytes: int = 32768
    max_headers: int = 100
    max_connections: int = 4096
    max_connections_per_address: int | None = None  # of one host; None: a quarter of all, at least 64
    max_body_bytes: int = 8 << 20
    max_json_depth: int = 64
    max_n: int = 16  # choices of one request
    queue_limit: int = DEFAULT_QUEUE_LIMIT  # requests waiting in one engine; more are refused with Retry-After
    response_store: Path | None = None  # SQLite file of /v1/responses that are stored; None: in memory
    response_store_bytes: int = 64 << 20  # of all keys together; 0: none is stored
    batch_dir: Path | None = None  # folder of /v1/files and /v1/batches; None: they are refused
    batch_bytes: int = 1 << 30  # of all files in it; one of several keys may hold half
    ping_s: float = 15.0  # between comments that keep a silent stream open
    memory_bytes: int | None = None  # for all models together; None: what the machine has
    pinned: tuple[str, ...] = ()  # models loaded at start and never unloaded
    loras: tuple[str, ...] = ()  # adapters of the first model, NAME=PATH each: loaded at start
    lora_dir: Path | None = None  # from which keys with admin = true may load more
    cors_origins: tuple[str, ...] = ()  # of browsers that may ask; none by default
    allowed_hosts: tuple[str, ...] = ()  # extra names in the Host header while bound to loopback
    metrics_compat: str = ""  # vllm: its metric names in addition to ours
    ollama_version: str = "0.12.6"  # told by /api/version: the version of Ollama whose API is spoken, for its clients
    log_level: str = "info"
    heartbeat_timeout_s: float = 5.0  # an engine that shows no progress for this long ends the process
    tiers: Mapping[str, Tier] = field(default_factory=lambda: dict(DEFAULT_TIERS))
    engine: EngineConfig = field(default_factory=default_engine)

    def __post_init__(self) -> None:
        for name, whole in _WHOLE.items():
            _check.integer(name, getattr(self, name), *whole)
        for name, real in _REAL.items():
            _check.number(name, getattr(self, name), *real)
        for name, accepted in _CHOICES.items():
            _check.one_of(name, getattr(self, name), accepted)
        for name in _TEXTS:
            _check_texts(name, getattr(self, name))
        _check.integer("max_connections_per_address", self.max_connections_per_address, 1, 2**20, optional=True)
        _check.integer("memory_bytes", self.memory_bytes, 1 << 20, 2**50, optional=True)
        self._check_names()
        self._check_reach()

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.uds is not None or _is_loopback(self.host)

    @property
    def takes_local(self) -> bool:
        """Whether a connection from this machine is somebody on this machine: nothing speaks of a proxy before us."""
        is_proxied = self.behind_proxy or self.root_path or self.allowed_hosts or self.uds is not None
        return self.is_loopback and not is_proxied

    @property
    def is_open(self) -> bool:
        """Whether requests need no key."""
        return self.keys is None

    def _check_names(self) -> None:
        if not self.models:
            raise ConfigError("models is empty; name at least one with --model")
        if wrong := [origin for origin in self.cors_origins if not _ORIGIN.fullmatch(origin)]:
            raise ConfigError(f"cors_origins has {wrong[0]!r:.60}; give scheme and host, as https://example.org")
        if not isinstance(self.host, str) or not _HOST.fullmatch(self.host):
            raise ConfigError(f"host is {self.host!r:.60}; give a host name or an IP address")
        if not isinstance(self.ollama_version, str) or not _VERSION.fullmatch(self.ollama_version):
            raise ConfigError(f"ollama_version is {self.ollama_version!r:.60}; give three numbers, as 0.12.6")
        if not isinstance(self.limits, str) or (self.limits and not _REDIS.match(self.limits)):
            raise ConfigError(
                f"limits is {shown_url(str(self.limits))!r:.60}; give the address of a Redis, redis://HOST:PORT/DB"
            )
        if self.milvus_uri != "":
            require_milvus_uri(self.milvus_uri)
        if self.engine.queue_limit != self.queue_limit:
            raise ConfigError(
                f"engine.queue_limit is {self.engine.queue_limit} and queue_limit {self.queue_limit}; "
                "set queue_limit only"
            )

    def _check_reach(self) -> None:
        for name, wanted in PATHS.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Path) or "\0" in str(value)):
                raise ConfigError(f"{name} is {value!r:.60}; give {wanted}")
        _check.flag("insecure", self.insecure)
        _check.flag("behind_proxy", self.behind_proxy)
        if not isinstance(self.root_path, str) or not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(f"root_path is {self.root_path!r:.60}; give it as /name, without a slash at its end")
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise ConfigError(f"{given} is given and {missing} is not; TLS needs both")
        if self.keys is None and not self.insecure and not self.is_loopback:
            raise ConfigError(
                f"host is {self.host}, which other machines can reach, and there are no API keys: anybody could use "
                "the models; give --keys FILE.toml (see `kvarn keys new`), or --insecure if that is meant"
            )


def make_config(values: Mapping[str, Any]) -> ServerConfig:
    """A ServerConfig from values by name; `engine` and `tiers` may be plain tables."""
    known = {one.name for one in fields(ServerConfig)}
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"there is no setting {unknown[0]!r:.60}; {meant(unknown[0], known)}")
    given = dict(values)
    limit = given.get("queue_limit", DEFAULT_QUEUE_LIMIT)
    _check.integer("queue_limit", limit, *_WHOLE["queue_limit"])
    engine = given.get("engine", {})
    if not isinstance(engine, EngineConfig):
        given["engine"] = _engine(engine, limit)
    if "tiers" in given and not all(isinstance(tier, Tier) for tier in given["tiers"].values()):
        given["tiers"] = read_tiers(given["tiers"])
    for name in _TEXTS:
        if isinstance(given.get(name), list):
            given[name] = tuple(given[name])
    for name in PATHS:
        if isinstance(given.get(name), str):
            given[name] = _path(name, given[name])
    return ServerConfig(**given)


def _engine(table: Mapping[str, Any], queue_limit: int) -> EngineConfig:
    known = {one.name for one in fields(EngineConfig)}
    if unknown := sorted(set(table) - known):
        raise ConfigError(f"there is no setting 'engine.{unknown[0]:.60}'; {meant(unknown[0], known)}")
    if "queue_limit" in table:
        raise ConfigError("engine.queue_limit follows queue_limit; set that one")
    return EngineConfig(**{"policy": "priority", **table, "queue_limit": queue_limit})


def meant(name: str, known: Iterable[str]) -> str:
    """What to write instead of a name that is none."""
    nearest = get_close_matches(name[:60], list(known), n=1)
    hint = f"is {nearest[0]} meant? " if nearest else ""
    return f"{hint}`kvarn config explain` lists them"


def _path(name: str, text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{name} is {text!r:.60}, and there is no such user here; write the whole path") from None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_texts(name: str, value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(one, str) and one for one in value):
        raise ConfigError(f"{name} is {value!r:.60}; give a list of texts")
    if len(set(value)) < len(value):
        raise ConfigError(f"{name} has {max(value, key=value.count)!r:.60} twice; name each once")
