"""Digests of weight files: hashed once, and again when the file is another."""

import hashlib
import json
from pathlib import Path

import pytest

from kvarn.server.models import file_digests
from kvarn.server.models.file_digests import NOTE_FILE, file_digest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVARN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_file_is_read_once(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    assert file_digest(path) == sha256(b"weights")
    (stamp,) = json.loads((home / NOTE_FILE).read_text())
    (home / NOTE_FILE).write_text(json.dumps({stamp: "0" * 64}))
    assert file_digest(path) == "0" * 64, "the note was not used"


def test_a_changed_file_is_read_again(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    file_digest(path)
    path.write_bytes(b"others!")
    assert file_digest(path) == sha256(b"others!")


@pytest.mark.parametrize("note", [b"", b"[1]", b'{"x": 5}', b"\xff", b'{"x": "zz"}'])
def test_a_broken_note_is_ignored_and_replaced(home: Path, tmp_path: Path, note: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    home.mkdir()
    (home / NOTE_FILE).write_bytes(note)
    assert file_digest(path) == sha256(b"weights")
    assert list(json.loads((home / NOTE_FILE).read_text()).values()) == [sha256(b"weights")]


def test_a_home_that_cannot_be_written_costs_nothing_but_time(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    home.write_text("a file")
    assert file_digest(path) == file_digest(path) == sha256(b"weights")


def test_notes_are_bounded(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "MAX_NOTES", 3)
    for number in range(5):
        (tmp_path / f"{number}.gguf").write_bytes(bytes([number]))
        file_digest(tmp_path / f"{number}.gguf")
    assert list(json.loads((home / NOTE_FILE).read_text()).values()) == [sha256(bytes([n])) for n in (2, 3, 4)]
