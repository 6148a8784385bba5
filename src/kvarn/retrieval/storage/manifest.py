"""The last thing written at a checkpoint: which files belong together, and what they must hash to.

A file whose digest differs, or that is missing, is made again from the truth.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "manifest.json"


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """The state of both indexes at a version of the truth."""

    version: int = 0
    dense: str = ""  # file name
    dense_digest: str = ""
    sparse: str = ""  # folder name
    sparse_files: Mapping[str, str] = field(default_factory=dict)  # name -> digest


def read_manifest(folder: Path) -> CheckpointManifest | None:
    """The manifest of a folder; None if there is none that can be used."""
    try:
        given = json.loads((folder / FILE).read_text(encoding="utf-8"))
        manifest = CheckpointManifest(**given)
    except (OSError, ValueError, TypeError):
        return None
    names = (manifest.dense, manifest.sparse)
    is_sound = isinstance(manifest.version, int) and isinstance(manifest.sparse_files, dict)
    return manifest if is_sound and all(isinstance(name, str) and Path(name).name == name for name in names) else None


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Replace the manifest in one step that survives a crash."""
    part = folder / f"{FILE}.part"
    with part.open("w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / FILE)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable; where folders cannot be synced, the system does it in time."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
