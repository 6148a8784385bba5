"""An engine on a fake backend, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvarn.engine.client import EngineClient
from kvarn.engine.engine import Engine
from tests.unit.engine.fake import make_engine


@pytest.fixture
def engine() -> Engine:
    return make_engine(num_blocks=300)


@pytest.fixture
def client(engine: Engine) -> Iterator[EngineClient]:
    client = EngineClient(engine)
    yield client
    client.close()
