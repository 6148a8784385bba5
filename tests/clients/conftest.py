"""One server for all clients, started as a new user would: models and no other setting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.assets import qwen_coder
from tests.server.process import MINILM, SMOLLM2, ServerProcess, model_path


@pytest.fixture(scope="package")
def served(is_long: bool) -> Iterator[ServerProcess]:
    """smollm2 and minilm; under --long also coder, for clients whose prompts need a better model."""
    models = ["--model", model_path(SMOLLM2), "--model", model_path(MINILM)]
    if is_long:
        models += ["--model", f"coder={qwen_coder()}"]
    with ServerProcess(*models) as server:
        yield server
