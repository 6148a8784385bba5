"""Options and fixtures shared by all tests.

A long test has a short form from the same code: `size(short, long)` gives the small number in `make test` and the full
one under `--long`. Tests marked `long` exist only at full size and run only with `--long`. `record(name, figures)`
writes measured figures to `benchmarks/results/` under `--long`, else to the test's own temporary folder. `patience`
multiplies limits on the wall clock: 1 under `--long`, more in `make test`, which also runs on busy machines.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.results import RESULTS, write_result

# Examples are not timed: on a busy machine that says little about us.
hypothesis.settings.register_profile("kvarn", deadline=None)
hypothesis.settings.load_profile("kvarn")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a job of a script's background, whose children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

Size = Callable[[int, int], int]
Record = Callable[[str, Mapping[str, Any]], Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run full sizes and the tests marked `long`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def is_long(request: pytest.FixtureRequest) -> bool:
    """Whether full sizes were asked for with `--long`."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="session")
def size(is_long: bool) -> Size:
    """Choose between a short and a full size: `size(200, 4_000)`."""
    return lambda short, long: long if is_long else short


@pytest.fixture(scope="session")
def patience(is_long: bool) -> float:
    """Allow this many times a promised duration: on a busy machine the wall clock says little about us.

    The promise itself is asserted by the long form, on a quiet machine; the short form catches what hangs or has become
    several times slower.
    """
    return 1.0 if is_long else 4.0


@pytest.fixture
def record(is_long: bool, tmp_path: Path) -> Record:
    """Keep measured figures: `record("kl-divergence", {"mean_kl": ...})`."""
    folder = RESULTS if is_long else tmp_path
    return lambda name, figures: write_result(name, figures, folder)
