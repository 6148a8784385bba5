"""A LoRA adapter as data: the low-rank pairs of the matrices it changes, under their canonical names.

Knows arrays and hashes; does not know files, names that users give, or who computes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

DIGEST_BYTES = 32
EMBEDDING, HEAD = "token_embd", "output"


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """y += scale * b (a x) beside one matrix. Of the embedding, a x is column `token` of a."""

    a: Float32  # (rank, columns)
    b: Float32  # (rows, rank)
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)

    @property
    def num_values(self) -> int:
        return self.a.size + self.b.size


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """All pairs of an adapter, by the name of the matrix without `.weight`, in the base's order of rows."""

    pairs: Mapping[str, LowRank]

    @property
    def num_values(self) -> int:
        return sum(pair.num_values for pair in self.pairs.values())

    @property
    def num_bytes(self) -> int:
        return 4 * self.num_values

    def digest(self) -> bytes:
        """A hash of every value and scale: what stands for the adapter in the prefix cache."""
        state = blake2b(digest_size=DIGEST_BYTES, person=b"lora")
        for name, pair in sorted(self.pairs.items()):
            state.update(struct.pack("<H", len(name)) + name.encode())
            state.update(struct.pack("<dqqq", pair.scale, pair.rank, pair.a.shape[1], len(pair.b)))
            state.update(np.ascontiguousarray(pair.a).data)
            state.update(np.ascontiguousarray(pair.b).data)
        return state.digest()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AdapterUse:
    """What one request adds to the base: an adapter in its backend, times a factor. It lives as long as the request."""

    handle: Any  # of Backend.prepare_adapter
    digest: bytes
    scale: float = 1.0
    changes_head: bool = False


def uses_digest(uses: Sequence[AdapterUse]) -> bytes:
    """A hash of several adapters and their factors; empty for none."""
    if not uses:
        return b""
    content = b"".join(use.digest + struct.pack("<d", use.scale) for use in uses)
    return blake2b(content, digest_size=DIGEST_BYTES, person=b"lora uses").digest()


def prefix_salt(tenant: str, uses: Sequence[AdapterUse]) -> str:
    """What the prefix cache knows a request's blocks by: the tenant, and behind two NULs the hash of its adapters.

    No tenant has two NULs in a row, so that none of them is the salt of another's adapter.
    """
    return f"{tenant}\0\0{uses_digest(uses).hex()}" if uses else tenant
