"""Imports run one way, heavy packages stay in their folder, and the environment is read in one place."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib

import pytest

from tests.rules.tree import CSRC, PACKAGE, ROOT, imported_modules, modules, native_sources, shown, syntax

# package -> the one folder (or file) of src/kvarn that may import it
HOMES = {
    "torch": "backends/torch/",
    "triton": "backends/torch/",
    "mlx": "backends/mlx/",
    "fastapi": "server/",
    "starlette": "server/",
    "uvicorn": "server/",
    "huggingface_hub": "hub/",
    "typer": "cli/",
    "redis": "server/access/shared/",
    "ray": "server/ray/",
}


def test_the_import_contract_holds() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_import_contract_covers_every_module() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = config["tool"]["importlinter"]["contracts"]
    covered = {name.strip() for layer in contract["layers"] for name in re.split("[|:]", layer)}
    here = {f"kvarn.{path.stem}" for path in PACKAGE.glob("[a-z]*.py")}
    here |= {f"kvarn.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")}
    # What callers write as a constraint is below the types, what compiles it above the tokenizer.
    here.remove("kvarn.structured")
    here |= {
        f"kvarn.structured.{path.stem}" for path in modules("structured") if not path.stem.endswith(("_", "child"))
    }
    assert here == covered


@pytest.mark.parametrize("package", sorted(HOMES))
def test_a_heavy_package_is_imported_in_its_own_folder_only(package: str) -> None:
    strays = [
        f"{shown(path)}:{line}"
        for path in modules()
        for name, line in imported_modules(path)
        if name.partition(".")[0] == package and not path.relative_to(PACKAGE).as_posix().startswith(HOMES[package])
    ]
    assert not strays, f"{package} may be imported only under src/kvarn/{HOMES[package]}"


def test_the_environment_is_read_in_config_only() -> None:
    strays = [
        f"{shown(path)}:{line}"
        for path in modules()
        if path != PACKAGE / "config.py"
        for line in _environment_reads(syntax(path))
    ]
    assert not strays, "read environment variables in src/kvarn/config.py and pass the value on"


def test_the_native_core_reads_no_environment() -> None:
    assert native_sources(), f"no C++ files under {shown(CSRC)}"
    assert not [shown(path) for path in native_sources() if "getenv" in path.read_text(encoding="utf-8")]


def test_nanobind_is_included_by_the_bindings_only() -> None:
    users = [path for path in native_sources() if "nanobind" in path.read_text(encoding="utf-8")]
    assert {path.parent for path in users} == {CSRC / "bindings"}


def _environment_reads(tree: ast.Module) -> list[int]:
    names = {"environ", "environb", "getenv", "getenvb"}
    attributes = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]
    imports = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names}
    ]
    return attributes + imports


def test_the_environment_search_finds_every_way_of_reading() -> None:
    code = "import os\nfrom os import getenv\nos.environ['A']\nos.getenv('A')\nself.environ\n"
    assert sorted(_environment_reads(ast.parse(code))) == [2, 3, 4]
