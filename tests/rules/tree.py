"""The repository as the rules see it: files, texts and syntax trees."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "kvarn"
CSRC = ROOT / "csrc"


def modules(*folders: str) -> list[Path]:
    """Python files of the package, or of some of its folders."""
    roots = [PACKAGE / folder for folder in folders] or [PACKAGE]
    return sorted(path for root in roots for path in root.rglob("*.py"))


def native_sources() -> list[Path]:
    """C++ files of the native core."""
    return sorted([*CSRC.rglob("*.cpp"), *CSRC.rglob("*.h")])


def shown(path: Path) -> str:
    """The path as a reader of the repository would write it."""
    return path.relative_to(ROOT).as_posix()


@cache
def syntax(path: Path) -> ast.Module:
    """The syntax tree of one Python file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    """The dotted name of a file of the package."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the absolute module names a file imports, anywhere in it, with their lines."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def repository_files() -> list[Path]:
    """Every file that is or would be committed; without git, every file outside the usual build folders."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        names = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.decode().split("\0")
        paths = [ROOT / name for name in names if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for path in ROOT.rglob("*") if not _is_built(path)]
    return [path for path in paths if path.is_file()]


def repository_texts() -> Iterator[tuple[Path, str]]:
    """Every committed text file with its contents; binary files are left out."""
    for path in repository_files():
        data = path.read_bytes()
        if b"\0" not in data:
            yield path, data.decode("utf-8")


def _is_built(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return bool({".git", ".venv", "build", "dist", "__pycache__"} & set(parts)) or any("_cache" in p for p in parts)
