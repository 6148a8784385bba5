"""The models on this machine: one folder each below KVARN_HOME/models, with a manifest.

    models/<key>/manifest.json     what it is, where it came from, sizes and digests
    models/<key>/model/...         its files
    models/.partial/<key>/...      downloads under way; never listed, resumed by the next pull
    models/.locks/<key>.lock       held while a model is fetched or removed

A folder gets its final name by one rename when complete, so whatever is listed is whole. Knows no network.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvarn.config import kvarn_home
from kvarn.errors import DownloadError, ModelNotFound
from kvarn.hub.names import RemoteName
from kvarn.hub.progress import OnProgress

MANIFEST = "manifest.json"
FILES = "model"
FORMAT = 1
LOCK_WAIT_S = 0.5  # between two looks whether another process has ended


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a stored model, its path relative to the model's folder."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """What a stored model is and where it came from."""

    name: str  # as the user gives it: pypi:..., hf:...
    source: str  # the address the bytes came from
    version: str  # package version or commit
    entry: str  # the file to open; "" means the folder
    files: tuple[StoredFile, ...]
    fetched_at: str  # ISO 8601, UTC

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """The sha256 of the largest file: the weights."""
        return max(self.files, key=lambda file: file.size).sha256


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A complete model in the store."""

    folder: Path
    manifest: ModelManifest

    @property
    def path(self) -> Path:
        """The file or folder to open."""
        return self.folder / FILES / self.manifest.entry if self.manifest.entry else self.folder / FILES


def models_folder() -> Path:
    """Return the folder of all stored models; it may not exist yet."""
    return kvarn_home() / "models"


def key_of(name: RemoteName) -> str:
    """Return a folder name for a model: readable, and different for different names."""
    text = str(name)
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:80]
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def find(name: RemoteName) -> StoredModel | None:
    """Return a stored model when all its files are there with their sizes; nothing is hashed."""
    return _read(models_folder() / key_of(name))


def list_models() -> list[StoredModel]:
    """Return all complete models, by name."""
    folder = models_folder()
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [_read(entry) for entry in entries if not entry.name.startswith(".")]
    return sorted((model for model in found if model is not None), key=lambda model: model.manifest.name)


def remove(name: RemoteName) -> int:
    """Delete a model and what is left of its unfinished downloads; return the bytes freed."""
    folder, unfinished = models_folder() / key_of(name), partial_folder(name)
    present = [path for path in (folder, unfinished) if path.is_dir()]
    if not present:
        raise ModelNotFound(f"{name} is not in {models_folder()}; `kvarn ls` shows what is")
    with writing("remove a model from"), locked(name):
        freed = sum(_size_of(path) for path in present)
        # The manifest goes first: a removal that is interrupted leaves nothing that looks complete.
        (folder / MANIFEST).unlink(missing_ok=True)
        for path in present:
            shutil.rmtree(path)
    return freed


def partial_folder(name: RemoteName) -> Path:
    """Return where a model's downloads lie until they are complete."""
    return models_folder() / ".partial" / key_of(name)


def staged_files(scratch: Path) -> Path:
    """Return where in a scratch folder the model's own files are gathered."""
    return scratch / "ready" / FILES


def publish(name: RemoteName, manifest: ModelManifest) -> StoredModel:
    """Give the staged files of a model their final name, all at once."""
    staged = staged_files(partial_folder(name)).parent
    final = models_folder() / key_of(name)
    (staged / MANIFEST).write_text(json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2) + "\n", "utf-8")
    if final.exists():  # incomplete, otherwise find() would have returned it
        shutil.rmtree(final)
    staged.rename(final)
    shutil.rmtree(partial_folder(name), ignore_errors=True)
    return StoredModel(final, manifest)


@contextmanager
def locked(name: RemoteName, on_progress: OnProgress | None = None) -> Iterator[None]:
    """Hold a model's lock across processes; the system drops it when its holder dies."""
    from filelock import FileLock, Timeout

    folder = models_folder() / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"{key_of(name)}.lock")
    timeout_s = 0.0
    while True:
        try:
            lock.acquire(timeout=timeout_s)
            break
        except Timeout:
            timeout_s = LOCK_WAIT_S
            if on_progress is not None:  # which may end the waiting
                on_progress(0, None, "waiting for another Kvarn that fetches the same model")
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(purpose: str) -> Iterator[None]:
    """Turn an OSError below KVARN_HOME into a DownloadError that says what to do."""
    try:
        yield
    except OSError as error:
        place = error.filename or models_folder()
        raise DownloadError(
            f"cannot {purpose} {models_folder()}: {error.strerror or error} ({place}); "
            "make it writable or set KVARN_HOME to another folder"
        ) from error


def _read(folder: Path) -> StoredModel | None:
    try:
        fields: dict[str, Any] = json.loads((folder / MANIFEST).read_text("utf-8"))
        if fields.pop("format") != FORMAT:
            return None
        files = tuple(StoredFile(**file) for file in fields.pop("files"))
        model = StoredModel(folder, ModelManifest(files=files, **fields))
        is_whole = all((folder / FILES / file.path).stat().st_size == file.size for file in files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return model if is_whole and files else None


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
