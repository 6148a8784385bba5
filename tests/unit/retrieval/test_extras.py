"""The base install needs none of retrieval's packages, and says which extra has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvarn.errors import ConfigError
from kvarn.retrieval.collection import Collection
from tests.unit.retrieval.words import WordEmbedder


@pytest.mark.parametrize("module", ["usearch.index", "tantivy"])
def test_a_missing_package_names_its_extra(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with (
        pytest.raises(ConfigError, match=r"pip install 'kvarn\[retrieval\]'"),
        Collection("c", folder=tmp_path, model=WordEmbedder()) as collection,
    ):
        collection.add("a mill")


def test_server_and_command_line_load_none_of_them() -> None:
    packages = {"usearch", "tantivy", "pypdf", "pymilvus"}
    code = f"import sys, kvarn.cli.main, kvarn.server.app; print({packages} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
