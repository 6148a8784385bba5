"""API keys: hashed at rest in a TOML file that is read again when it changes.

A key itself is known to its owner only. The file has SHA-256 digests: a key is 256 random bits, so it cannot be guessed
and needs no salt. Knows no HTTP beyond the values of two headers.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kvarn.checks import why_unreadable
from kvarn.errors import AuthError, ConfigError
from kvarn.server.access.keyfile import AnyEntry, KeyEntry, SkippedEntry, read_keys, valid_keys
from kvarn.server.access.priority_semaphore import Claim
from kvarn.server.access.tiers import DEFAULT_TIERS, UNLIMITED, Tier, unknown_tier

log = logging.getLogger("kvarn.server.keys")

RELOAD_INTERVAL_S = 0.5  # between two checks of the file: a revoked key works no longer than this
BEARER = re.compile(rb"bearer +([^ ]+)", re.IGNORECASE)
# RFC 6750 calls it b64token; nothing else can be a key, so nothing else is hashed.
KEY = re.compile(rb"[A-Za-z0-9._~+/-]{1,256}={0,4}")


@dataclass(frozen=True, slots=True)
class Principal:
    """On whose behalf a request runs."""

    key_id: str  # the key's name; never the key
    tier: Tier
    tenant: str  # salts the prefix cache: keys of one group share what they computed, others do not
    fingerprint: str = ""  # of this very key: another one of the same name has another; "": there are no keys
    is_admin: bool = False  # may change what the server offers

    @property
    def claim(self) -> Claim:
        """Its place among those that wait for what all keys share."""
        return Claim(self.tier.priority, self.fingerprint or None)


ANONYMOUS = Principal("anonymous", UNLIMITED, "")


@dataclass(frozen=True, slots=True)
class _Keys:
    """The file as last read."""

    entries: tuple[KeyEntry, ...]
    signature: tuple[int, int, int]  # of the file: when, how long, which


class KeyRing:
    """All keys of one file; without a file every caller is the anonymous principal."""

    def __init__(self, path: Path | None, tiers: Mapping[str, Tier] | None = None) -> None:
        """Read the file, or raise why it cannot be read; an entry that is wrong opens nothing and is logged."""
        self._path = path
        self._tiers = dict(DEFAULT_TIERS if tiers is None else tiers)
        self._keys = _Keys((), (0, 0, 0))
        self._checked_at = time.monotonic()
        if path is not None:
            self._keys = self._read(path)
            if not any(self._opens(entry) for entry in self._keys.entries):
                log.warning("no key in %s is valid, all requests are refused; make one with `kvarn keys new`", path)

    @property
    def is_open(self) -> bool:
        """Whether every caller is accepted, because there are no keys at all."""
        return self._path is None

    def authenticate(self, authorization: Sequence[bytes] = (), api_key: Sequence[bytes] = ()) -> Principal:
        """The principal for the values of the Authorization and x-api-key headers, or AuthError."""
        if self.is_open:
            return ANONYMOUS
        self.refresh()
        entry = self._find(_given_key(authorization, api_key))
        if entry is None or entry.is_revoked or entry.has_expired(datetime.now().astimezone()):
            # The same message for all of them: it must not tell whether a key was ever valid.
            raise AuthError("this API key is not known here, or no longer valid; give another", reason="invalid")
        tier = self._tiers.get(entry.tier)
        if tier is None:
            raise AuthError(f"tier {entry.tier!r:.80} of this key is not served here", reason="forbidden")
        return Principal(entry.name, tier, entry.group, entry.digest.hex(), entry.is_admin)

    def of_fingerprint(self, fingerprint: str) -> Principal | None:
        """The principal of a key that was authenticated before, if it is still valid: for what goes on without it."""
        if self.is_open:
            return ANONYMOUS if fingerprint == ANONYMOUS.fingerprint else None
        self.refresh()
        for entry in self._keys.entries:
            if entry.digest.hex() == fingerprint and self._opens(entry):
                return Principal(entry.name, self._tiers[entry.tier], entry.group, fingerprint, entry.is_admin)
        return None

    def refresh(self) -> None:
        """Read the file again if it has changed; one that cannot be read leaves the keys as they were."""
        assert self._path is not None
        now = time.monotonic()
        if now - self._checked_at < RELOAD_INTERVAL_S:
            return
        self._checked_at = now
        try:
            if _signature(self._path) == self._keys.signature:
                return
            if not self._path.is_file():  # a pipe would keep all requests waiting
                raise ConfigError("it is no regular file any more")
            self._keys = self._read(self._path)
            log.info("%d API keys are valid now", len(self._keys.entries))
        except (OSError, ConfigError) as error:
            log.error("the API keys were not read again, those from before stay valid: %s", error)
        except Exception as error:  # whatever is wrong with the file must not fail requests with a valid key
            log.error("the API keys were not read again, those from before stay valid: %s", type(error).__name__)

    def _find(self, key: bytes) -> KeyEntry | None:
        """Compare with every key, so that the time it takes reveals nothing about any of them."""
        digest = hashlib.sha256(key).digest()
        found: KeyEntry | None = None
        for entry in self._keys.entries:
            is_equal = hmac.compare_digest(entry.digest, digest)
            found = (found, entry)[is_equal]
        return found

    def _read(self, path: Path) -> _Keys:
        # The signature first: a change while reading is then seen the next time.
        try:
            signature = _signature(path)
        except (OSError, ValueError) as error:  # ValueError: a path with NUL
            why = why_unreadable(path, error)
            raise ConfigError(f"the API keys {path} cannot be read: {why}; make them with `kvarn keys new`") from error
        entries = read_keys(path)
        for entry in entries:
            if (reason := self._why_refused(entry)) is not None:
                log.error("key %r opens nothing: %s", entry.name, reason)
        return _Keys(tuple(valid_keys(entries)), signature)

    def _opens(self, entry: KeyEntry) -> bool:
        is_valid = not entry.is_revoked and not entry.has_expired(datetime.now().astimezone())
        return is_valid and entry.tier in self._tiers

    def _why_refused(self, entry: AnyEntry) -> str | None:
        """What is wrong with an entry; nothing is with one that was revoked."""
        if isinstance(entry, SkippedEntry):
            return entry.reason
        if entry.is_revoked or entry.tier in self._tiers:
            return None
        return f"{unknown_tier(entry.tier, self._tiers)} or configure it under [tiers]"


def _given_key(authorization: Sequence[bytes], api_key: Sequence[bytes]) -> bytes:
    if not authorization and not api_key:
        raise AuthError("no API key was given; send it as `Authorization: Bearer KEY`", reason="missing")
    if len(authorization) > 1 or len(api_key) > 1:
        raise AuthError("more than one API key was given; send one", reason="invalid")
    given = {*(_bearer(value) for value in authorization), *api_key}
    if len(given) > 1:
        raise AuthError("Authorization and x-api-key differ; send one of them", reason="invalid")
    (key,) = given
    if not KEY.fullmatch(key):
        raise AuthError("what was given is no API key: letters, digits and -._~+/ make one", reason="invalid")
    return key


def _bearer(value: bytes) -> bytes:
    match = BEARER.fullmatch(value)
    if match is None:
        raise AuthError("the Authorization header is not `Bearer KEY`", reason="invalid")
    return match[1]


def _signature(path: Path) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size, found.st_ino
