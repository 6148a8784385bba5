"""Where a new model file may go: not over its source, not over another file unasked, not where there is no room."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kvarn.errors import ConfigError


def require_writable(target: Path, source: Path, *, force: bool) -> None:
    """Refuse an output that cannot or should not be written, before any work is done."""
    folder = target.parent
    if not folder.is_dir():
        raise ConfigError(f"the output's folder {str(folder)!r} does not exist; make it first")
    if target.is_dir():
        raise ConfigError(f"the output {str(target)!r} is a folder; give the name of a file")
    if target.exists():
        if source.exists() and os.path.samefile(target, source):
            raise ConfigError(f"the output {str(target)!r} is the source itself; give another name")
        if not force:
            raise ConfigError(f"the output {str(target)!r} exists; give another name, or replace it with --force")


def require_new_folder(target: Path) -> None:
    """Refuse a folder that cannot be made; one that exists is never replaced, whatever is in it."""
    if not target.parent.is_dir():
        raise ConfigError(f"the output's folder {str(target.parent)!r} does not exist; make it first")
    if target.exists():
        raise ConfigError(f"the output {str(target)!r} exists; FP8 is written as a new folder, give another name")


def require_room(target: Path, num_bytes: int) -> None:
    """Refuse when the disk has fewer bytes free than the file will take."""
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise ConfigError(
            f"the output needs {num_bytes / 1e6:,.1f} MB, {str(target.parent)!r} has {free / 1e6:,.1f} MB free; "
            "make room or write to another disk"
        )
