"""Relative paths from untrusted sources (zip members, repository listings) that are safe to create below a folder."""

from __future__ import annotations

from pathlib import PurePosixPath

from kvarn.errors import DownloadError

_FORBIDDEN = set('\\:*?"<>|')


def safe_relative(name: str, origin: str) -> PurePosixPath:
    """Return a path that stays inside the folder it is put in, or refuse it naming where it came from."""
    path = PurePosixPath(name)
    parts = name.split("/")
    is_clean = all(part not in {"", ".", ".."} for part in parts) and not path.is_absolute()
    has_odd_characters = any(char in _FORBIDDEN or ord(char) < 32 for char in name)
    if not is_clean or has_odd_characters:
        raise DownloadError(f"{origin} holds a file named {name!r}, which is not a safe relative path; not fetched")
    return path
