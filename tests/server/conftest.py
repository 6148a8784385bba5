"""One server process for all tests that need no special one."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.server.beside import a_neighbour, state_of, story
from tests.server.edge_client import until
from tests.server.keyed import KeyedServer, running
from tests.server.process import MINILM, SMOLLM2, ServerProcess, model_path


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The models smollm2 and minilm, no keys; whoever breaks it breaks the tests after it."""
    models = ("--model", model_path(SMOLLM2), "--model", model_path(MINILM))
    home = tmp_path_factory.mktemp("home")
    options = ("--context", "2048", "--batch-dir", home / "batches")
    with ServerProcess(*models, *options, env={"KVARN_HOME": str(home)}, module="tests.server.faulty") as process:
        yield process


@pytest.fixture(scope="module")
def unchanged(server: ServerProcess) -> Iterator[None]:
    """Whatever a module's tests ask: a stream beside the first is right, and no request, block, task or file stays."""
    answer = story(server)
    with a_neighbour(server, answer):
        yield


@pytest.fixture(scope="module")
def unchanged_keyed(keyed: KeyedServer) -> Iterator[None]:
    """The same for the one with keys, without a neighbour."""
    keyed.chat("alice", "hi")
    before = state_of(keyed.process)
    yield
    until(lambda: state_of(keyed.process) == before)


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
