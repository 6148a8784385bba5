"""The secret that replicas and routers of one cluster share: what proves membership and makes digests comparable.

Every purpose has a key of its own, derived from the secret, which itself is never sent. Knows bytes only.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b
from pathlib import Path

from kvarn.checks import why_unreadable
from kvarn.errors import ConfigError

MIN_BYTES = 32
MAX_BYTES = 4096
MAC_BYTES = 16


class ClusterKey:
    """Derives keys and MACs; two of them agree if they were read from the same secret."""

    def __init__(self, secret: bytes) -> None:
        if not MIN_BYTES <= len(secret) <= MAX_BYTES:
            raise ConfigError(
                f"the cluster key has {len(secret):,} bytes; give {MIN_BYTES} to {MAX_BYTES:,} random ones, as of "
                "`openssl rand -hex 32`"
            )
        self._key = blake2b(secret, digest_size=32, person=b"kvarn cluster").digest()

    def __repr__(self) -> str:
        return "ClusterKey(...)"

    @classmethod
    def read(cls, path: Path) -> ClusterKey:
        """Read the file of `--cluster-key`; white space at both ends does not count."""
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 2)
        except (OSError, ValueError) as error:  # ValueError: a path with NUL
            raise ConfigError(
                f"the cluster key {path} cannot be read: {why_unreadable(path, error)}; make one with "
                f"`openssl rand -hex 32 > {path}` and give it to every replica and router"
            ) from None
        return cls(data.strip())

    def derive(self, purpose: str) -> bytes:
        """A key of 32 bytes for one purpose."""
        return blake2b(purpose.encode(), digest_size=32, key=self._key).digest()

    def mac(self, purpose: str, *parts: bytes) -> bytes:
        """The proof that who says these parts has the secret."""
        return keyed_mac(self.derive(purpose), *parts)

    def is_mac(self, mac: bytes, purpose: str, *parts: bytes) -> bool:
        """Whether a proof is right; takes the same time for every wrong one."""
        return hmac.compare_digest(mac, self.mac(purpose, *parts))


def keyed_mac(key: bytes, *parts: bytes) -> bytes:
    """Of parts whose lengths count too."""
    mac = blake2b(digest_size=MAC_BYTES, key=key)
    for part in parts:
        mac.update(len(part).to_bytes(8, "little") + part)
    return mac.digest()
