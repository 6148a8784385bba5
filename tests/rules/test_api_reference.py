"""The API reference is what the OpenAPI document says, and it has everything."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from tests.rules.tree import ROOT


def make_api_reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api_reference", ROOT / "docs" / "make_api_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_reference_is_current() -> None:
    script = make_api_reference()
    assert script.TARGET.read_text(encoding="utf-8") == script.render(), "run python docs/make_api_reference.py"


def test_the_reference_names_fields_that_are_inert_or_refused() -> None:
    text = (ROOT / "docs" / "api-reference.md").read_text(encoding="utf-8")
    chat = text.partition("### ChatBody")[2].partition("\n### ")[0]
    assert "Accepted, without effect: `metadata`" in chat
    assert "Refused by name: `audio`" in chat
    assert "**`messages`**" in chat
