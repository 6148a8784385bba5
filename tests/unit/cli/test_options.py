"""Options that commands take in groups."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvarn.cli.main import app


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_an_option_of_a_group_without_a_default_is_required(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["route", *arguments])
    assert "MISSING" not in done.output
    assert "<class" not in done.output
    assert ("[required]" if arguments else "Missing option '--cluster-key'") in done.output
