"""Folders in step: what is indexed after any history of changes is what a fresh index of the folder holds."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarn.errors import ConfigError, StorageError
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.ingest import folder_scan, folder_sync
from kvarn.retrieval.ingest.files import read_file
from kvarn.retrieval.ingest.folder_scan import scan_folder
from kvarn.retrieval.ingest.gitignore import IgnoreFile, is_ignored
from kvarn.retrieval.types import Mode
from tests.conftest import Record, Size
from tests.unit.retrieval.words import Float32, WordEmbedder, unit

WORDS = ["mill", "grain", "flour", "stone", "wheel", "river", "bread", "oven", "salt", "water", "star", "lens"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = Path("docs")
    folder.mkdir()
    return folder


def test_a_moved_file_is_the_same_document_under_its_new_path(tmp_path: Path, root: Path) -> None:
    embedder = WordEmbedder()
    (root / "mill.md").write_text("# Mill\n\nA mill grinds grain.")
    (root / "star.md").write_text("# Star\n\nStars shine.")
    with Collection("c", folder=tmp_path, model=embedder) as collection:
        collection.sync(root)
        num_embedded = embedder.num_embedded
        (root / "sub").mkdir()
        (root / "mill.md").rename(root / "sub" / "wheel.md")
        report = collection.sync(root)
        assert report.moved == {"docs/mill.md": "docs/sub/wheel.md"}
        assert embedder.num_embedded == num_embedded
        (hit,) = collection.search("grain", 1, "sparse")
        assert (hit.id, hit.source) == ("docs/sub/wheel.md#0", "docs/sub/wheel.md")


def test_files_that_change_places_are_followed(tmp_path: Path, root: Path) -> None:
    (root / "a.txt").write_text("about mills")
    (root / "b.txt").write_text("about stars")
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.sync(root)
        (root / "a.txt").rename(root / "x")
        (root / "b.txt").rename(root / "a.txt")
        (root / "x").rename(root / "b.txt")
        assert collection.sync(root).moved == {"docs/a.txt": "docs/b.txt", "docs/b.txt": "docs/a.txt"}
        assert collection.search("mills", 1, "sparse")[0].source == "docs/b.txt"
        assert not collection.sync(root).has_changes


def test_documents_that_are_no_files_of_the_folder_stay(tmp_path: Path, root: Path) -> None:
    (root / "a.txt").write_text("about mills")
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add(
            [{"text": "kept", "id": "mine", "source": "docs/a.txt"}, {"text": "kept too", "id": "docs2/b.txt"}]
        )
        collection.sync(root)
        (root / "a.txt").write_text("about ships")
        collection.sync(root)
        assert {one["id"] for one in collection.documents()} == {"mine", "docs2/b.txt", "docs/a.txt"}


@pytest.mark.parametrize("num_left", [0, 3])
def test_a_folder_that_has_lost_its_files_is_not_followed_without_force(
    tmp_path: Path, root: Path, num_left: int
) -> None:
    for n in range(12):
        (root / f"{n}.txt").write_text(f"number {n}")
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.sync(root)
        for n in range(num_left, 12):
            (root / f"{n}.txt").unlink()
        with pytest.raises(ConfigError, match=r"12 documents would be removed.*--force"):
            collection.sync(root)
        assert len(collection.documents()) == 12
        assert len(collection.sync(root, force=True).removed) == 12 - num_left
        with pytest.raises(ConfigError, match="not mounted"):
            collection.sync(root / "nope")


def test_a_folder_in_the_folder_that_is_empty_keeps_its_documents(tmp_path: Path, root: Path) -> None:
    """As a disk that is not mounted; where its files were moved to another folder, they are followed."""
    for folder, number in (("disk", 12), ("rest", 30)):
        (root / folder).mkdir()
        for n in range(number):
            (root / folder / f"{n}.txt").write_text(f"{folder} number {n}")
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.sync(root)
        (root / "disk").rename(root / "away")
        (root / "disk").mkdir()
        assert len(collection.sync(root).moved) == 12
        (root / "away").rename(tmp_path / "elsewhere")
        (root / "away").mkdir()
        report = collection.sync(root)
        assert not report.removed
        assert "its 12 documents stay" in report.failed["docs/away"]
        assert len(collection.documents()) == 42
        assert len(collection.sync(root, force=True).removed) == 12


@pytest.mark.parametrize("moment", ["scan", "read"])
def test_a_folder_that_goes_away_in_the_middle_loses_nothing(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Few documents, of which only the last are gone when they are looked at: no guard of shares would help."""
    for n in range(6):
        (root / f"{n}.txt").write_text(f"number {n}")
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.sync(root)
        for n in range(6):
            (root / f"{n}.txt").write_text(f"edited {n}")
        changed = {"scan": "stamp_of", "read": "read_file"}[moment]
        module = folder_scan if moment == "scan" else folder_sync
        real, seen = getattr(module, changed), []

        def unmounting(given: Any) -> Any:
            seen.append(given)
            if len(seen) == 4:
                root.rename(tmp_path / "gone")
                root.mkdir()
            return real(given)

        with monkeypatch.context() as patched:
            patched.setattr(module, changed, unmounting)
            with pytest.raises(ConfigError, match="unmounted or replaced"):
                collection.sync(root)
        assert len(collection.documents()) == 6
        with pytest.raises(ConfigError, match="holds no files"):
            collection.sync(root)
        root.rmdir()
        (tmp_path / "gone").rename(root)
        assert collection.sync(root).added.updated == 6


