"""The secret of a prefix cache on disk, and the keys made from it: of hashes, of models, of tenants.

Whoever does not have it can neither make a block that is accepted nor tell whose a block is. Knows no block.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from kvarn.prefix_store.failures import StoreUnavailable

KEY_FILE = "key"
KEY_BYTES = 32
TAG_BYTES = 16  # of a model or a tenant, in names of folders and in packs
_MAGIC = b"kvarn prefix key 1\n"


@dataclass(frozen=True, slots=True)
class CacheKeys:
    """All keys of one folder."""

    secret: bytes = field(repr=False)

    @property
    def hash_key(self) -> bytes:
        """That of the digests of prefixes: they stay the same over restarts."""
        return self._derived(b"digests", b"")

    def model_tag(self, identity: bytes) -> bytes:
        """What stands on disk for everything that the bytes of a block depend on."""
        return self._derived(b"model", identity)[:TAG_BYTES]

    def tenant_tag(self, tenant: str) -> bytes:
        """What stands on disk for a tenant; its salts (after a NUL, see the server's tenant_of) have the same one."""
        return self._derived(b"tenant", tenant.partition("\0")[0].encode("utf-8", "surrogatepass"))[:TAG_BYTES]

    def block_key(self, model_tag: bytes, tenant_tag: bytes) -> bytes:
        """That of the MACs of one tenant's blocks of one model."""
        return self._derived(b"blocks", model_tag + tenant_tag)

    def note_key(self) -> bytes:
        """That of the MACs of small notes beside the packs."""
        return self._derived(b"notes", b"")

    def _derived(self, purpose: bytes, content: bytes) -> bytes:
        return blake2b(content, key=self.secret, person=purpose, digest_size=KEY_BYTES).digest()


def read_keys(folder: Path) -> CacheKeys | None:
    """The keys of a folder; None: it has none yet."""
    try:
        content = (folder / KEY_FILE).read_bytes()
    except FileNotFoundError:
        return None
    if len(content) != len(_MAGIC) + KEY_BYTES or not content.startswith(_MAGIC):
        raise StoreUnavailable(f"{folder / KEY_FILE} is not the key of a prefix cache; run `kvarn cache clear`")
    return CacheKeys(content[len(_MAGIC) :])


def make_keys(folder: Path) -> CacheKeys:
    """Draw a secret and keep it, for the owner's eyes only; where another process was faster, that one's."""
    draft = folder / f".{KEY_FILE}.{secrets.token_hex(8)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_MAGIC + secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(draft, folder / KEY_FILE)
    finally:
        draft.unlink()
    found = read_keys(folder)
    if found is None:
        raise StoreUnavailable(f"{folder / KEY_FILE} vanished while it was made")
    return found
