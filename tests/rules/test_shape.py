"""Files and functions stay small enough to be read, and every module says what it owns."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.rules.tree import modules, native_sources, shown, syntax

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60


def test_no_file_is_longer_than_the_limit() -> None:
    lengths = {
        shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in [*modules(), *native_sources()]
    }
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}


def test_no_python_function_is_longer_than_the_limit() -> None:
    long = [
        f"{shown(path)}:{node.lineno} {node.name} has {_length(node)} lines"
        for path in modules()
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _length(node) > MAX_FUNCTION_LINES
    ]
    assert not long


@pytest.mark.parametrize("path", modules(), ids=shown)
def test_a_module_says_what_it_owns(path: Path) -> None:
    assert not path.read_text(encoding="utf-8").strip() or ast.get_docstring(syntax(path))


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1
