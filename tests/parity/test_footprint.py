"""Peak memory of one answer, held against the size of the file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvarn import LLM
from tests.assets import qwen_coder, smollm2

if TYPE_CHECKING:
    from tests.conftest import Record

pytestmark = pytest.mark.model

NUM_TOKENS = 32
ALLOWANCE = 150_000_000  # Python, its libraries, scratch


@pytest.mark.parametrize("model", [smollm2, qwen_coder], ids=lambda model: model.__name__)
def test_peak_memory_stays_near_the_size_of_the_file(model: Callable[[], Path], record: Record) -> None:
    path = model()
    options = ["-t", "0", "-n", str(NUM_TOKENS), "Why is the sky blue?"]
    peak = _peak_bytes([sys.executable, "-m", "kvarn.cli.main", "run", "-m", str(path), *options])
    record(f"peak-memory-{model.__name__}", {"peak_bytes": peak, "file_bytes": path.stat().st_size})
    assert peak <= 1.3 * path.stat().st_size + 2 * NUM_TOKENS * _kv_bytes_per_token(path) + ALLOWANCE


def _peak_bytes(command: list[str]) -> int:
    pid = os.spawnv(os.P_NOWAIT, command[0], command)
    _, status, usage = os.wait4(pid, 0)
    assert status == 0
    return usage.ru_maxrss * 1024


def _kv_bytes_per_token(path: Path) -> int:
    from tests.running import layout_of

    with LLM(str(path), context=512) as llm:
        return layout_of(llm.spec, "f16").token_bytes
