"""The aliases lead to real packages: fetched once into a store that survives between runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvarn.hub import ALIASES, resolve, store
from kvarn.hub.download.partfile import sha256_of
from tests.assets import cache_folder


@pytest.mark.model
@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_an_alias_resolves_to_the_weights_it_promises(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_HOME", str(cache_folder() / "kvarn-home"))
    if os.environ.get("KVARN_TEST_OFFLINE") and store.find(ALIASES[alias].source) is None:
        pytest.skip(f"{alias} is not in the cache and KVARN_TEST_OFFLINE forbids downloading it")
    path = resolve(alias)
    expected = ALIASES[alias].weights
    weights = path / Path(expected.path).name if path.is_dir() else path
    assert weights.stat().st_size == expected.size
    assert sha256_of(weights) == expected.sha256
    stored = store.find(ALIASES[alias].source)
    assert stored is not None
    assert stored.manifest.digest == expected.sha256