def test_a_file_that_is_gone_when_it_is_read_stays_until_the_next_look(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        (root / f"{n}.txt").write_text(f"number {n}")
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.sync(root)
        (root / "2.txt").write_text("edited")
        real = folder_sync.read_file

        def deleted(given: Path) -> Any:
            (root / "2.txt").unlink(missing_ok=True)
            return real(given)

        with monkeypatch.context() as patched:
            patched.setattr(folder_sync, "read_file", deleted)
            report = collection.sync(root)
        assert (report.removed, list(report.failed)) == ((), ["docs/2.txt"])
        assert collection.sync(root).removed == ("docs/2.txt",)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Mounts file systems of a few megabytes in the working folder; they end with the test."""
    folders: list[str] = []

    def mount(name: str, size: str = "4m") -> None:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", name]
        if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
            pytest.skip("a file system can be mounted by root only")
        folders.append(name)

    yield mount
    for name in folders:
        subprocess.run(["umount", "-l", name], check=False, stderr=subprocess.DEVNULL)


def test_a_disk_that_is_unmounted_while_its_files_are_read_loses_nothing(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, mounted: Callable[[str], None]
) -> None:
    mounted("docs")
    for n in range(20):
        (root / f"{n:02}.txt").write_text(f"number {n}")
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.sync(root)
        for n in range(20):
            (root / f"{n:02}.txt").write_text(f"edited {n}")
        real, seen = folder_sync.read_file, []

        def unmounting(given: Path) -> Any:
            seen.append(given)
            if len(seen) == 15:
                subprocess.run(["umount", "-l", "docs"], check=True)
            return real(given)

        monkeypatch.setattr(folder_sync, "read_file", unmounting)
        with pytest.raises(ConfigError, match="unmounted or replaced"):
            collection.sync(root)
        assert len(collection.documents()) == 20


def test_on_a_full_disk_what_is_stored_stays_and_the_next_sync_completes(
    tmp_path: Path, root: Path, mounted: Callable[[str], None]
) -> None:
    """There is no room for anything, for some of what is written, or for the documents and not for the indexes."""
    Path("home").mkdir()
    mounted("home", "16m")
    refused = []
    with Collection("c", folder="home", model=WordEmbedder()) as collection:
        for number, room in enumerate((0, 600_000, 1_200_000)):
            for n in range(30):
                (root / f"{n}.txt").write_text(
                    " ".join(f"{WORDS[i % 12]} {n}of{number}{'x' * 40}{i}" for i in range(300))
                )
            filler = Path("home/filler")
            filler.write_bytes(bytes(shutil.disk_usage("home").free - room))
            try:
                collection.sync(root)
            except StorageError as error:
                refused.append((room, str(error)))
            filler.unlink()
            collection.sync(root)
            collection._index.check()  # type: ignore[attr-defined]
            _assert_as_fresh(collection, tmp_path, root, f"fresh{number}", ["sparse"])
    assert refused[0][0] == 0
    assert "full" in refused[0][1]


def test_stamps_that_cannot_be_written_are_a_warning(
    tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "a.txt").write_text("about mills")
    os.utime(root / "a.txt", (1, 1))
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        (tmp_path / "c" / "synced-files.part").mkdir()  # in the way of what is written
        assert collection.sync(root).added.added == 1
        assert "the next sync reads all files again" in caplog.text
        (tmp_path / "c" / "synced-files.part").rmdir()
        assert not collection.sync(root).has_changes
        assert (tmp_path / "c" / "synced-files.json").is_file()


def test_two_folders_of_one_collection_are_not_read_again_by_turns(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path("other")
    other.mkdir()
    for folder in (root, other):
        (folder / "a.txt").write_text(f"about {folder}")
        os.utime(folder / "a.txt", (1, 1))
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.sync(root)
        collection.sync(other)
        written = (tmp_path / "c" / "synced-files.json").stat().st_mtime_ns
        read: list[Path] = []
        real = folder_sync.read_file
        monkeypatch.setattr(folder_sync, "read_file", lambda path: read.append(path) or real(path))
        for folder in (root, other, root):
            assert not collection.sync(folder).has_changes
        assert not read
        assert (tmp_path / "c" / "synced-files.json").stat().st_mtime_ns == written


def test_the_working_folder_is_followed_under_its_short_name(tmp_path: Path, root: Path) -> None:
    os.chdir(root)
    Path("a.txt").write_text("about mills")
    Path("sub").mkdir()
    Path("sub/b.txt").write_text("about stars")
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add({"text": "kept", "id": "../other.txt", "source": "../other.txt"})
        collection.sync(".")
        Path("a.txt").unlink()
        Path("sub/b.txt").rename("b.txt")
        report = collection.sync(".")
        assert (report.removed, report.moved) == (("a.txt",), {"sub/b.txt": "b.txt"})
        assert {one["id"] for one in collection.documents()} == {"../other.txt", "b.txt"}


@pytest.mark.parametrize("again", ["absolute", "elsewhere", "above", "below"])
def test_a_folder_by_another_name_is_the_same_folder(tmp_path: Path, root: Path, again: str) -> None:
    """Before, what had changed was there twice: as it was, and as it is."""
    top, files = root.absolute(), root.absolute() / "sub" / "in"
    files.mkdir(parents=True)
    for number in range(12):
        (files / f"{number}.txt").write_text(f"about mill {number}")
    folders = {"absolute": top / "sub", "elsewhere": Path("sub"), "above": top, "below": files}
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add({"text": "kept", "id": "other.txt", "source": "other.txt"})
        collection.sync("docs/sub")
        (files / "3.txt").write_text("about stars")
        (files / "4.txt").rename(files / "moved.txt")
        if again == "elsewhere":
            os.chdir(top)
        report = collection.sync(folders[again])
        place = Path("sub/in") if again == "elsewhere" else files
        there = {(place / one.name).as_posix() for one in files.iterdir()}
        assert {one["id"] for one in collection.documents()} == there | {"other.txt"}
        assert (len(report.moved), report.added.updated, report.added.added, report.removed) == (12, 1, 0, ())
        assert not collection.sync(folders[again]).has_changes


def test_a_path_that_leads_out_of_the_folder_again_is_not_below_it(tmp_path: Path, root: Path) -> None:
    (tmp_path / "other.txt").write_text("about stars")
    (root / "a.txt").write_text("about mills")
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add([read_file(root / ".." / "other.txt")])
        collection.sync(root)
        assert {one["id"] for one in collection.documents()} == {"docs/a.txt", "docs/../other.txt"}
        collection.sync(root.absolute())  # the same folder by another name
        assert {one["id"] for one in collection.documents()} == {f"{tmp_path}/docs/a.txt", "docs/../other.txt"}


def test_names_of_one_folder_that_are_both_there_become_one(tmp_path: Path, root: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (root / name).write_text(f"about {name}")
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.sync("docs")
        collection.add({"text": "about a, read by its other name", "id": str(path := root.absolute() / "a.txt")})
        collection.add({"text": "about a, as it was", "id": str(path), "source": str(path)})
        report = collection.sync(root.absolute())
        assert {one["id"] for one in collection.documents()} == {str(path), str(root.absolute() / "b.txt")}
        assert (report.removed, list(report.moved)) == (("docs/a.txt",), ["docs/b.txt"])
        (hit,) = collection.search("about a.txt", 1, "sparse", {"id": str(path)})
        assert hit.text == "about a.txt"


def test_links_in_circles_and_deep_folders_are_scanned(tmp_path: Path, root: Path) -> None:
    (root / "self.txt").symlink_to("self.txt")
    (root / "one").symlink_to("two")
    (root / "two").symlink_to("one")
    (root / "sub").mkdir()
    (root / "sub" / "up").symlink_to(root.absolute())
    (root / "sub" / "a.txt").write_text("about mills")
    (root / "link.txt").symlink_to("sub/a.txt")
    deep = root
    for _ in range(1010):  # more than Python calls within each other
        deep /= "d"
        deep.mkdir()
    (deep / "deep.txt").write_text("deep down")
    try:
        scan = scan_folder(root)
    finally:
        subprocess.run(["rm", "-rf", str(root / "d")], check=True)  # shutil.rmtree, and so pytest, would not reach it
    assert [name for name in scan.files if not name.startswith("d/")] == ["link.txt", "sub/a.txt"]
    assert any(name.endswith("deep.txt") for name in scan.files)
    assert not scan.unlisted
    assert {"self.txt", "one", "two", "sub/up"} <= set(scan.skipped)


def test_rules_above_a_folder_of_a_repository_hold(tmp_path: Path, root: Path) -> None:
    for name in ("a.txt", "b.txt", "sub/b.txt", "sub/c.txt"):
        path = root / "inner" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    Path(".gitignore").write_text("b.txt\n/docs/inner/sub/c.txt\ninner/\n")
    assert len(scan_folder(root / "inner").files) == 4  # no repository
    Path(".git").mkdir()
    assert list(scan_folder(root / "inner").files) == ["a.txt"]  # and the folder that is asked for is not left out
    (root / ".gitignore").write_text("!b.txt\n")
    assert list(scan_folder(root / "inner").files) == ["a.txt", "b.txt", "sub/b.txt"]


def test_what_cannot_be_read_is_told_and_the_rest_is_indexed(tmp_path: Path, root: Path) -> None:
    (root / "good.txt").write_text("about mills")
    (root / "utf16.txt").write_bytes("about stars".encode("utf-16"))
    (root / "binary.txt").write_bytes(b"\x7fELF\0\0\xff\xfe\x01")
    (root / "empty.md").write_text(" ")
    (root / "photo.png").write_bytes(b"png")
    (root / ".hidden.txt").write_text("hidden")
    (root / "loop").symlink_to(root.absolute())
    (root / "lost.txt").symlink_to(root.absolute() / "nowhere.txt")
    (root / ".gitignore").write_text("build/\n*.log\n")
    (root / "a.log").write_text("log")
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        report = collection.sync(root)
        assert {one["id"] for one in collection.documents()} == {"docs/good.txt", "docs/utf16.txt"}
    assert set(report.failed) == {"docs/binary.txt", "docs/empty.md"}
    assert set(report.skipped) == {"photo.png", ".hidden.txt", ".gitignore", "loop", "lost.txt", "a.log"}
    assert ".png are not read" in report.skipped["photo.png"]


def test_a_file_that_changes_while_it_is_read_keeps_what_is_stored(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / "a.txt"
    path.write_text("about mills")
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.sync(root)
        path.write_text("half of a new tex")
        read = folder_sync.read_file

        def written_meanwhile(given: Path) -> Any:
            document = read(given)
            given.write_text(given.read_text() + "t")
            return document

        with monkeypatch.context() as patched:
            patched.setattr(folder_sync, "read_file", written_meanwhile)
            assert "changes while it is read" in collection.sync(root).failed["docs/a.txt"]
        assert collection.search("mills", 1, "sparse")
        assert collection.sync(root).added.updated == 1


def test_a_folder_that_cannot_be_listed_keeps_its_documents(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "sub").mkdir()
    (root / "sub" / "a.txt").write_text("about mills")
    (root / "b.txt").write_text("about stars")
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.sync(root)
        scandir = os.scandir

        def failing(path: Any) -> Any:
            if str(path).endswith("sub"):
                raise OSError(5, "Input/output error")
            return scandir(path)

        monkeypatch.setattr(os, "scandir", failing)
        report = collection.sync(root)
        assert not report.removed
        assert report.failed == {"docs/sub": "docs/sub: Input/output error"}


@pytest.mark.parametrize("seed", range(3))
def test_after_any_changes_the_index_equals_a_fresh_one(tmp_path: Path, root: Path, size: Size, seed: int) -> None:
    rng = random.Random(seed)
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        for step in range(size(12, 60)):
            for _ in range(rng.randint(1, 6)):
                _change(rng, root)
            collection.sync(root, force=True)
            if step % 4 == 0:
                _assert_as_fresh(collection, tmp_path, root, f"fresh{step}")
        collection._index.check()  # type: ignore[attr-defined]
        _assert_as_fresh(collection, tmp_path, root, "last")


def test_a_sync_that_was_killed_is_completed_by_the_next(tmp_path: Path, root: Path, size: Size) -> None:
    rng = random.Random(0)
    program = textwrap.dedent(f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})
        from kvarn.retrieval.collection import Collection
        from tests.unit.retrieval.words import WordEmbedder
        with Collection("c", folder={str(tmp_path)!r}, model=WordEmbedder()) as collection:
            print("ready", flush=True)
            collection.sync("docs", force=True)
    """)
    for round_ in range(size(4, 40)):
        for _ in range(40):
            _change(rng, root)
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        try:
            child.wait(rng.random() * 0.3)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
            collection.sync(root, force=True)
            collection._index.check()  # type: ignore[attr-defined]
            _assert_as_fresh(collection, tmp_path, root, f"fresh{round_}")


