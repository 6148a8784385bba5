"""Which backend runs a model, and what is said when the fast one is missing."""

from __future__ import annotations

import pytest

from kvarn.backends import select
from kvarn.config import EngineConfig
from kvarn.errors import ConfigError


def test_without_the_compiled_core_the_reference_runs_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(select, "NATIVE_EXTENSION", "kvarn.backends.native._not_built")
    assert select.make_backend(EngineConfig(), threads=1).name == "reference"
    assert "compiled core is not installed" in caplog.text
    with pytest.raises(ConfigError, match="pip install"):
        select.make_backend(EngineConfig(backend="native"), threads=1)


def test_a_backend_asked_for_by_name_needs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert select.make_backend(EngineConfig(backend="reference"), threads=1).name == "reference"
    assert not caplog.text
