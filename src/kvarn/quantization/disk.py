"""Where a new model file may go: not over its source, not over another file unasked, not where there is no room."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvarn.errors import ConfigError
from kvarn.formats.gguf.splits import part_names


def require_writable(target: Path, source: Path, *, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Refuse an output that cannot or should not be written, before any work is done.

    inputs: what else is read; neither these nor any file of the source is replaced, with force or without.
    """
    require_folder(target)
    if target.is_dir():
        raise ConfigError(f"the output {str(target)!r} is a folder; give the name of a file")
    if not target.exists():
        return
    if not target.is_file():
        raise ConfigError(f"the output {str(target)!r} is a device or a pipe; give the name of a file")
    if any(_is_same(target, one) for one in _files_of(source)):
        raise ConfigError(f"the output {str(target)!r} is the source itself; give another name")
    if any(_is_same(target, one) for one in inputs):
        raise ConfigError(f"the output {str(target)!r} is read by this command; give another name")
    if not force:
        raise ConfigError(f"the output {str(target)!r} exists; give another name, or replace it with --force")


def require_folder(target: Path) -> None:
    """Refuse an output whose folder is not there, or in which no file can be made."""
    if not target.parent.is_dir():
        raise ConfigError(f"the output's folder {str(target.parent)!r} does not exist; make it first")
    try:
        # Tried rather than asked for: permissions say nothing of systems that are read-only or not for files.
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"no file can be made in the output's folder {str(target.parent)!r}: {error.strerror}; write to another "
            "one, or mend its permissions"
        ) from None


def require_new_folder(target: Path) -> None:
    """Refuse a folder that cannot be made; one that exists is never replaced, whatever is in it."""
    require_folder(target)
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


def _files_of(source: Path) -> Iterator[Path]:
    """All files of a model: of a folder those in it, of a split file its other parts."""
    if source.is_dir():
        yield from source.iterdir()
    else:
        yield from map(Path, part_names(str(source)))


def _is_same(target: Path, other: Path) -> bool:
    return other.exists() and os.path.samefile(target, other)
