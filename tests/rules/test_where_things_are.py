"""The table in CONTRIBUTING.md that tells where things are made names files and symbols that exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.rules.tree import ROOT, syntax

HEADING = "## Where is it?"
QUESTIONS = (
    "a 429 is made",
    "a stop string ends an answer",
    "a block is evicted",
    "a tool call is parsed",
    "a prompt chunk is sized",
    "a new metric goes",
    "a new endpoint goes",
)


def _rows() -> list[tuple[str, str, str]]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition(HEADING)[2].partition("\n## ")[0]
    return re.findall(r"^\| ([^|`]+?) \| `([^`|]+)` \| `([^`|]+)`[^|]*\|$", section, re.MULTILINE)


def test_the_table_answers_the_usual_questions() -> None:
    assert set(QUESTIONS) <= {question for question, _, _ in _rows()}


@pytest.mark.parametrize(("file", "symbol"), [(file, symbol) for _, file, symbol in _rows()])
def test_a_named_symbol_is_defined_in_the_named_file(file: str, symbol: str) -> None:
    scope: ast.AST = syntax(ROOT / file)
    for name in symbol.split("."):
        found = [node for node in ast.iter_child_nodes(scope) if name in _names(node)]
        assert found, f"{file} defines no {symbol}"
        scope = found[0]


def _names(node: ast.AST) -> set[str]:
    """What a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {node.target.id} if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else set()
