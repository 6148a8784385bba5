"""Which block holds the K and V of which tokens: chained block hashes and the index over them.

    root(tenant) ──tokens of block 0──> digest 0 ──tokens of block 1──> digest 1 ──> ...

A digest stands for a tenant and all tokens up to the end of its block. It is keyed blake2b: without the key, which
each process draws anew, no client can make two texts collide or guess what another tenant has sent.
Knows tokens and block ids; does not know reference counts.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first num_tokens of the tokens looked up lie in these blocks. Good until the cache is changed.

    num_matched: how many lie in blocks at all; with recurrent layers num_tokens may be less, for lack of a snapshot.
    """

    num_tokens: int
    block_ids: tuple[int, ...]
    tenant: str = ""
    digests: tuple[bytes, ...] = field(default=(), repr=False)
    num_matched: int = 0


class BlockHasher:
    """Digests of blocks of block_size tokens."""

    def __init__(self, block_size: int, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else key
        self._block_size = block_size
        self._pack = struct.Struct(f"<{block_size}i").pack

    def root(self, tenant: str) -> bytes:
        """The parent of a tenant's first blocks."""
        return self._digest(tenant.encode("utf-8", "surrogatepass"), b"tenant")

    def chain(self, parent: bytes, token_ids: Sequence[int], start: int, stop: int) -> Iterator[bytes]:
        """Digest the blocks that end at or before position stop; start is a multiple of the block size."""
        size = self._block_size
        for end in range(start + size, stop + 1, size):
            parent = self._digest(parent + self._pack(*token_ids[end - size : end]), b"block")
            yield parent

    def _digest(self, content: bytes, kind: bytes) -> bytes:
        # `person` keeps the name of a tenant from ever hashing like a block.
        return blake2b(content, digest_size=DIGEST_BYTES, key=self._key, person=kind).digest()


class PrefixIndex:
    """Digest to block and back. One block per digest, one digest per block."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    @property
    def digests(self) -> KeysView[bytes]:
        return self._blocks.keys()

    def find(self, digest: bytes) -> int | None:
        return self._blocks.get(digest)

    def digest_of(self, block_id: int) -> bytes | None:
        return self._digests.get(block_id)

    def add(self, digest: bytes, block_id: int) -> None:
        """Make a block findable; neither it nor the digest may be known yet."""
        assert digest not in self._blocks, "an equal block is already published"
        assert block_id not in self._digests, f"block {block_id} is already published as something else"
        self._blocks[digest] = block_id
        self._digests[block_id] = digest

    def remove(self, block_id: int) -> None:
        """Make a block unfindable; nothing happens to one that is not published."""
        digest = self._digests.pop(block_id, None)
        if digest is not None:
            del self._blocks[digest]

    def check(self, cacheable_ids: Iterable[int]) -> None:
        """Assert that both directions agree and that exactly the given blocks are published."""
        assert self._blocks == {digest: block_id for block_id, digest in self._digests.items()}, "the index is torn"
        assert self._digests.keys() == set(cacheable_ids), "published and cacheable blocks disagree"