@pytest.mark.parametrize(
    ("rules", "path", "is_folder", "expected"),
    [
        ("*.log", "sub/a.log", False, True),
        ("/a.log", "sub/a.log", False, False),
        ("/a.log", "a.log", False, True),
        ("build/", "build", False, False),
        ("build/", "sub/build", True, True),
        ("*.log\n!keep.log", "keep.log", False, False),
        ("docs/**/x.md", "docs/a/b/x.md", False, True),
        ("docs/**/x.md", "docs/x.md", False, True),
        ("a/*", "a/b/c", False, False),
        ("**/tmp", "x/y/tmp", True, True),
        ("foo/**", "foo/a/b", False, True),
        ("fil[ab].txt", "fila.txt", False, True),
        ("fil[!ab].txt", "fila.txt", False, False),
        (r"\#x", "#x", False, True),
        ("# comment", "# comment", False, False),
        ("[", "[", False, False),
        ("x   ", "x", False, True),
    ],
)
def test_gitignore_rules_mean_what_git_says(rules: str, path: str, is_folder: bool, expected: bool) -> None:
    assert is_ignored(path, is_folder, [IgnoreFile.parse(rules)]) is expected


def test_a_hundred_thousand_small_files_are_synced(tmp_path: Path, root: Path, size: Size, record: Record) -> None:
    num_files = size(1_000, 100_000)
    for n in range(num_files):
        if n % 1_000 == 0:
            folder = root / str(n)
            folder.mkdir()
        (folder / f"{n}.txt").write_text(f"{WORDS[n % 12]} {n}")
        os.utime(folder / f"{n}.txt", (1, 1))
    seconds = {}
    with Collection("c", folder=tmp_path, model=_SumEmbedder()) as collection:
        for what in ("new", "unchanged", "one edited"):
            if what == "one edited":
                (root / "0" / "5.txt").write_text("edited")
            began = time.process_time()
            report = collection.sync(root)
            seconds[f"{what}: seconds of CPU time"] = round(time.process_time() - began, 2)
            counts = (report.added.added, report.added.updated)
            assert counts == {"new": (num_files, 0), "unchanged": (0, 0), "one edited": (0, 1)}[what]
        assert len(collection) == num_files
        assert collection.search("edited", 1, "sparse")[0].source == "docs/0/5.txt"
    record("sync-small-files", {"files": num_files, **seconds})


