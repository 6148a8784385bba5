"""An empty KVARN_HOME, and pip and the hub client pointed at loopback servers of the test's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.hub.servers import Site, serving


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty KVARN_HOME, online whatever the machine's settings are."""
    folder = tmp_path / "home"
    monkeypatch.setenv("KVARN_HOME", str(folder))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("KVARN_OFFLINE", "HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def site() -> Iterator[Site]:
    """A server with nothing on it yet."""
    with serving(Site()) as running:
        yield running


@pytest.fixture
def index(site: Site, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A package index, the only one pip knows."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{site.url}/simple/")
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip-cache"))
    return site


@pytest.fixture
def hub(site: Site, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A Hugging Face hub, the one HF_ENDPOINT names."""
    monkeypatch.setenv("HF_ENDPOINT", site.url)
    return site
