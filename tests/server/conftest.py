"""One server process for all tests that need no special one."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.server.keyed import KeyedServer, running
from tests.server.process import MINILM, SMOLLM2, ServerProcess, model_path


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The models smollm2 and minilm, no keys; whoever breaks it breaks the tests after it."""
    models = ("--model", model_path(SMOLLM2), "--model", model_path(MINILM))
    home = {"KVARN_HOME": str(tmp_path_factory.mktemp("home"))}
    with ServerProcess(*models, "--context", "2048", env=home) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    """An HTTP client of the shared server."""
    with server.client() as http:
        yield http


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServer]:
    """The model smollm2 behind API keys of several tiers."""
    with running(tmp_path_factory.mktemp("keyed")) as server:
        yield server
