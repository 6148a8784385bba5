"""`kvarn bench model --profile`: where the time of a step goes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from kvarn.backends.select import has_native
from kvarn.bench.model import open_runs
from kvarn.bench.rows import select_rows
from kvarn.config import EngineConfig
from kvarn.errors import ConfigError

if not has_native():
    pytest.skip("needs the compiled core", allow_module_level=True)

from kvarn.backends.native import _native
from kvarn.bench.profile import ALONE, OTHER, WAITING, _shares, profile, region_of
from kvarn.bench.profile_plot import svg
from kvarn.cli.main import app

ROWS = select_rows(["prefill-128", "decode", "batch-4"])


def test_shares_of_a_row_add_up_to_one_and_products_are_among_them(tiny: Path) -> None:
    found = profile(tiny, ROWS, 4, 1, EngineConfig(threads=2))
    assert list(found.rows) == list(ROWS)
    for row in found.rows.values():
        assert sum(row.shares.values()) == pytest.approx(1)
        assert {"products", "attention", "norms", "choosing", OTHER} <= set(row.shares)


def test_time_is_divided_among_kernels_other_code_and_waiting() -> None:
    # Two threads for 100 ticks, of which 60 are in regions with 90 of 120 in tasks.
    shares = _shares(100, 60, 90, {"matmul_Q4_0": 50, "matmul_F32": 10, "rms_norm": 20}, threads=2)
    assert shares == {"products": 0.3, OTHER: 0.25, ALONE: 0.2, WAITING: 0.15, "norms": 0.1}


def test_every_kernel_belongs_to_a_region() -> None:
    kernels = _native.kernel_ticks()
    with_tiles = {"round_row"}  # tables without it quantise rows instead
    assert {name.lower() for name in kernels} == set(_native.kernel_origins("scalar")) | with_tiles
    assert all(region_of(name) for name in kernels)


def test_only_timed_teams_have_times(tiny: Path) -> None:
    with open_runs(tiny, ROWS[:1], 2, EngineConfig(threads=1)) as runs, pytest.raises(ValueError, match="not timed"):
        runs.backend.ticks()  # type: ignore[attr-defined]


def test_a_profile_is_printed_and_drawn(tiny: Path, tmp_path: Path) -> None:
    words = ["bench", "model", "--model", str(tiny), "--profile", "-r", "decode", "--rounds", "1", "--steps", "2"]
    result = CliRunner().invoke(app, [*words, "--plot", str(tmp_path / "profile.svg")])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output.splitlines()[-1])
    assert sum(figures["rows"]["decode"]["shares"].values()) == pytest.approx(1, abs=0.01)
    assert ElementTree.parse(tmp_path / "profile.svg").getroot().tag.endswith("svg")


def test_a_plot_names_the_regions(tiny: Path) -> None:
    drawn = svg(profile(tiny, ROWS[:1], 2, 1, EngineConfig(threads=1)))
    assert "products" in drawn
    assert "prefill-128" in drawn


def test_a_profile_of_other_backends_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match='backend is "torch"'):
        profile(tiny, ROWS[:1], 2, 1, EngineConfig(backend="torch"))
