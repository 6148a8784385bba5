"""The manifest, written last at a checkpoint: which index files belong together, and their digests.

An index file that is missing or whose digest differs is rebuilt from the document store.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "manifest.json"
log = logging.getLogger("kvarn.retrieval")


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """The files of both indexes at a version of the document store."""

    version: int = 0
    dense: str = ""  # file name
    dense_digest: str = ""
    sparse: str = ""  # folder name
    sparse_files: Mapping[str, str] = field(default_factory=dict)  # name -> digest


def read_manifest(folder: Path) -> CheckpointManifest | None:
    """The manifest of a folder; None if it is missing or invalid."""
    try:
        fields = json.loads((folder / FILE).read_text(encoding="utf-8"))
        manifest = CheckpointManifest(**fields)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s is damaged, and both indexes are made anew: %s", folder / FILE, error)
        return None
    names = (manifest.dense, manifest.sparse)
    is_valid = isinstance(manifest.version, int) and isinstance(manifest.sparse_files, dict)
    if is_valid and all(isinstance(name, str) and Path(name).name == name for name in names):
        return manifest
    log.warning("%s is damaged, and both indexes are made anew: a value is not of its kind", folder / FILE)
    return None


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Replace the manifest atomically and durably."""
    partial = folder / f"{FILE}.part"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / FILE)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable; does nothing where folders cannot be synced."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
