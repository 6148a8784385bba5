"""Environments of third-party clients: made once from lists of exact versions, then kept in the tests' cache.

A folder of `environments/` has either requirements.txt (the clients) and constraints.txt (all that they draw in), or
package.json and package-lock.json. A changed list is another environment. Where no package index can be reached the
tests that need one are skipped, with a warning.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
import warnings
from functools import cache
from pathlib import Path

import pytest

from tests.assets import cached

LISTS = Path(__file__).parent / "environments"
INSTALL_TIMEOUT_S = 900
# What pip and npm say where nobody answers, or where a mirror has none of a package's versions.
UNREACHABLE = ("(from versions: none)", "connection broken by", "ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT")


@cache
def python_of(name: str) -> Path:
    """The interpreter of a Python environment. Its console scripts have another folder's path: use `python -m`."""

    def fill(target: Path, _downloads: Path) -> None:
        venv.create(target, symlinks=True)
        lists = ("-r", LISTS / name / "requirements.txt", "-c", LISTS / name / "constraints.txt")
        pip = (sys.executable, "-m", "pip", "--python", target / "bin" / "python", "--disable-pip-version-check")
        # Compiled at their first import, and only what is imported.
        install(*pip, "install", "--quiet", "--no-compile", "--prefer-binary", *lists, cwd=target)

    return cached(_folder(name), fill) / "bin" / "python"


@cache
def node_modules_of(name: str) -> Path:
    """The `node_modules` of an npm environment."""
    npm = shutil.which("npm")
    if npm is None:
        skip("npm is not installed")

    def fill(target: Path, _downloads: Path) -> None:
        shutil.copytree(LISTS / name, target)
        install(npm, "ci", "--no-audit", "--no-fund", "--loglevel=error", cwd=target)

    return cached(_folder(name), fill) / "node_modules"


def skip(reason: str) -> None:
    """Skip, and say so where a reader of the short summary sees it."""
    warnings.warn(f"clients are not tested: {reason}", stacklevel=2)
    pytest.skip(reason)


def install(*command: object, cwd: Path) -> None:
    """Run an installer; where it finds no package index, skip."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
    )
    if done.returncode == 0:
        return
    if any(words in done.stderr for words in UNREACHABLE):
        skip(f"no package index can be reached: {done.stderr[-300:]}")
    raise RuntimeError(f"{command[0]} could not install the clients: {done.stderr[-2000:]}")


def _folder(name: str) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted((LISTS / name).iterdir()):
        digest.update(path.read_bytes())
    return f"clients-{name}-{digest.hexdigest()[:12]}"
