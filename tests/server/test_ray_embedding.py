"""`kvarn index add --ray`: actors on two nodes embed, and the index is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.on_ray import ENVIRONMENT, ray_nodes
from tests.unit.cli.test_index_workers import files_of, index_add, stored, write_folder

pytest.importorskip("ray", reason='Ray is not installed; `make .venv/.ray`, or pip install "kvarn[ray]"')
pytestmark = [pytest.mark.long, pytest.mark.model]


def test_an_index_made_on_two_nodes_is_that_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "docs", 40, 40)
    one = index_add(tmp_path / "one", folder)
    one.communicate()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with ray_nodes(2) as (address, _):
        many = index_add(tmp_path / "many", folder, "--workers", "2", "--ray", address)
        told, problems = many.communicate()
        assert "40 added, 0 updated, 0 unchanged, 40 chunks, 1 could not be read" in told, problems
        again = index_add(tmp_path / "many", folder, "--workers", "2", "--ray", address)
        assert "0 added, 0 updated, 40 unchanged" in again.communicate()[0]
    assert stored(tmp_path / "one", monkeypatch) == stored(tmp_path / "many", monkeypatch)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "many") != {}
