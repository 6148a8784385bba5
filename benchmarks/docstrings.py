"""Code search as a test of retrieval: functions of the Python standard library and what their docstrings say they do.

The query is the first sentence of a docstring, the document the function's source without it.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_QUESTION_CHARS = 12
LEFT_OUT = ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo")


@dataclass(frozen=True, slots=True)
class Function:
    """A function that says what it does."""

    name: str
    question: str
    text: str  # the source without the docstring


def source_pieces(max_pieces: int, num_chars: int = 300) -> list[str]:
    """Pieces of the library's sources, in the order of a hash of their text."""
    pieces = set()
    for path, _ in _files():
        text = path.read_text(encoding="utf-8", errors="replace")
        pieces.update(text[start : start + num_chars] for start in range(0, len(text), num_chars))
    return sorted(pieces, key=lambda piece: hashlib.sha256(piece.encode()).digest())[:max_pieces]


def standard_library(max_functions: int) -> list[Function]:
    """Functions with a docstring, in the order of a hash of their names; the same for every run."""
    found = {}
    for path, relative in _files():
        found.update({function.name: function for function in _functions(path, relative)})
    ordered = sorted(found.values(), key=lambda function: hashlib.sha256(function.name.encode()).digest())
    return ordered[:max_functions]


def _files() -> Iterator[tuple[Path, Path]]:
    """Sources of the library, and their paths within it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not set(relative.parts) & set(LEFT_OUT):
            yield path, relative


def _functions(path: Path, relative: Path) -> Iterator[Function]:
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        question = _first_sentence(ast.get_docstring(node) or "")
        text = _without_docstring(node, lines)
        if len(question) >= MIN_QUESTION_CHARS and text:
            yield Function(f"{relative.as_posix()}:{node.lineno}:{node.name}", question, text)


def _first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", paragraph, maxsplit=1)[0]


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]) -> str:
    first = node.body[0]
    if len(node.body) < 2 or first.end_lineno is None or node.end_lineno is None:
        return ""
    return "\n".join([*lines[node.lineno - 1 : first.lineno - 1], *lines[first.end_lineno : node.end_lineno]])
