"""What happens where the clients cannot be installed, and that the documents name the versions that are."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.clients.installing import LISTS, install

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--isolated", "download", "--no-deps", "--no-index")


def test_without_a_package_index_tests_are_skipped_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no package index"), pytest.raises(pytest.skip.Exception):
        install(*PIP, "kvarn-no-such-client==1", cwd=tmp_path)


def test_a_version_that_the_index_does_not_have_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "kvarn_a_client-1-py3-none-any.whl").touch()
    with pytest.raises(RuntimeError, match=r"from versions: 1\)"):
        install(*PIP, "--find-links", tmp_path, "kvarn-a-client==2", cwd=tmp_path)


def test_the_documents_name_the_versions_that_are_tested() -> None:
    document = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    assert pinned()
    assert not [f"{name} {version}" for name, version in pinned() if f" {version}" not in document]


def pinned() -> list[tuple[str, str]]:
    """The clients of all lists with their versions, without the packages that they draw in."""
    lines = [line for path in LISTS.glob("*/requirements.txt") for line in path.read_text().splitlines()]
    packages = [json.loads(path.read_text())["dependencies"] for path in LISTS.glob("*/package.json")]
    pairs = [re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?==([\w.]+)", line) for line in lines if line]
    assert all(pairs), lines
    return [pair.groups() for pair in pairs if pair] + [one for found in packages for one in found.items()]
