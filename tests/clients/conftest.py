"""One server for all clients, started as a new user would: models and no other setting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.process import MINILM, SMOLLM2, ServerProcess, model_path


@pytest.fixture(scope="package")
def served() -> Iterator[ServerProcess]:
    with ServerProcess("--model", model_path(SMOLLM2), "--model", model_path(MINILM)) as server:
        yield server
