"""`kvarn index` where it needs no model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvarn.cli.main import app
from kvarn.retrieval.collection import Collection
from tests.unit.retrieval.words import WordEmbedder


def _stats(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["index", "stats", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_stats_are_of_all_collections_unless_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_HOME", str(tmp_path))
    assert "no collections" in _stats()
    assert json.loads(_stats("--json")) == []
    for name, texts in (("birds", ["a peacock"]), ("mills", ["a mill", "a wheel"])):
        with Collection(name, model=WordEmbedder()) as collection:
            collection.add(texts)
    assert [line.split() for line in _stats().splitlines() if "documents" in line] == [
        ["documents", "1"],
        ["documents", "2"],
    ]
    assert [one["name"] for one in json.loads(_stats("--json"))] == ["birds", "mills"]
    assert "birds" not in _stats("--collection", "mills")
    assert json.loads(_stats("--collection", "mills", "--json"))["chunks"] == 2
