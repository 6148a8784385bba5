"""What the bytes of a block depend on besides its tokens. One field differs: the block is another, and a miss.

Weights count by their sha256. Hashing gigabytes at each start would cost seconds, so a note in the folder keeps the
hash of a file by its path, device, inode, size and times of change (mtime and ctime), as build tools do: who sets all
of those back by hand after changing the weights is believed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from kvarn.prefix_store.folder import StoreFolder

NOTE_FILE = "weights.json"
MAX_NOTES = 64
FORMAT = 1  # of identities: another one makes all blocks of before a miss
_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """Everything that the bytes of a block depend on, as texts and numbers."""

    weights: str  # sha256
    spec: str  # repr of the ModelSpec, rope included
    kv_dtype: str
    block_size: int
    block_bytes: int
    kernels: str  # the backend, its table and the hash of its code
    weight_types: str  # how matrices are held in memory, where that is a choice
    format: int = FORMAT

    def digest(self) -> bytes:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files that hold a model's weights, as they were before they were opened."""

    stamps: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> WeightFiles:
        """Those of a folder, or all parts of a GGUF; OSError where one is gone."""
        return cls(tuple(file_stamp(file) for file in _weight_files(path)))

    def is_hashed(self, folder: StoreFolder) -> bool:
        """Whether hash() need not read them."""
        notes = _read_notes(folder)
        return all(stamp in notes for stamp in self.stamps)

    def hash(self, folder: StoreFolder) -> str:
        """The sha256 over the hashes of all files, each read once and noted; OSError where one is not as it was."""
        notes = _read_notes(folder)
        hashes = [_hash_noted(stamp, notes) for stamp in self.stamps]
        _write_notes(folder, notes)
        return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _weight_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("*.safetensors"))
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    return sorted(path.parent.glob(f"{_literal(part['stem'])}-*-of-{part['count']}.gguf"))


def _hash_noted(stamp: str, notes: dict[str, str]) -> str:
    path = Path(json.loads(stamp)[0])
    if stamp not in notes:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        notes[stamp] = digest
    if file_stamp(path) != stamp:
        raise OSError(f"{path} has changed since the model was loaded")
    notes[stamp] = notes.pop(stamp)  # the last used
    return notes[stamp]


def file_stamp(path: Path) -> str:
    """What tells a changed file from an unchanged one without reading it."""
    real, status = path.resolve(), path.stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    return json.dumps([str(real), status.st_dev, status.st_ino, status.st_size, *times])


def _read_notes(folder: StoreFolder) -> dict[str, str]:
    """The hashes known by stamp; none where the note was changed by another hand."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads((folder.path / NOTE_FILE).read_bytes())
        if hmac.compare_digest(note["mac"], _note_mac(folder, note["hashes"])):
            return dict(note["hashes"])
    return {}


def _write_notes(folder: StoreFolder, notes: dict[str, str]) -> None:
    if folder.is_read_only:
        return
    kept = dict(list(notes.items())[-MAX_NOTES:])
    draft = folder.path / f".{NOTE_FILE}.{os.getpid()}"
    try:
        draft.write_text(json.dumps({"hashes": kept, "mac": _note_mac(folder, kept)}), encoding="utf-8")
        draft.chmod(0o600)
        draft.replace(folder.path / NOTE_FILE)
    except OSError as error:
        folder.failures.tell("the hash of the weights could not be noted", error)


def _note_mac(folder: StoreFolder, hashes: object) -> str:
    key = folder.keys.note_key()
    return hashlib.blake2b(json.dumps(hashes, sort_keys=True).encode(), key=key, digest_size=32).hexdigest()


def _literal(name: str) -> str:
    """A name as a glob pattern that matches it alone."""
    return re.sub(r"([*?\[])", r"[\1]", name)
