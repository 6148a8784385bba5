from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvarn.errors import DoesNotFit, DownloadError, ModelNotFound
from kvarn.hub import resolve, store
from kvarn.hub.locate import parse
from kvarn.hub.names import HubName, PypiName, RemoteName
from kvarn.hub.preflight import SpaceCheck, require_space, size_text
from tests.unit.hub.servers import Site, add_repository

NAME = PypiName("tiny", "1.0")


def put(name: RemoteName, files: dict[str, bytes], entry: str = "") -> store.StoredModel:
    target = store.staged_files(store.partial_folder(name))
    stored = []
    for path, body in files.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(body)
        stored.append(store.StoredFile(path, len(body), "ab" * 32))
    return store.publish(
        name, store.ModelManifest(str(name), "http://x", "1", entry, tuple(stored), "2026-01-01T00:00:00Z")
    )


def test_a_published_model_is_found_with_its_entry(home: Path) -> None:
    put(NAME, {"m.gguf": b"abc"}, entry="m.gguf")
    found = store.find(NAME)
    assert found is not None
    assert found.path.read_bytes() == b"abc"
    assert found.manifest.size == 3
    assert not store.partial_folder(NAME).exists()


def test_an_empty_home_has_no_models(home: Path) -> None:
    assert store.list_models() == []
    assert store.find(NAME) is None
    assert not home.exists()


def test_names_that_look_alike_get_folders_of_their_own() -> None:
    names = [HubName("a/b"), HubName("a/b", "c"), HubName("a/b-c"), HubName("a/b", None, "c"), PypiName("a", None, "b")]
    assert len({store.key_of(name) for name in names}) == len(names)


@pytest.mark.parametrize("damage", ["missing", "shorter", "manifest"])
def test_a_damaged_model_counts_as_absent_and_can_be_replaced(home: Path, damage: str) -> None:
    model = put(NAME, {"m.gguf": b"abc"}, entry="m.gguf")
    if damage == "missing":
        model.path.unlink()
    elif damage == "shorter":
        model.path.write_bytes(b"ab")
    else:
        (model.folder / store.MANIFEST).write_text("{")
    assert store.find(NAME) is None
    assert store.list_models() == []
    assert put(NAME, {"m.gguf": b"abc"}, entry="m.gguf").path.read_bytes() == b"abc"


def test_removing_frees_the_model_and_its_unfinished_downloads(home: Path) -> None:
    put(NAME, {"m.gguf": bytes(1000)}, entry="m.gguf")
    store.partial_folder(NAME).mkdir(parents=True)
    (store.partial_folder(NAME) / "x.part").write_bytes(bytes(500))
    assert store.remove(NAME) > 1500
    assert store.find(NAME) is None
    assert not store.partial_folder(NAME).exists()


def test_removing_what_is_not_there_is_an_error(home: Path) -> None:
    with pytest.raises(ModelNotFound, match="kvarn ls"):
        store.remove(NAME)


def test_offline_says_how_to_get_the_model(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DownloadError, match="kvarn pull smollm2"):
        resolve("smollm2", offline=True)
    monkeypatch.setenv("KVARN_OFFLINE", "1")
    with pytest.raises(DownloadError, match="offline"):
        resolve("hf:org/repo")


def test_a_stored_model_is_resolved_at_once_without_heavy_imports(home: Path, patience: float) -> None:
    name = parse("smollm2")
    assert isinstance(name, PypiName)
    put(name, {"m.gguf": b"abc"}, entry="m.gguf")
    script = (
        "import sys, time; from kvarn.hub import resolve; start = time.perf_counter(); resolve('smollm2')\n"
        "print(time.perf_counter() - start)\n"
        "print([m for m in ('huggingface_hub', 'filelock', 'rich', 'ssl', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    seconds, heavy = done.stdout.splitlines()
    assert float(seconds) < 0.02 * patience
    assert heavy == "[]"


def test_resolving_does_not_read_the_weights_again(home: Path, patience: float) -> None:
    model = put(NAME, {"m.gguf": b""}, entry="m.gguf")
    size = 40 << 30  # sparse: hashing 40 GB would take far longer than a test may
    with model.path.open("r+b") as file:
        file.truncate(size)
    manifest = (model.folder / store.MANIFEST).read_text().replace('"size": 0', f'"size": {size}')
    (model.folder / store.MANIFEST).write_text(manifest)
    start = time.perf_counter()
    assert resolve(str(NAME)) == model.path
    assert time.perf_counter() - start < 0.5 * patience


def test_a_home_below_a_file_is_refused_in_one_sentence(hub: Site, home: Path) -> None:
    add_repository(hub, "org/repo", {"m.gguf": bytes(2000)})
    home.write_bytes(b"not a folder")
    with pytest.raises(DownloadError, match="set KVARN_HOME to another folder"):
        resolve("hf:org/repo")


def test_too_little_disk_is_refused_with_both_numbers() -> None:
    space = SpaceCheck(disk_needed=5_000_000_000, disk_free=1_000_000_000, memory_needed=1, memory_total=2)
    with pytest.raises(DownloadError, match=r"needs 5\.0 GB of disk, 1\.0 GB are free"):
        require_space("big", space, force=True)


def test_too_little_memory_is_refused_with_both_numbers_unless_forced() -> None:
    space = SpaceCheck(disk_needed=1, disk_free=2, memory_needed=110_000_000_000, memory_total=16_000_000_000)
    with pytest.raises(DoesNotFit, match=r"needs about 110\.0 GB of memory, this machine has 16\.0 GB") as caught:
        require_space("big", space)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (110_000_000_000, 16_000_000_000)
    require_space("big", space, force=True)


def test_sizes_read_as_people_write_them() -> None:
    assert [size_text(n) for n in (0, 999, 98_362_432, 25_300_000_000)] == [
        "0 bytes",
        "999 bytes",
        "98.4 MB",
        "25.3 GB",
    ]