class _SumEmbedder(WordEmbedder):
    """Vectors that cost nothing: the time is that of the sync."""

    def embed(self, texts: Sequence[str]) -> Float32:
        rng = np.random.default_rng(self.num_embedded)
        self.num_embedded += len(texts)
        return unit(rng.standard_normal((len(texts), self.dim))) if len(texts) > 1 else super().embed(texts)


def _change(rng: random.Random, root: Path) -> None:
    """One random change: write, edit, copy, rename, delete, or ignore."""
    files = sorted(path for path in root.rglob("*.txt"))
    kind = rng.choice(["write", "write", "edit", "copy", "rename", "delete", "ignore"])
    target = root / rng.choice(["", "sub", "sub/deep"]) / f"{rng.choice(WORDS)}{rng.randint(0, 3)}.txt"
    target.parent.mkdir(parents=True, exist_ok=True)
    if kind == "ignore":
        (root / ".gitignore").write_text(f"{rng.choice(WORDS)}*.txt\n")
    elif kind == "write" or not files:
        target.write_text(" ".join(rng.choices(WORDS, k=rng.randint(1, 30))))
    elif kind == "edit":
        rng.choice(files).write_text(" ".join(rng.choices(WORDS, k=5)))
    elif kind == "copy":
        target.write_bytes(rng.choice(files).read_bytes())
    elif kind == "rename":
        rng.choice(files).rename(target)
    else:
        rng.choice(files).unlink()


