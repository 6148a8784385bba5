"""A tiny model and a way to run the real command in a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chat_model import write_chat_model
from tests.forked import run_kvarn

Kvarn = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_chat_model(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without an end token: it talks until it is stopped."""
    path = tmp_path_factory.mktemp("model") / "endless.gguf"
    changes = {"tokenizer.ggml.eos_token_id": None, "llama.context_length": 100_000}
    return str(write_chat_model(path, **changes))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An empty store, and no network."""
    return os.environ | {"KVARN_HOME": str(tmp_path / "home"), "KVARN_OFFLINE": "1"}


@pytest.fixture
def kvarn(environment: dict[str, str]) -> Kvarn:
    """Run `kvarn ARGS`, bytes in and out."""

    def run(*arguments: str | bytes, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return run_kvarn(*arguments, env=environment, stdin=stdin)

    return run
