"""How large and how tangled the source tree is: read from the files, nothing is run or imported.

    python benchmarks/code_metrics.py [ROOT]

The longest things are named, so that one knows where to look. Lines are those of the file, blank ones and comments
included; a function is as long as its definition without decorators, and what is nested in it belongs to it as well.
Prints a table for people and one line of JSON, last.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

LONG_FUNCTION, LONG_FILE, SMALL_MODULE = 40, 300, 30  # lines
SHOWN = 5  # of the longest
PACKAGE = Path("src/kvarn")
NATIVE = Path("csrc")
NATIVE_ENDINGS = (".cpp", ".h", ".c", ".cc", ".hpp")
DUPLICATES = "duplicates"  # a program that lists repeated code, where there is one
DUPLICATES_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file of the package; name as it is imported, path below the root."""

    name: str
    path: Path
    num_lines: int
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method, as `path:line name`."""

    place: str
    num_lines: int


def measure(root: Path) -> dict[str, Any]:
    """All figures of one tree."""
    modules = read_modules(root)
    functions = [function for module in modules for function in functions_of(module)]
    figures = {
        **sizes(root, modules),
        **folders(modules),
        **function_lengths(functions),
        **repeated_classes(modules),
        **small_modules(modules),
    }
    pairs = num_duplicates(root)
    return figures if pairs is None else {**figures, "duplicate_pairs": pairs}


def read_modules(root: Path) -> list[Module]:
    """Every Python file of the package."""
    modules = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        text, relative = path.read_text(encoding="utf-8"), path.relative_to(root)
        parts = relative.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(Module(name, relative, len(text.splitlines()), ast.parse(text)))
    return modules


def sizes(root: Path, modules: Sequence[Module]) -> dict[str, Any]:
    """Files and lines of both languages, and the files that want to be two."""
    native = {path: _num_lines(root / path) for path in _native_files(root)}
    lines = {module.path: module.num_lines for module in modules} | native
    long = {str(path): num for path, num in lines.items() if num > LONG_FILE}
    return {
        "python_files": len(modules),
        "python_lines": sum(module.num_lines for module in modules),
        "native_files": len(native),
        "native_lines": sum(native.values()),
        "files_over_300": len(long),
        "python_files_over_300": sum(path.endswith(".py") for path in long),
        "longest_files": dict(_most(long)),
    }


def folders(modules: Iterable[Module]) -> dict[str, Any]:
    """Modules that lie directly in each folder; `__init__.py` does not count."""
    counts = Counter(str(module.path.parent) for module in modules if not module.is_package)
    return {
        "folders": len(counts),
        "modules_in_largest_folder": max(counts.values()),
        "folders_over_15": sum(num > 15 for num in counts.values()),
        "largest_folders": dict(_most(counts)),
    }


def functions_of(module: Module) -> Iterator[Function]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield Function(f"{module.path}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1)


def function_lengths(functions: Sequence[Function]) -> dict[str, Any]:
    """Median, 90th percentile and maximum of the lines of Python functions."""
    lengths = sorted(function.num_lines for function in functions)
    return {
        "functions": len(lengths),
        "function_lines_median": lengths[len(lengths) // 2],
        "function_lines_p90": lengths[len(lengths) * 9 // 10],
        "function_lines_max": lengths[-1],
        "functions_over_40": sum(num > LONG_FUNCTION for num in lengths),
        "longest_functions": dict(_most({function.place: function.num_lines for function in functions})),
    }


def repeated_classes(modules: Iterable[Module]) -> dict[str, Any]:
    """Names that several classes of the package have, wherever they are defined."""
    homes = defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module.name)
    repeated = {name: found for name, found in sorted(homes.items()) if len(found) > 1}
    return {"classes": sum(map(len, homes.values())), "repeated_class_names": len(repeated), "repeated": repeated}


def small_modules(modules: Sequence[Module]) -> dict[str, Any]:
    """Modules of few lines that only one other module imports: a file for one reader."""
    importers = _importers(modules)
    small = [
        module.name
        for module in modules
        if module.num_lines < SMALL_MODULE and not module.is_package and len(importers[module.name]) == 1
    ]
    return {"small_single_importer": len(small), "small_modules": small}


def num_duplicates(root: Path) -> int | None:
    """Pairs of places that share lines, as the program counts them; None: it is not installed."""
    if shutil.which(DUPLICATES) is None:
        return None
    command = [DUPLICATES, "--repo", str(root), "--seconds", str(DUPLICATES_TIMEOUT_S)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first = done.stdout.partition(" ")[0]
    return int(first) if first.isdigit() else 0


def _importers(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Who imports each module, in functions and under TYPE_CHECKING as well."""
    modules = list(modules)
    names = {module.name for module in modules}
    importers: dict[str, set[str]] = {name: set() for name in names}
    for module in modules:
        for name in set(_imported(module)) & names - {module.name}:
            importers[name].add(module.name)
    return importers


def _imported(module: Module) -> Iterator[str]:
    """Names that may be modules: `from a import b` names a, and b in it."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(module, node)
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    base = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _native_files(root: Path) -> list[Path]:
    found = chain.from_iterable((root / NATIVE).rglob(f"*{ending}") for ending in NATIVE_ENDINGS)
    return sorted(path.relative_to(root) for path in found)


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _most(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:SHOWN]


def show(figures: Mapping[str, Any]) -> None:
    """Numbers as rows; of what is named, one name to a line below."""
    for name, value in figures.items():
        if not isinstance(value, dict | list):
            print(f"{name:28}{value:>10,}")
            continue
        print(f"{name}:")
        for one in value:
            detail = value[one] if isinstance(value, dict) else ""
            print(f"    {one:70} {', '.join(detail) if isinstance(detail, list) else detail}".rstrip())


def main() -> None:
    """Measure the tree given by its root."""
    parser = argparse.ArgumentParser(description="Static measures of a source tree.")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    figures = measure(parser.parse_args().root)
    show(figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
