"""Every test can fail by what it finds: it asserts something, itself or in a function of the tests that it calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.rules.tree import ROOT, imported_modules, shown, syntax

Function = ast.FunctionDef | ast.AsyncFunctionDef

# Calls that raise when what they look at is wrong: of pytest, numpy.testing and Playwright, and the package's checks.
RAISING = {"raises", "warns", "fail", "assert_array_equal", "assert_allclose", "check"}
RAISING |= {"wait_for_selector", "wait_for_function"}  # what does not come in time


def test_every_test_asserts_something() -> None:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    tests = [(path, test) for path in files for test in _functions(path) if test.name.startswith("test_")]
    assert len(tests) > 1000
    assert not [f"{shown(path)}:{test.lineno} {test.name}" for path, test in tests if not _asserts(path, test, set())]


def _asserts(path: Path, function: Function, seen: set[Function]) -> bool:
    seen.add(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            called = ((home, one) for home, one in _definitions(path, name) if one not in seen)
            if name in RAISING or any(_asserts(home, one, seen) for home, one in called):
                return True
    return False


def _definitions(path: Path, name: str) -> Iterator[tuple[Path, Function]]:
    """Functions and methods of that name in a file and in the modules of the tests it imports from."""
    for home in _homes(path):
        yield from ((home, one) for one in _functions(home) if one.name == name)


@cache
def _homes(path: Path) -> list[Path]:
    imported = {ROOT / f"{module.replace('.', '/')}.py" for module, _ in imported_modules(path)}
    return [path, *(one for one in imported if one.is_relative_to(ROOT / "tests") and one.is_file())]


@cache
def _functions(path: Path) -> list[Function]:
    return [node for node in ast.walk(syntax(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
