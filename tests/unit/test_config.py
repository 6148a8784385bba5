"""EngineConfig and the environment variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvarn import config
from kvarn.config import EngineConfig
from kvarn.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("threads", 0),
        ("threads", -1),
        ("threads", 2.0),
        ("threads", True),
        ("context", 0),
        ("context", 2**63),
        ("kv_bytes", -1),
        ("kv_bytes", "1GB"),
        ("block_size", 0),
        ("max_batch_tokens", 0),
        ("backend", "vulkan"),
        ("backend", None),
        ("kv_dtype", "q3"),
        ("isa", 5),
    ],
)
def test_a_wrong_option_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        EngineConfig(**{option: value})


def test_the_isa_comes_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_ISA", "scalar")
    assert EngineConfig().isa == "scalar"
    assert EngineConfig(isa="avx2").isa == "avx2"


def test_kvarn_home_moves_the_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVARN_HOME", str(tmp_path / "here"))
    assert config.kvarn_home() == tmp_path / "here"


def test_without_kvarn_home_the_platforms_data_folder_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVARN_HOME", raising=False)
    assert config.kvarn_home().name == "kvarn"


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), ("", False), ("no", False)])
def test_offline_is_a_flag(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("KVARN_OFFLINE", value)
    assert config.is_offline() is expected
