"""Whoever refuses a parameter says which one it is, or that it is none: clients are told by its name."""

from __future__ import annotations

import ast

from tests.rules.tree import modules, shown, syntax


def test_every_invalid_parameter_names_its_field() -> None:
    raised = [
        (f"{shown(path)}:{node.lineno}", {keyword.arg for keyword in node.keywords})
        for path in modules()
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "InvalidParameter"
    ]
    assert len(raised) > 50
    assert not [place for place, keywords in raised if "field" not in keywords]
