"""Where a test puts its key file, and the time as it wants it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.server.limiting import Clock


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


@pytest.fixture
def clock() -> Clock:
    return Clock()
