"""The choice of kernels on disk: found again by the next process, never in the way."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from kvarn.backends.torch.cuda.pick_store import Foundation, PickStore, source_hash, stored_picks

HERE = Foundation("NVIDIA H200", "9.0", 132, "12.8", "2.11.0", "12.8", "3.6.0", "0123456789abcdef")
TILING = [[16, 64, 128, 6, 4, True], 12.5]


def test_a_later_process_finds_what_was_picked(tmp_path: Path) -> None:
    store = PickStore(HERE, tmp_path)
    store.add("16 4096 4096 0 bfloat16", TILING)
    store.add("8192 4096 4096 0 bfloat16", [None, 0.0])
    store.save()
    later = PickStore(HERE, tmp_path)
    assert later.find("16 4096 4096 0 bfloat16") == TILING
    assert later.find("8192 4096 4096 0 bfloat16") == [None, 0.0]
    assert later.find("32 4096 4096 0 bfloat16") is None
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]  # no draft is left


@pytest.mark.parametrize("field", ["gpu", "processors", "driver", "torch", "cuda", "triton", "kernels"])
def test_picks_of_another_machine_or_version_are_not_found(tmp_path: Path, field: str) -> None:
    store = PickStore(HERE, tmp_path)
    store.add("16 4096 4096 0 bfloat16", TILING)
    store.save()
    other = replace(HERE, **{field: 78 if field == "processors" else "other"})
    assert len(PickStore(other, tmp_path)) == 0


def test_two_processes_add_to_each_other(tmp_path: Path) -> None:
    first, second = PickStore(HERE, tmp_path), PickStore(HERE, tmp_path)
    first.add("a", TILING)
    second.add("b", TILING)
    first.save()
    second.save()
    assert len(PickStore(HERE, tmp_path)) == 2


def test_new_picks_are_written_at_most_once_a_second_during_steps(tmp_path: Path) -> None:
    store = PickStore(HERE, tmp_path)
    for key in ("a", "b"):
        store.add(key, TILING)
        store.save(at_once=False)
    assert len(PickStore(HERE, tmp_path)) == 1
    store.save()
    assert len(PickStore(HERE, tmp_path)) == 2


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"\xff", b"null", b'{"format": 1}', b'{"format": 9, "foundation": {}, "picks": {}}']
)
def test_a_broken_file_is_ignored_with_one_line_and_replaced(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / HERE.file_name
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        store = PickStore(HERE, tmp_path)
    assert len(store) == 0
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]
    store.add("a", TILING)
    store.save()
    assert PickStore(HERE, tmp_path).find("a") == TILING


def test_a_file_with_picks_that_are_no_lists_is_ignored(tmp_path: Path) -> None:
    store = PickStore(HERE, tmp_path)
    store.add("a", TILING)
    store.save()
    path = tmp_path / HERE.file_name
    path.write_text(json.dumps(json.loads(path.read_text()) | {"picks": {"a": 5}}))
    assert len(PickStore(HERE, tmp_path)) == 0


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = PickStore(HERE, tmp_path / "file" / "folder")
    with caplog.at_level(logging.WARNING):
        for key in ("a", "b"):
            store.add(key, TILING)
            store.save()
    assert sum("not kept" in record.getMessage() for record in caplog.records) == 1


def test_every_source_of_the_kernels_counts(tmp_path: Path) -> None:
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("x = 1")
    before = source_hash(tmp_path)
    (tmp_path / "two.py").write_text("x = 2")
    assert source_hash(tmp_path) != before


def test_the_doctor_is_told_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_HOME", str(tmp_path))
    store = PickStore(HERE, tmp_path / "kernels")
    store.add("a", TILING)
    store.save()
    (tmp_path / "kernels" / "picks-broken.json").write_text("{")
    assert [(where, count) for where, count, _ in stored_picks()] == [(HERE, 1)]
