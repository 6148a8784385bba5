"""Where collections lie: one folder each under Kvarn's home, one shelf for every tenant."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

from kvarn.config import kvarn_home
from kvarn.errors import CollectionNotFound, InvalidParameter
from kvarn.retrieval.storage.document_store import FILE
from kvarn.retrieval.storage.folder import claim

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def shelf(tenant: str = "") -> Path:
    """The folder of a tenant's collections; without tenants, the folder of all."""
    home = kvarn_home() / "collections"
    return home / "shared" if not tenant else home / f"tenant-{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"


def collection_folder(name: str, shelf_folder: Path | None = None) -> Path:
    """The folder of one collection, which need not exist."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter(
            f"the collection's name is {name!r:.80}; use 1 to 64 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )
    return (shelf_folder or shelf()) / name


def existing_folder(name: str, shelf_folder: Path | None = None) -> Path:
    """The folder of a collection that exists."""
    folder = collection_folder(name, shelf_folder)
    if not (folder / FILE).is_file():
        known = ", ".join(list_names(shelf_folder)) or "none yet"
        raise CollectionNotFound(f"there is no collection {name!r}; there are: {known}")
    return folder


def list_names(shelf_folder: Path | None = None) -> list[str]:
    """The names of all collections on a shelf."""
    folder = shelf_folder or shelf()
    return sorted(path.parent.name for path in folder.glob(f"*/{FILE}"))


def drop(name: str, shelf_folder: Path | None = None) -> None:
    """Remove a collection with everything in it; refused while another process changes it."""
    folder = existing_folder(name, shelf_folder)
    lock = claim(folder)
    try:
        (folder / FILE).unlink()  # from here on it does not exist
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)
