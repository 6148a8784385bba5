"""`kvarn index` where it needs no model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvarn.cli.collections import sync
from kvarn.cli.main import app
from kvarn.errors import ConfigError, StorageError
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.ingest.folder_sync import SyncReport
from tests.unit.retrieval.words import WordEmbedder


def _stats(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["index", "stats", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_stats_are_of_all_collections_unless_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_HOME", str(tmp_path))
    assert "no collections" in _stats()
    assert json.loads(_stats("--json")) == []
    for name, texts in (("birds", ["a peacock"]), ("mills", ["a mill", "a wheel"])):
        with Collection(name, model=WordEmbedder()) as collection:
            collection.add(texts)
    assert [line.split() for line in _stats().splitlines() if "documents" in line] == [
        ["documents", "1"],
        ["documents", "2"],
    ]
    assert [one["name"] for one in json.loads(_stats("--json"))] == ["birds", "mills"]
    assert "birds" not in _stats("--collection", "mills")
    assert json.loads(_stats("--collection", "mills", "--json"))["chunks"] == 2


def test_a_file_whose_name_has_a_line_of_its_own_does_not_speak_for_us(capsys: pytest.CaptureFixture[str]) -> None:
    forged = "a.md\nkvarn: 9 removed"
    sync.print_report(SyncReport(duplicates={forged: forged}, failed={"b": f"{forged}: broken"}), as_json=False)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_watch_goes_on_when_a_look_fails_and_tells_each_reason_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sync, "WATCH_S", 0.0)
    unread = SyncReport(failed={"a.pdf": "a.pdf: is broken"})
    both = SyncReport(failed={**unread.failed, "b.pdf": "b.pdf: is broken"})
    gone = ConfigError("docs is no folder, or not mounted")
    looks = iter(
        [unread, gone, gone, StorageError("the disk is full"), unread, both, SyncReport(), KeyboardInterrupt()]
    )

    def look() -> SyncReport:
        found = next(looks)
        if isinstance(found, BaseException):
            raise found
        return found

    with pytest.raises(KeyboardInterrupt):
        sync._watch(look, unread, as_json=False)
    told = capsys.readouterr()
    assert told.err.splitlines() == [
        "kvarn: docs is no folder, or not mounted",
        "kvarn: the disk is full",
        "kvarn: b.pdf: is broken",
    ]
    nothing = "0 added, 0 updated, 0 moved, 0 removed, 0 chunks"
    assert told.out.splitlines() == [f"{nothing}, 2 could not be read", nothing]


def test_a_folder_that_is_none_leaves_no_collection_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("kvarn.retrieval.collection.ModelEmbedder", lambda *_: WordEmbedder())
    refused = CliRunner().invoke(app, ["index", "sync", "--collection", "mills", str(tmp_path / "nothing")])
    assert refused.exit_code != 0
    assert "no folder" in refused.stderr
    assert "mills" not in CliRunner().invoke(app, ["index", "ls"]).output


def test_a_folder_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("kvarn.retrieval.collection.ModelEmbedder", lambda *_: WordEmbedder())
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "mill.md").write_text("A mill grinds grain.")
    (folder / "mill.png").write_bytes(b"png")
    arguments = ["index", "sync", "--collection", "mills", str(folder)]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert "1 added, 0 updated, 0 moved, 0 removed, 1 chunks" in first.stdout
    assert "1 left out, files of the kind .png are not read: mill.png" in first.stderr
    (folder / "mill.md").rename(folder / "wheel.md")
    second = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert second["moved"] == {str(folder / "mill.md"): str(folder / "wheel.md")}
    (folder / "wheel.md").unlink()
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code != 0
    assert CliRunner().invoke(app, [*arguments, "--force"]).exit_code == 0
