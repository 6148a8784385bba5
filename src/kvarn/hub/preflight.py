"""Checks made before a download: is there space on the disk, and can this machine hold the model at all?"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from kvarn.errors import DoesNotFit, DownloadError
from kvarn.hub.store import models_folder
from kvarn.machine import available_memory

# Weights are held once, plus a little for cache and scratch; the exact plan is made when the model is opened.
MEMORY_PER_FILE_BYTE = 1.1


@dataclass(frozen=True, slots=True)
class SpaceCheck:
    """What a model needs and what this machine has, in bytes."""

    disk_needed: int
    disk_free: int
    memory_needed: int
    memory_total: int | None

    @property
    def fits_disk(self) -> bool:
        return self.disk_needed <= self.disk_free

    @property
    def fits_memory(self) -> bool:
        return self.memory_total is None or self.memory_needed <= self.memory_total


def measure_space(model_bytes: int, disk_bytes: int) -> SpaceCheck:
    """Compare a model of `model_bytes`, for which `disk_bytes` must still be written, with this machine."""
    return SpaceCheck(
        disk_needed=disk_bytes,
        disk_free=shutil.disk_usage(_existing(models_folder())).free,
        memory_needed=int(model_bytes * MEMORY_PER_FILE_BYTE),
        memory_total=_memory_total(),
    )


def require_space(name: str, space: SpaceCheck, *, force: bool = False) -> None:
    """Refuse a model that the disk cannot take, or, unless forced, one that memory could not hold."""
    if not space.fits_disk:
        raise DownloadError(
            f"{name} needs {size_text(space.disk_needed)} of disk, {size_text(space.disk_free)} are free in "
            f"{models_folder()}; free some space or set KVARN_HOME to another disk"
        )
    if not space.fits_memory and not force:
        total = space.memory_total or 0
        raise DoesNotFit(
            f"{name} needs about {size_text(space.memory_needed)} of memory, this machine has {size_text(total)}; "
            "choose a smaller model or quantisation, or fetch it all the same with `kvarn pull --force`",
            needed_bytes=space.memory_needed,
            available_bytes=total,
        )


def size_text(num_bytes: int) -> str:
    """Write a size as people read it: 98.4 MB."""
    size = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{num_bytes:,} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def _memory_total() -> int | None:
    memory = available_memory()
    bounds = [memory.total_bytes, memory.cgroup.limit_bytes if memory.cgroup else None]
    return min((bound for bound in bounds if bound), default=None)


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())
