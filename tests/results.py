"""Where measured figures go: one JSON file per measurement, with the commit, the machine and the command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def write_result(name: str, figures: Mapping[str, Any], folder: Path = RESULTS, command: str | None = None) -> Path:
    """Write `figures` to `<folder>/<name>.json` beside what is needed to judge and repeat them."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "name": name,
        "figures": dict(figures),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "command": command or shlex.join(["python", "-m", "pytest", *sys.argv[1:]]),
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return path


def machine() -> dict[str, Any]:
    """Describe this machine: processor, usable cores, memory, system, Python."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    facts = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    name = facts.get("model name")
    # The name alone is often the same for several generations.
    return (
        f"{name}, family {facts.get('cpu family')}, model {facts.get('model')}"
        if name
        else platform.processor() or "unknown"
    )


def _commit() -> str:
    """The commit, with `-dirty` when tracked files other than results differ from it; `unknown` outside a clone."""
    commit = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS.relative_to(ROOT)}")
    return "unknown" if not commit else f"{commit}-dirty" if changed else commit


def _git(*args: str) -> str:
    """What git says; nothing where it cannot."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
