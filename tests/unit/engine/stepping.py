"""What tests of the runner share: requests, a gate that holds a step, and looking at the engine from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from kvarn.engine.engine import Engine
from kvarn.engine.runner import Runner
from kvarn.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=15, ignore_eos=True)
ENDLESS = GREEDY.replace(max_tokens=190)


class Gate:
    """A rule for FakeBackend that waits: the step in flight stays where the test wants it."""

    def __init__(self, engine: Engine) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self._rule = engine.backend.rule  # type: ignore[attr-defined]
        engine.backend.rule = self  # type: ignore[attr-defined]

    def __call__(self, tokens: Any) -> int:
        self.entered.set()
        assert self.opened.wait(30)
        return int(self._rule(tokens))


def eventually(is_true: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def is_idle(runner: Runner) -> bool:
    """Asked on the engine's thread: nothing runs and no block is held."""

    def look(engine: Engine) -> bool:
        engine.kv.check()
        return not engine.has_work and engine.kv.num_free == engine.kv.num_blocks

    return runner.exclusively(look)


def batch_sizes(engine: Engine) -> list[int]:
    sizes: list[int] = engine.backend.batch_sizes  # type: ignore[attr-defined]
    return sizes


def slowly(_: Any) -> int:
    time.sleep(0.005)
    return 1


def boom() -> int:
    raise RuntimeError("boom")
