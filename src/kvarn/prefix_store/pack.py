"""A pack: one file of blocks of one model and one tenant, written once from front to end.

    page 0        | magic, version, slots, bytes of a block, model tag, tenant tag, nonce, MAC
    entries       | 64 bytes for each slot: digest of the prefix, MAC of digest and content; zeros: nothing there
    slot 0, 1 ... | contents, each beginning on a page

A block is there once its entry is, which is written after the content has reached the disk. Entries lie together, so
that all digests of a pack are one read. Knows bytes; which pack gets what is decided in store.py.
"""

from __future__ import annotations

import hmac
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvarn.prefix_store.keys import TAG_BYTES, CacheKeys

UInt8 = npt.NDArray[np.uint8]

SUFFIX = ".pack"
PAGE = 4096
DIGEST_BYTES = 32
MAX_SLOTS = 4096
VERSION = 1
_MAGIC = b"KVARNPFX"
_HEAD = struct.Struct(f"<8sIIQ{TAG_BYTES}s{TAG_BYTES}s16s")
_MAC_BYTES = 32
_ENTRY_BYTES = DIGEST_BYTES + _MAC_BYTES
_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class NotAPack(Exception):
    """A file is foreign, cut, changed, or of another version; the message says which."""


@dataclass(frozen=True, slots=True)
class PackHead:
    """What a pack says about itself."""

    num_slots: int
    block_bytes: int
    model_tag: bytes
    tenant_tag: bytes
    nonce: bytes = b""

    @property
    def stride(self) -> int:
        return _pages(self.block_bytes)

    @property
    def data_start(self) -> int:
        return PAGE + _pages(self.num_slots * _ENTRY_BYTES)

    @property
    def max_bytes(self) -> int:
        """With all slots filled."""
        return self.data_start + self.num_slots * self.stride

    def offset(self, slot: int) -> int:
        return self.data_start + slot * self.stride

    def entry_offset(self, slot: int) -> int:
        return PAGE + slot * _ENTRY_BYTES

    def packed(self, key: bytes) -> bytes:
        fields = (_MAGIC, VERSION, self.num_slots, self.block_bytes, self.model_tag, self.tenant_tag, self.nonce)
        head = _HEAD.pack(*fields)
        return (head + _mac(key, b"head", head)).ljust(PAGE, b"\0")


def open_pack(path: Path) -> int:
    """A descriptor to read a pack with; OSError where there is none."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | _PLAIN)


def read_head(descriptor: int, keys: CacheKeys) -> PackHead:
    """The head of an open pack, or NotAPack."""
    page = os.pread(descriptor, PAGE, 0)
    if len(page) < PAGE or not page.startswith(_MAGIC):
        raise NotAPack("it is no pack")
    _, version, num_slots, block_bytes, model_tag, tenant_tag, nonce = _HEAD.unpack_from(page)
    if version != VERSION:
        raise NotAPack(f"it has version {version}, this is {VERSION}")
    head = PackHead(num_slots, block_bytes, model_tag, tenant_tag, nonce)
    if not hmac.compare_digest(page, head.packed(keys.block_key(model_tag, tenant_tag))):
        raise NotAPack("its head was changed, or it was made with another key")
    return head


def read_digests(descriptor: int, head: PackHead) -> dict[bytes, int]:
    """The slot of each digest; what they say is believed only when a block is read."""
    table = os.pread(descriptor, head.num_slots * _ENTRY_BYTES, PAGE)
    num_whole = min(len(table) // _ENTRY_BYTES, (os.fstat(descriptor).st_size - head.data_start) // head.stride)
    raw = np.frombuffer(table, np.uint8, max(0, num_whole) * _ENTRY_BYTES).reshape(-1, _ENTRY_BYTES)
    digests = np.ascontiguousarray(raw[:, :DIGEST_BYTES]).tobytes()
    step = DIGEST_BYTES
    return {digests[step * slot : step * slot + step]: slot for slot in np.flatnonzero(raw.any(axis=1)).tolist()}


def read_block(
    descriptor: int, head: PackHead, slot: int, digest: bytes, key: bytes, *, into: UInt8 | None = None
) -> UInt8 | None:
    """The content of a slot, if it is what was written for this digest; None: it is not. into: where it may lie."""
    content = np.empty(head.block_bytes, np.uint8) if into is None else into
    entry = os.pread(descriptor, _ENTRY_BYTES, head.entry_offset(slot))
    num_read = os.preadv(descriptor, [content.data], head.offset(slot))
    if num_read != head.block_bytes:
        return None
    expected = digest + _mac(key, b"block", digest, content.data)
    return content if hmac.compare_digest(entry, expected) else None


class PackFile:
    """A new pack while it is written; open only then."""

    def __init__(self, path: Path, head: PackHead, key: bytes) -> None:
        self.path = path
        self.head = PackHead(head.num_slots, head.block_bytes, head.model_tag, head.tenant_tag, secrets.token_bytes(16))
        self.num_filled = 0
        self._key = key
        with self._opened(os.O_CREAT | os.O_EXCL) as descriptor:
            _write(descriptor, self.head.packed(key), 0)
            os.ftruncate(descriptor, self.head.data_start)
        sync_folder(path.parent)

    @property
    def num_free(self) -> int:
        return self.head.num_slots - self.num_filled

    @property
    def is_there(self) -> bool:
        """Nobody has deleted it."""
        return self.path.exists()

    def append(self, blocks: Sequence[tuple[bytes, UInt8]]) -> int:
        """Write (digest, content) to the next slots and then, once they are safe, their entries; the first slot."""
        first, entries = self.num_filled, b""
        assert len(blocks) <= self.num_free
        with self._opened() as descriptor:
            for slot, (digest, content) in enumerate(blocks, first):
                assert content.nbytes == self.head.block_bytes
                _write(descriptor, content.data, self.head.offset(slot))
                entries += digest + _mac(self._key, b"block", digest, content.data)
            os.ftruncate(descriptor, self.head.offset(first + len(blocks)))
            os.fdatasync(descriptor)
            _write(descriptor, entries, self.head.entry_offset(first))
            os.fdatasync(descriptor)
        self.num_filled += len(blocks)
        return first

    @contextmanager
    def _opened(self, flags: int = 0) -> Iterator[int]:
        descriptor = os.open(self.path, os.O_RDWR | flags | _PLAIN, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make names in a folder safe."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, content: bytes | memoryview, offset: int) -> None:
    done, view = 0, memoryview(content).cast("B")
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def _mac(key: bytes, purpose: bytes, *parts: bytes | memoryview) -> bytes:
    mac = blake2b(key=key, person=purpose, digest_size=_MAC_BYTES)
    for part in parts:
        mac.update(part)
    return mac.digest()


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
