"""`kvarn index add --workers N`: the same index as with one process, also when processes are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvarn.errors import BackendError
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.embedder_pool import EmbedderPool, process_pool
from kvarn.retrieval.storage.paths import tenant_folder
from tests.conftest import Size
from tests.rules.tree import ROOT
from tests.server.process import MINILM, model_path
from tests.unit.retrieval.words import Float32, WordEmbedder

WORDS = ["mill", "grain", "flour", "stone", "wheel", "river", "bread", "oven", "salt", "water", "star", "lens"]


def write_folder(folder: Path, num_files: int, num_words: int) -> Path:
    folder.mkdir()
    for number in range(num_files):
        rng = random.Random(number)
        (folder / f"{number:04}.md").write_text(f"# File {number}\n\n" + " ".join(rng.choices(WORDS, k=num_words)))
    (folder / "bad.md").write_bytes(b"\xff\xfe\xff")
    return folder


def index_add(home: Path, folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvarn.cli.main", "index", "add", "-c", "c", "--model", str(model_path(MINILM))]
    environment = {**os.environ, "KVARN_HOME": str(home)}
    return subprocess.Popen(
        [*command, *options, folder.name],
        cwd=folder.parent,
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def files_of(home: Path) -> dict[str, bytes]:
    """The indexes as they are on the disk."""
    found = (home / "collections" / "shared" / "c").glob("dense-*")
    return {path.name: path.read_bytes() for path in found}


def stored(home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, bytes]]:
    """Every chunk's text and vector."""
    monkeypatch.setenv("KVARN_HOME", str(home))
    with Collection.open("c", model=WordEmbedder(), folder=tenant_folder()) as collection:
        store = collection._index.store
        keys = list(range(1, len(collection) + 100))
        vectors = store.vectors(keys)
        return {one.id: (one.chunk.text, vectors[key].tobytes()) for key, one in store.chunks(keys).items()}


@pytest.mark.model
def test_an_index_is_the_same_with_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "docs", 40, 40)
    for number in (1, 2):
        done = index_add(tmp_path / f"home{number}", folder, "--workers", str(number))
        told, problems = done.communicate()
        assert "40 added, 0 updated, 0 unchanged, 40 chunks, 1 could not be read" in told, problems
        assert done.returncode == 1
        assert "bad.md" in problems
    first, second = tmp_path / "home1", tmp_path / "home2"
    assert stored(first, monkeypatch) == stored(second, monkeypatch)
    assert len(stored(first, monkeypatch)) == 40
    assert files_of(first) == files_of(second) != {}


@pytest.mark.long
@pytest.mark.model
def test_what_was_killed_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "docs", 1500, 30)
    whole = index_add(tmp_path / "whole", folder)
    whole.communicate()
    killed = index_add(tmp_path / "killed", folder, "--workers", "2")
    database = tmp_path / "killed" / "collections" / "shared" / "c" / "truth.sqlite"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and num_stored(database, monkeypatch, tmp_path / "killed") < 512:
        time.sleep(0.2)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    again = index_add(tmp_path / "killed", folder, "--workers", "2")
    told, problems = again.communicate()
    counts = {word: int(number.replace(",", "")) for number, word in (one.split()[:2] for one in told.split(", "))}
    assert counts["added"] + counts["unchanged"] == 1500, problems
    assert counts["unchanged"] >= 512
    assert stored(tmp_path / "killed", monkeypatch) == stored(tmp_path / "whole", monkeypatch)


def num_stored(database: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> int:
    return len(stored(home, monkeypatch)) if database.exists() else 0


@pytest.mark.model
def test_a_killed_process_leaves_its_work_to_the_others() -> None:
    texts = [f"text {number} of mills and stars" for number in range(200)]
    pool = process_pool(str(model_path(MINILM)), 2)
    try:
        expected = pool.embed(texts)
        engines = [int(one) for one in children() if "kvarn.engine.process" in command_of(one)]
        os.kill(engines[-1], signal.SIGKILL)
        assert np.array_equal(pool.embed(texts), expected)
        assert pool.num_workers == 1
        assert pool.count("a mill") == 2
        os.kill(next(one for one in engines if Path(f"/proc/{one}").exists() and one != engines[-1]), signal.SIGKILL)
        with pytest.raises(BackendError, match="every embedding process was killed"):
            pool.embed(texts)
    finally:
        pool.close()


def children() -> list[int]:
    listed = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return sorted(int(pid) for one in listed for pid in one.read_text().split())


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_pieces_come_back_in_order_and_every_text_once(size: Size) -> None:
    class Flaky(WordEmbedder):
        """Lost after some pieces."""

        def __init__(self, num_pieces: int) -> None:
            super().__init__()
            self.left = num_pieces

        def embed(self, texts: object) -> Float32:
            self.left -= 1
            if self.left < 0:
                raise BackendError("gone")
            time.sleep(0.001 * random.random())
            return super().embed(texts)  # type: ignore[arg-type]

    plain = WordEmbedder()
    for number in range(size(10, 200)):
        texts = [f"text {one}" for one in range(random.Random(number).randrange(400))]
        pool = EmbedderPool(WordEmbedder(), [Flaky(2), Flaky(3), WordEmbedder()])
        assert np.array_equal(pool.embed(texts), plain.embed(texts))
        assert np.array_equal(pool.embed(texts[:5]), plain.embed(texts[:5]))
        pool.close()
