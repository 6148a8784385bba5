"""Models that come with the package: found by name, without network or store."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvarn.cli.main import app
from kvarn.hub import BUNDLED, resolve
from kvarn.hub.bundled import bundled_name

MAX_BYTES = 40_000_000


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_model_needs_no_network_and_is_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_OFFLINE", "1")
    path = resolve(name)
    assert 0 < path.stat().st_size <= MAX_BYTES
    assert bundled_name(path) == name


def test_a_bundled_model_is_neither_fetched_nor_removed() -> None:
    runner = CliRunner()
    assert "on this machine already" in runner.invoke(app, ["pull", "tiny-diffusion"]).output
    refused = runner.invoke(app, ["rm", "tiny-diffusion"])
    assert refused.exit_code == 1
    assert "part of Kvarn" in refused.output
    assert resolve("tiny-diffusion").exists()
