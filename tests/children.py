"""The helper processes of a process, found by the name of their script: for tests that kill or stop them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def child_ids(script: str, parent: int | None = None) -> list[int]:
    """Process ids of the children of a process, this one by default, that run a script."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            parent_id = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if script in command and parent_id == (parent or os.getpid()):
                found.append(int(folder.name))
    return found