def _assert_as_fresh(
    collection: Collection, tmp_path: Path, root: Path, name: str, modes: Sequence[Mode] = ("sparse", "dense", "hybrid")
) -> None:
    """What it holds, and what searches find with which scores, is what a fresh collection of the folder has."""
    with Collection(name, folder=tmp_path, model=WordEmbedder()) as fresh:
        fresh.sync(root)
        assert _content(collection) == _content(fresh)
        assert _found(collection, modes) == pytest.approx(_found(fresh, modes), abs=1e-5)


def _content(collection: Collection) -> Any:
    """Documents, their digests, and the texts and vectors of all their chunks."""
    store: Any = collection._index.store
    keys, _ = store.changed_since(0)
    vectors = store.vectors(keys)
    chunks = {chunk.id: (chunk.chunk, vectors[key].tobytes()) for key, chunk in store.chunks(keys).items()}
    return collection.documents(), collection.files_below("docs"), chunks


def _found(collection: Collection, modes: Sequence[Mode]) -> dict[tuple[str, ...], float]:
    """Score and relevance of all hits of some searches: BM25, cosines and fused scores."""
    asked = ["mill", "grain flour", "salt in the water", "a star nobody wrote of"]
    return {
        (query, mode, hit.id, what): value
        for query in asked
        for mode in modes
        for hit in collection.search(query, 1000, mode)
        for what, value in (("score", hit.score), ("relevance", hit.relevance or 0.0))
    }


