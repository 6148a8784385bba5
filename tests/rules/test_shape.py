"""Files, functions and folders stay small; one name means one thing; every module says what it owns."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.rules.tree import PACKAGE, imported_modules, module_name, modules, native_sources, shown, syntax

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 40
MAX_KERNEL_LINES = 65  # of a GPU kernel, whose pointers and constants are its first ten lines
MAX_FOLDER_MODULES = 15
MIN_MODULE_LINES = 30  # of a module that only one other imports: below that it belongs into its importer

# One file per family of models, however short and however many.
ARCHITECTURES = PACKAGE / "models" / "architectures"


def test_no_file_is_longer_than_the_limit() -> None:
    lengths = {shown(path): _num_lines(path) for path in [*modules(), *native_sources()]}
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}


def test_no_python_function_is_longer_than_the_limit() -> None:
    long = [
        f"{shown(path)}:{node.lineno} {node.name} has {_length(node)} lines"
        for path in modules()
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _length(node) > _max_length(node)
    ]
    assert not long


def _max_length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    is_kernel = any(ast.unparse(decorator).startswith(("triton.jit", "gluon.jit")) for decorator in node.decorator_list)
    return MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES


def test_no_folder_has_more_modules_than_the_limit() -> None:
    counts = Counter(path.parent for path in modules() if path.name != "__init__.py")
    del counts[ARCHITECTURES]
    assert not {shown(folder): number for folder, number in counts.items() if number > MAX_FOLDER_MODULES}


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(f"{shown(path)}:{node.lineno}")
    assert not {name: places for name, places in homes.items() if len(places) > 1}


def test_no_short_module_has_a_single_importer() -> None:
    importers: dict[str, set[Path]] = defaultdict(set)
    for path in modules():
        for name, _ in imported_modules(path):
            importers[name].add(path)
    short = {
        shown(path): _num_lines(path)
        for path in modules()
        if not path.name.startswith("__")
        and path.parent != ARCHITECTURES
        and _num_lines(path) < MIN_MODULE_LINES
        and len(importers[module_name(path)]) == 1
    }
    assert not short


@pytest.mark.parametrize("path", modules(), ids=shown)
def test_a_module_says_what_it_owns(path: Path) -> None:
    assert not path.read_text(encoding="utf-8").strip() or ast.get_docstring(syntax(path))


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1
