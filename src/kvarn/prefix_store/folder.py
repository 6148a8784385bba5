"""One folder of packs, of all models of a process: its key, its lock, its limit of bytes and what goes first.

    DIR/key                       the secret, 0600          DIR/lock   held by the one process that writes
    DIR/<model>/<tenant>/*.pack   names are keyed hashes    DIR/<model>/about.json, DIR/weights.json   notes

The least recently used pack goes first; a use of a block counts for those before it too, and later than for itself,
so a chain loses its end first. Knows files and their sizes, never what is in a block.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from kvarn.prefix_store.failures import FailureLog, StoreUnavailable, log
from kvarn.prefix_store.keys import CacheKeys, make_keys, read_keys
from kvarn.prefix_store.pack import SUFFIX, PackHead

LOCK_FILE = "lock"
MAX_DEFAULT_BYTES = 2 * 10**9
FREE_SHARE = 0.05
NOTE_BYTES = 1 << 16  # of the limit, for what is no pack
LOCK_AGAIN_S = 30.0  # between looks whether another process still writes
TOUCH_AFTER_S = 60.0  # a use is noted on disk at most so often, for the order after a restart


@dataclass(slots=True, eq=False)
class StoredPack:
    """A pack that counts; head, digests and index: where its blocks are found, if this process uses them."""

    path: Path
    num_bytes: int
    head: PackHead | None = None
    digests: list[bytes] = field(default_factory=list, repr=False)
    index: dict[bytes, tuple[StoredPack, int]] | None = field(default=None, repr=False)
    is_gone: bool = False
    touched_at: float = 0.0


class StoreFolder:
    """The packs of a folder by age."""

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        """Open or make a folder; StoreUnavailable where that cannot be."""
        self.path = path
        self.failures = FailureLog()
        self.lock = threading.RLock()  # of packs and of the indexes over them
        self.writing = threading.Lock()  # held from making room until it is filled: models share the limit
        self.num_evicted = self.num_takeovers = 0
        self._is_gone = False
        self._locks_again_at = time.monotonic() + LOCK_AGAIN_S
        self._packs: OrderedDict[Path, StoredPack] = OrderedDict()  # least recently used first
        try:
            _make_private(path)
            self._lock_file = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._close = weakref.finalize(self, os.close, self._lock_file)
            self._has_lock = _is_locked(self._lock_file)
            self.keys: CacheKeys = read_keys(path) or make_keys(path)
            self._find_packs()
            self.max_bytes = self._default_bytes() if max_bytes is None else max_bytes
        except OSError as error:
            raise StoreUnavailable(f"{path} cannot be used: {error.strerror or error}") from None
        if self.is_read_only:
            log.warning("prefix cache on disk: another process writes to %s; this one reads what was there", path)
        else:
            self.make_room(0)

    @property
    def is_read_only(self) -> bool:
        """Nothing is written: another process does, or the folder is gone."""
        return self._is_gone or not self._has_lock

    def may_write(self) -> bool:
        """Whether blocks can be kept; where another process wrote, look now and then whether it has ended."""
        if self.is_read_only and not self._is_gone and time.monotonic() >= self._locks_again_at:
            self._locks_again_at = time.monotonic() + LOCK_AGAIN_S
            try:
                if _is_locked(self._lock_file):
                    self._take_over()
            except (OSError, StoreUnavailable) as error:
                self.stop_writing(error)
        return not self.is_read_only

    @property
    def num_bytes(self) -> int:
        with self.lock:
            return sum(pack.num_bytes for pack in self._packs.values())

    @property
    def num_packs(self) -> int:
        return len(self._packs)

    def packs_below(self, folder: Path) -> Iterator[StoredPack]:
        """The packs in a folder of a model, or of one of its tenants."""
        return (pack for path, pack in list(self._packs.items()) if folder in path.parents)

    def add(self, pack: StoredPack) -> None:
        with self.lock:
            self._packs[pack.path] = pack

    def touch(self, pack: StoredPack) -> None:
        """It was used."""
        with self.lock:
            if pack.path in self._packs:
                self._packs.move_to_end(pack.path)
        now = time.monotonic()
        if now - pack.touched_at > TOUCH_AFTER_S and not self.is_read_only:
            pack.touched_at = now
            try:
                os.utime(pack.path)
            except OSError as error:
                self.failures.tell("a use could not be noted", error)

    def make_room(self, num_bytes: int) -> bool:
        """Delete packs until so much more fits; False: it never will."""
        limit = self.max_bytes - NOTE_BYTES
        with self.lock:
            while self.num_bytes + num_bytes > limit and self._packs and not self.is_read_only:
                pack = next(iter(self._packs.values()))
                if not self.delete(pack):
                    return False
                self.num_evicted += len(pack.digests)
            return num_bytes <= limit

    def delete(self, pack: StoredPack) -> bool:
        """Delete a pack and forget its blocks; False: the system refused."""
        try:
            pack.path.unlink(missing_ok=True)
        except OSError as error:
            self.failures.tell("a pack could not be deleted", error)
            return False
        self.forget(pack)
        for folder in (pack.path.parent, pack.path.parent.parent):
            _remove_if_empty(folder)
        return True

    def forget(self, pack: StoredPack) -> None:
        """It is no longer there, or of no use."""
        with self.lock:
            pack.is_gone = True
            self._packs.pop(pack.path, None)
            index = {} if pack.index is None else pack.index
            for digest in pack.digests:
                if (place := index.get(digest)) is not None and place[0] is pack:
                    del index[digest]

    def require_writable(self) -> None:
        """OSError where the folder is not the one that was opened any more: it was deleted or replaced."""
        if os.stat(self.path / LOCK_FILE).st_ino != os.fstat(self._lock_file).st_ino:
            raise FileNotFoundError(f"{self.path} was replaced")

    def stop_writing(self, error: OSError | StoreUnavailable) -> None:
        """The folder is lost: from now on nothing is kept, and what it had is a miss."""
        if not self._is_gone:
            self._is_gone = True
            log.warning(
                "prefix cache on disk: %s is gone (%s); nothing is kept there until the next start",
                self.path,
                getattr(error, "strerror", None) or error,
            )

    def close(self) -> None:
        """Give the lock back."""
        self._close()

    def _take_over(self) -> None:
        """Go on where the process that wrote has ended; OSError: not in this folder any more."""
        self.require_writable()
        if read_keys(self.path) != self.keys:
            raise FileNotFoundError("its key was replaced")
        with self.lock:
            for pack in list(self._packs.values()):
                if _size(pack.path) != pack.num_bytes:  # it was deleted, or filled further
                    self.forget(pack)
            self._find_packs()
            self._has_lock = True
            self.num_takeovers += 1
        log.warning("prefix cache on disk: the process that wrote to %s has ended; this one writes now", self.path)

    def _find_packs(self) -> None:
        """Add the packs that are not known yet, as those used last, by age."""
        found = []
        for path in self.path.glob(f"*/*/*{SUFFIX}"):
            try:
                status = path.lstat()
            except OSError:
                continue  # deleted meanwhile
            if stat.S_ISREG(status.st_mode) and path not in self._packs:
                found.append((status.st_mtime_ns, StoredPack(path, status.st_size)))
        self._packs.update((pack.path, pack) for _, pack in sorted(found, key=lambda one: (one[0], one[1].path)))

    def _default_bytes(self) -> int:
        free = shutil.disk_usage(self.path).free + self.num_bytes  # what it has already must not make it shrink
        return min(MAX_DEFAULT_BYTES, int(FREE_SHARE * free))


def open_folder(path: Path, max_bytes: int | None = None) -> StoreFolder:
    """The folder, shared by all models of this process that use it; the first one's limit holds."""
    opened, name = _open_folders(os.getpid()), os.path.realpath(path)
    folder = opened.get(name)
    if folder is None:
        folder = opened[name] = StoreFolder(Path(name), max_bytes)
    return folder


@cache
def _open_folders(_pid: int) -> weakref.WeakValueDictionary[str, StoreFolder]:
    return weakref.WeakValueDictionary()


def _make_private(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise StoreUnavailable(f"{path} belongs to another user; give --prefix-cache-dir")
    if status.st_mode & 0o077:
        path.chmod(0o700)


def _is_locked(descriptor: int) -> bool:
    """Take the lock; False: another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size(path: Path) -> int | None:
    """Of a file that is there."""
    try:
        return path.lstat().st_size
    except OSError:
        return None


def _remove_if_empty(folder: Path) -> None:
    try:
        if all(path.name == "about.json" for path in folder.iterdir()):
            shutil.rmtree(folder)
    except OSError:
        pass  # it is gone already, or not empty
