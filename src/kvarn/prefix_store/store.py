"""The blocks of one model on disk: which there are, their contents when they are wanted, and new ones.

Nothing here raises for what a disk or a file does: it is told once, and costs a miss. Knows digests and bytes, never
tokens.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from kvarn.prefix_store.failures import StoreUnavailable
from kvarn.prefix_store.folder import StoredPack, StoreFolder
from kvarn.prefix_store.pack import (
    MAX_SLOTS,
    SUFFIX,
    NotAPack,
    PackFile,
    PackHead,
    UInt8,
    open_pack,
    read_block,
    read_digests,
    read_head,
)

PACK_BYTES = 32 << 20  # what is evicted at once; ...
MIN_PACKS = 8  # ... at most this part of the limit
MAX_OPEN_PACKS = 1024  # of as many tenants; others begin a new one
PAUSE_S = 30.0  # after a write failed
ABOUT_FILE = "about.json"


@dataclass(frozen=True, slots=True)
class BlockToStore:
    """A block on its way to the disk."""

    digest: bytes
    tenant: str
    content: UInt8


class BlockStore:
    """Digest to content, for blocks of one identity."""

    def __init__(self, folder: StoreFolder, identity: bytes, block_bytes: int, about: Mapping[str, str]) -> None:
        """about: what `kvarn cache ls` shows of the model."""
        self.folder = folder
        self.block_bytes = block_bytes
        self.num_read = self.num_written = 0  # blocks
        self._about = dict(about)
        self._paused_until = 0.0
        self._model_tag = folder.keys.model_tag(identity)
        self._path = folder.path / self._model_tag.hex()
        self._index: dict[bytes, tuple[StoredPack, int]] = {}
        self._open_packs: OrderedDict[bytes, tuple[PackFile, StoredPack]] = OrderedDict()  # by tenant tag
        self._num_slots = max(
            1, min(MAX_SLOTS, folder.max_bytes // MIN_PACKS // block_bytes, PACK_BYTES // block_bytes)
        )
        smallest = PackHead(1, block_bytes, b"", b"").max_bytes
        if not folder.make_room(0) or smallest > folder.max_bytes // 2:
            raise StoreUnavailable(f"{folder.max_bytes:,} bytes hold too few blocks of {block_bytes:,} bytes")
        self._num_takeovers = folder.num_takeovers
        for pack in folder.packs_below(self._path):
            self._take_in(pack)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Of all packs of this model."""
        return sum(pack.num_bytes for pack in self.folder.packs_below(self._path))

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._index

    def count(self, digests: Sequence[bytes]) -> int:
        """How many of the first of these are there."""
        return next((i for i, digest in enumerate(digests) if digest not in self._index), len(digests))

    def read(self, digest: bytes, into: UInt8 | None = None) -> UInt8 | None:
        """The content of a block, if it is there and is what was written. into: where it may lie."""
        place = self._index.get(digest)
        if place is None:
            return None
        pack, slot = place
        assert pack.head is not None
        try:
            descriptor = open_pack(pack.path)
            try:
                key = self.folder.keys.block_key(self._model_tag, pack.head.tenant_tag)
                content = read_block(descriptor, pack.head, slot, digest, key, into=into)
            finally:
                os.close(descriptor)
        except OSError as error:
            self.folder.failures.tell("a pack cannot be read, its blocks are computed again", error)
            self.folder.forget(pack)
            return None
        if content is None:
            self.folder.failures.tell("a block was changed or cut and is computed again", pack.path.name)
            with self.folder.lock:
                self._index.pop(digest, None)
            return None
        with self.folder.lock:
            self.num_read += 1
        return content

    def touch(self, digests: Sequence[bytes]) -> None:
        """These were used, each with all before it: the first ones last, so that they go last."""
        places = [self._index.get(digest) for digest in reversed(digests)]
        for pack in dict.fromkeys(place[0] for place in places if place is not None):
            self.folder.touch(pack)

    def may_write(self) -> bool:
        """Whether append() may keep anything at all; what another process left is found once that has ended."""
        if not self.folder.may_write():
            return False
        if self._num_takeovers != self.folder.num_takeovers:
            self._num_takeovers = self.folder.num_takeovers
            for pack in self.folder.packs_below(self._path):
                if pack.index is None:
                    self._take_in(pack)
        return True

    def append(self, blocks: Iterable[BlockToStore]) -> int:
        """Write blocks that are not there yet; how many were."""
        if monotonic() < self._paused_until or not self.may_write():
            return 0
        num_written = 0
        by_tenant: dict[bytes, list[BlockToStore]] = {}
        for block in blocks:
            if block.digest not in self._index:
                by_tenant.setdefault(self.folder.keys.tenant_tag(block.tenant), []).append(block)
        for tenant_tag, wanted in by_tenant.items():
            try:
                with self.folder.writing:
                    num_written += self._append(tenant_tag, wanted)
            except OSError as error:
                self._lose(tenant_tag, error)
        self.num_written += num_written
        return num_written

    def _append(self, tenant_tag: bytes, blocks: Sequence[BlockToStore]) -> int:
        num_written = 0
        while num_written < len(blocks) and not self.folder.is_read_only:
            file, pack = self._pack_of(tenant_tag)
            part = blocks[num_written : num_written + file.num_free]
            num_bytes = len(part) * file.head.stride
            if not self.folder.make_room(num_bytes):
                break
            if pack.is_gone:  # it was the last to give way
                continue
            pack.num_bytes += num_bytes  # before it is written: the limit holds at any time
            first = file.append([(block.digest, block.content) for block in part])
            with self.folder.lock:
                for slot, block in enumerate(part, first):
                    pack.digests.append(block.digest)
                    self._index[block.digest] = pack, slot
            num_written += len(part)
        return num_written

    def _pack_of(self, tenant_tag: bytes) -> tuple[PackFile, StoredPack]:
        """The pack that a tenant's next blocks go to."""
        found = self._open_packs.get(tenant_tag)
        if found is not None and found[0].num_free and not found[1].is_gone and found[0].is_there:
            self._open_packs.move_to_end(tenant_tag)
            return found
        self._close_pack(tenant_tag)
        self.folder.require_writable()
        head = PackHead(self._num_slots, self.block_bytes, self._model_tag, tenant_tag)
        folder = self._path / tenant_tag.hex()
        if not self.folder.make_room(head.data_start):
            raise OSError("the limit of bytes is too low")
        for one in (self._path, folder):
            one.mkdir(mode=0o700, exist_ok=True)
        self._write_about()
        file = PackFile(
            folder / (os.urandom(8).hex() + SUFFIX), head, self.folder.keys.block_key(self._model_tag, tenant_tag)
        )
        pack = StoredPack(file.path, head.data_start, head=file.head, index=self._index)
        self.folder.add(pack)
        while len(self._open_packs) >= MAX_OPEN_PACKS:
            self._close_pack(next(iter(self._open_packs)))
        self._open_packs[tenant_tag] = file, pack
        return file, pack

    def _close_pack(self, tenant_tag: bytes) -> None:
        found = self._open_packs.pop(tenant_tag, None)
        if found is None:
            return
        file, pack = found
        if not (file.is_there and file.num_filled):
            self.folder.delete(pack)

    def _lose(self, tenant_tag: bytes, error: OSError) -> None:
        """Writing failed: go on later with another pack, unless the whole folder is gone."""
        self._close_pack(tenant_tag)
        self._paused_until = monotonic() + PAUSE_S
        try:
            self.folder.require_writable()
        except OSError as lost:
            self.folder.stop_writing(lost)
            return
        self.folder.failures.tell("blocks could not be written", error)

    def _take_in(self, pack: StoredPack) -> None:
        """Make the blocks of a pack that another process left findable."""
        try:
            descriptor = open_pack(pack.path)
            try:
                head = read_head(descriptor, self.folder.keys)
                if (head.model_tag, head.block_bytes) != (self._model_tag, self.block_bytes):
                    raise NotAPack("it belongs to another model")
                slots = read_digests(descriptor, head)
            finally:
                os.close(descriptor)
        except (OSError, NotAPack) as error:
            self.folder.failures.tell("a pack is left out", error)
            return
        pack.head, pack.digests, pack.index = head, list(slots), self._index
        self._index.update({digest: (pack, slot) for digest, slot in slots.items()})

    def _write_about(self) -> None:
        about = self._path / ABOUT_FILE
        if not about.exists():
            about.write_text(json.dumps(self._about, indent=1) + "\n", encoding="utf-8")
            about.chmod(0o600)