def test_a_file_whose_name_is_not_unicode_is_left_out_alone(tmp_path: Path, root: Path) -> None:
    (root / "good.md").write_text("mill grain", encoding="utf-8")
    bad = os.fsencode(root) + b"/\xff.md"
    try:
        with open(bad, "w", encoding="utf-8") as file:
            file.write("star")
    except OSError:
        pytest.skip("this file system has Unicode names only")
    with Collection("docs", folder=tmp_path / "index", model=WordEmbedder()) as collection:
        report = folder_sync.sync_folder(collection, root)
    assert report.added.added == 1
    assert list(report.failed.values()) == ["docs/\\xff.md: has a name that is not Unicode; rename it"]


def test_a_path_too_long_to_be_stored_is_left_out_alone(tmp_path: Path, root: Path) -> None:
    (root / "good.md").write_text("mill grain", encoding="utf-8")
    deep = root / "/".join(["d" * 200] * 6)
    deep.mkdir(parents=True)
    (deep / "a.md").write_text("star", encoding="utf-8")
    with Collection("docs", folder=tmp_path / "index", model=WordEmbedder()) as collection:
        report = folder_sync.sync_folder(collection, root)
    assert report.added.added == 1
    assert [why.partition(": ")[2] for why in report.failed.values()] == [
        "has a path of 1,215 characters, at most 1,024 are stored; move it"
    ]
