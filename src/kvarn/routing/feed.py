"""The lines in which a replica tells a router what it is, what it holds and how busy it is.

    router  ──nonce, proof──>  replica
    router  <──hello: nonce, identity──  replica        every line: its proof, a space, JSON with its number
    router  <──frame, frame, ...──────────┘

Proofs are MACs under a key of this one conversation, so no line can be forged, nor one of another conversation be sent
again; a number that is missing or comes twice means that everything must be told anew. No clock is compared.
"""

from __future__ import annotations

import hmac
import json
import secrets
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvarn.errors import RequestError
from kvarn.routing.changes import PrefixChange, pack_changes, unpack_changes
from kvarn.routing.cluster_key import ClusterKey, keyed_mac

PATH = "/v1/replica/events"
PROOF_HEADER = "x-kvarn-cluster"
MARKS_HEADER = "x-kvarn-prefix"
NONCE_BYTES = 16
MAX_LINE_BYTES = 256 << 20  # of a replica that tells everything: 8 million blocks
MAX_LOAD = 2**40


class FeedError(RequestError):
    """What came is no line of a replica with this key, or not the next one."""


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """What replicas of one cluster must agree on, and the one thing in which each differs."""

    version: str
    models: Mapping[str, Mapping[str, Any]]  # by id: digest of the weights' file, tokens per block
    tag: str = ""  # its own: ids that it gives begin with it

    def differences(self, other: ReplicaIdentity) -> list[str]:
        """What another one has otherwise, in words; a digest that only one of them knows is no difference."""
        found = [] if self.version == other.version else [f"version {self.version} and {other.version}"]
        if self.models.keys() != other.models.keys():
            found.append(f"models {', '.join(sorted(self.models))} and {', '.join(sorted(other.models))}")
        for name in sorted(self.models.keys() & other.models.keys()):
            mine, theirs = self.models[name], other.models[name]
            for about in sorted(mine.keys() & theirs.keys()):
                if None not in (mine[about], theirs[about]) and mine[about] != theirs[about]:
                    found.append(f"{about} of {name} {_shown(mine[about])} and {_shown(theirs[about])}")
        return found


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """How busy a replica says it is."""

    prompt_tokens: int = 0  # that wait to be computed
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class FeedFrame:
    """One line after the first."""

    phase: str
    load: ReplicaLoad = ReplicaLoad()
    changes: tuple[PrefixChange, ...] | bytes = ()  # bytes: packed already
    is_all: bool = False  # what was told before does not count any more
    names: tuple[str, ...] | None = None  # of adapters and models that others may not have; None: as before


@dataclass(slots=True)
class FeedWriter:
    """The replica's end of one conversation."""

    key: ClusterKey
    router_nonce: bytes
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    _number: int = 0

    @classmethod
    def answering(cls, key: ClusterKey, proof: str) -> FeedWriter | None:
        """For a router's proof; None: it has another key, or none."""
        nonce, _, mac = proof.partition(":")
        try:
            nonce_bytes, mac_bytes = bytes.fromhex(nonce), bytes.fromhex(mac)
        except ValueError:
            return None
        is_router = len(nonce_bytes) == NONCE_BYTES and key.is_mac(mac_bytes, "router", nonce_bytes)
        return cls(key, nonce_bytes) if is_router else None

    def hello(self, identity: ReplicaIdentity) -> bytes:
        fields = {"nonce": self.nonce.hex(), "version": identity.version, "models": dict(identity.models)}
        return self._line(fields | {"tag": identity.tag})

    def frame(self, frame: FeedFrame) -> bytes:
        changes = frame.changes if isinstance(frame.changes, bytes) else pack_changes(frame.changes)
        load = [frame.load.prompt_tokens, frame.load.running, frame.load.waiting]
        fields: dict[str, Any] = {"phase": frame.phase, "load": load}
        if frame.is_all or changes:
            fields |= {"all": frame.is_all, "changes": b64encode(changes).decode()}
        if frame.names is not None:
            fields["names"] = frame.names
        return self._line(fields)

    def _line(self, fields: Mapping[str, Any]) -> bytes:
        text = json.dumps({"number": self._number, **fields}, separators=(",", ":")).encode()
        self._number += 1
        return _proof(self.key, self.router_nonce, self.nonce, text).hex().encode() + b" " + text + b"\n"


class FeedReader:
    """The router's end."""

    def __init__(self, key: ClusterKey) -> None:
        self._key = key
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._replica_nonce = b""
        self._number = 0

    @property
    def proof(self) -> str:
        """What to ask with."""
        return f"{self._nonce.hex()}:{self._key.mac('router', self._nonce).hex()}"

    def hello(self, line: bytes) -> ReplicaIdentity:
        """Read the first line."""
        mac, text = _split(line)
        fields = _fields(text)
        try:
            self._replica_nonce = bytes.fromhex(fields["nonce"])
            models = {str(k): dict(v) for k, v in fields["models"].items()}
            identity = ReplicaIdentity(str(fields["version"]), models, str(fields["tag"]))
        except (LookupError, TypeError, ValueError, AttributeError):
            raise FeedError("the first line of a replica is not what it should be") from None
        self._check(mac, text, fields)
        return identity

    def frame(self, line: bytes) -> FeedFrame:
        """Read one of the others; FeedError: it is forged, old, or one before it is missing."""
        mac, text = _split(line)
        fields = _fields(text)
        self._check(mac, text, fields)
        try:
            load = ReplicaLoad(*(_count(value) for value in fields["load"]))
            changes = tuple(unpack_changes(b64decode(fields.get("changes", ""), validate=True)))
            names = None if fields.get("names") is None else tuple(map(str, fields["names"]))
            return FeedFrame(str(fields["phase"]), load, changes, bool(fields.get("all")), names)
        except (LookupError, TypeError, ValueError):
            raise FeedError("a line of a replica is not what it should be") from None

    def _check(self, mac: bytes, text: bytes, fields: Mapping[str, Any]) -> None:
        if not hmac.compare_digest(mac, _proof(self._key, self._nonce, self._replica_nonce, text)):
            raise FeedError("a line has no proof of the cluster key; is somebody else at this address?")
        if fields.get("number") != self._number:
            raise FeedError(f"line {self._number} is missing, {fields.get('number')!r:.20} came")
        self._number += 1


def total_load(loads: Iterable[ReplicaLoad]) -> ReplicaLoad:
    """Of all engines of a replica."""
    sums = [(one.prompt_tokens, one.running, one.waiting) for one in loads]
    return ReplicaLoad(*map(sum, zip(*sums, strict=True))) if sums else ReplicaLoad()


def _proof(key: ClusterKey, router_nonce: bytes, replica_nonce: bytes, text: bytes) -> bytes:
    return keyed_mac(key.derive("feed"), router_nonce, replica_nonce, text)


def _split(line: bytes) -> tuple[bytes, bytes]:
    mac, _, text = line.rstrip(b"\n").partition(b" ")
    try:
        return bytes.fromhex(mac.decode("ascii")), text
    except (ValueError, UnicodeDecodeError):
        raise FeedError("a line of a replica has no proof") from None


def _fields(text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise FeedError("a line of a replica is not JSON") from None
    if not isinstance(fields, dict):
        raise FeedError("a line of a replica is no JSON object")
    return fields


def _count(value: object) -> int:
    """A number that may be wrong, but not beyond all bounds: what a replica says of itself moves its own load only."""
    if not isinstance(value, int):
        raise ValueError("a load is no whole number")
    return max(0, min(value, MAX_LOAD))


def _shown(value: object) -> str:
    return str(value)[:16]
