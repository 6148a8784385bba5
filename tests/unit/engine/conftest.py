"""An engine on a fake backend, and a runner of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvarn.engine.engine import Engine
from kvarn.engine.runner import Runner
from tests.unit.engine.fake import make_engine


@pytest.fixture
def engine() -> Engine:
    return make_engine(num_blocks=300)


@pytest.fixture
def runner(engine: Engine) -> Iterator[Runner]:
    runner = Runner(engine)
    yield runner
    runner.close()
