"""A hash of the code that computes: bits may differ when a line of it does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def code_hash(files: Iterable[Path]) -> str:
    """The sha256 over the hashes of these files, in this order."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
