"""`hf:` names with the real hub client against a hub on loopback."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from kvarn.errors import DownloadError, ModelNotFound
from kvarn.formats.gguf.writer import write_gguf
from kvarn.formats.open import open_weights
from kvarn.hub import locate, resolve, store
from kvarn.hub.download import fetch_file
from kvarn.hub.names import HubName
from tests.unit.hub.servers import COMMIT, Site, add_repository, serving
from tests.unit.hub.wheels import random_bytes

SMALL, MEDIUM = random_bytes(100_000, seed=1), random_bytes(150_000, seed=2)
PARTS = {f"Q8_0/m-Q8_0-{part:05}-of-00003.gguf": random_bytes(20_000, seed=part) for part in (1, 2, 3)}
FOLDER = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": SMALL,
    "model-00002-of-00002.safetensors": MEDIUM,
    "model.safetensors.index.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
}


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_file, "FIRST_PAUSE_S", 0.001)


def resolved_path(file: str, repo: str = "org/repo", commit: str = COMMIT) -> str:
    return f"/{repo}/resolve/{commit}/{file}"


def test_the_only_gguf_of_a_repository_is_fetched_once(hub: Site) -> None:
    add_repository(hub, "org/repo", {"m.gguf": SMALL, "README.md": b"hi"})
    path = resolve("hf:org/repo")
    assert (path.name, path.read_bytes()) == ("m.gguf", SMALL)
    num_requests = len(hub.requests)
    assert resolve("hf:org/repo") == path
    assert len(hub.requests) == num_requests


def test_the_manifest_pins_the_commit_and_the_digest(hub: Site) -> None:
    add_repository(hub, "org/repo", {"m.gguf": SMALL})
    manifest = json.loads((resolve("hf:org/repo@main").parent.parent / "manifest.json").read_text())
    assert (manifest["name"], manifest["version"]) == ("hf:org/repo@main", COMMIT)
    assert manifest["files"][0]["sha256"] == hashlib.sha256(SMALL).hexdigest()


@pytest.mark.parametrize(("selector", "expected"), [("", "m-Q4_K_M.gguf"), (":q8_0", "m-Q8_0.gguf")])
def test_a_quantisation_is_selected(hub: Site, selector: str, expected: str) -> None:
    add_repository(hub, "org/repo", {"m-Q4_K_M.gguf": SMALL, "m-Q8_0.gguf": MEDIUM})
    assert resolve(f"hf:org/repo{selector}").name == expected


def test_an_unclear_choice_lists_the_files(hub: Site) -> None:
    add_repository(hub, "org/repo", {"m-Q5_0.gguf": SMALL, "m-Q8_0.gguf": MEDIUM})
    with pytest.raises(ModelNotFound, match=r"m-Q5_0\.gguf, m-Q8_0\.gguf"):
        resolve("hf:org/repo")


def test_all_parts_of_a_split_file_end_beside_each_other(hub: Site) -> None:
    add_repository(hub, "org/repo", PARTS)
    path = resolve("hf:org/repo:Q8_0")
    assert path.name == "m-Q8_0-00001-of-00003.gguf"
    contents = {f"Q8_0/{part.name}": part.read_bytes() for part in path.parent.iterdir()}
    assert contents == PARTS


def test_the_parts_of_a_split_model_are_opened_as_one(hub: Site, tmp_path: Path) -> None:
    tensors = {f"t{number}": np.full((4, 8), number, np.float32) for number in range(3)}
    parts = write_gguf(tmp_path / "m-F32.gguf", {"general.name": "tiny"}, tensors, split_max_tensors=1)
    add_repository(hub, "org/repo", {part.name: part.read_bytes() for part in parts})
    weights = open_weights(resolve("hf:org/repo:F32"))
    assert sorted(weights.tensors) == ["t0", "t1", "t2"]
    assert (weights.array("t2") == 2).all()
    weights.close()


def test_a_safetensors_repository_becomes_a_folder_without_pickles(hub: Site) -> None:
    add_repository(hub, "org/repo", {**FOLDER, "pytorch_model.bin": SMALL, "custom.py": b"evil()"})
    path = resolve("hf:org/repo")
    assert {file.name: file.read_bytes() for file in path.iterdir()} == FOLDER
    assert hub.asked(resolved_path("pytorch_model.bin")) == []


def test_progress_counts_over_all_files(hub: Site) -> None:
    add_repository(hub, "org/repo", FOLDER)
    seen: list[tuple[int, int | None]] = []
    resolve("hf:org/repo", on_progress=lambda done, total, _label: seen.append((done, total)))
    total = sum(map(len, FOLDER.values()))
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_interrupted_folder_continues_with_the_missing_bytes(hub: Site) -> None:
    add_repository(hub, "org/repo", FOLDER)
    second = resolved_path("model-00002-of-00002.safetensors")
    hub.cuts[second] = [1000] * fetch_file.MAX_ATTEMPTS
    with pytest.raises(DownloadError, match="continues there"):
        resolve("hf:org/repo")
    assert store.list_models() == []
    hub.requests.clear()
    assert (resolve("hf:org/repo") / "model-00002-of-00002.safetensors").read_bytes() == MEDIUM
    assert hub.asked(resolved_path("model-00001-of-00002.safetensors")) == []
    assert [headers["Range"] for headers in hub.asked(second)] == ["bytes=5000-"]


def test_parts_of_an_older_commit_are_not_mixed_with_a_newer_one(hub: Site) -> None:
    add_repository(hub, "org/repo", FOLDER)
    hub.cuts[resolved_path("model-00002-of-00002.safetensors")] = [1000] * fetch_file.MAX_ATTEMPTS
    with pytest.raises(DownloadError):
        resolve("hf:org/repo")
    newer = {**FOLDER, "config.json": b'{"newer": true}'}
    add_repository(hub, "org/repo", newer, commit="f" * 40)
    path = resolve("hf:org/repo")
    assert {file.name: file.read_bytes() for file in path.iterdir()} == newer


def test_a_file_that_differs_from_the_listed_digest_is_removed(hub: Site, home: Path) -> None:
    add_repository(hub, "org/repo", {"m.gguf": SMALL})
    hub.files[resolved_path("m.gguf")] = SMALL[:-1] + b"x"
    with pytest.raises(DownloadError, match=hashlib.sha256(SMALL).hexdigest()):
        resolve("hf:org/repo")
    assert [path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_the_token_opens_a_private_repository_and_stays_with_the_hub(
    hub: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_repository(hub, "org/repo", {"m.gguf": SMALL})
    hub.token = "hf_secret"
    with serving(Site(files={"/blob": SMALL})) as storage:
        hub.redirects[resolved_path("m.gguf")] = f"{storage.url}/blob"
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        path = resolve("hf:org/repo")
        assert path.read_bytes() == SMALL
        assert "Authorization" not in storage.asked("/blob")[0]
    assert "hf_secret" not in (path.parent.parent / "manifest.json").read_text()


def test_a_file_behind_terms_says_how_to_get_access(hub: Site) -> None:
    add_repository(hub, "org/repo", {"m.gguf": SMALL})
    hub.statuses[resolved_path("m.gguf")] = [403]
    with pytest.raises(DownloadError, match=r"403.*HF_TOKEN"):
        resolve("hf:org/repo")


def test_a_repository_that_does_not_exist_is_not_found(hub: Site) -> None:
    with pytest.raises(ModelNotFound, match="no repository 'org/none'"):
        resolve("hf:org/none")


def test_a_revision_that_does_not_exist_is_not_found(hub: Site) -> None:
    add_repository(hub, "org/repo", {"m.gguf": SMALL})
    with pytest.raises(ModelNotFound, match="no revision 'v9'"):
        resolve("hf:org/repo@v9")


def test_a_hub_that_is_not_there_is_a_network_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="check the network and HF_ENDPOINT"):
        resolve("hf:org/repo")


@pytest.mark.parametrize("name", ["../m.gguf", "/etc/m.gguf", "a/../../m.gguf"])
def test_a_hub_cannot_write_outside_the_store(hub: Site, home: Path, name: str) -> None:
    add_repository(hub, "org/repo", {name: SMALL})
    with pytest.raises(DownloadError):
        resolve(f"hf:org/repo:{name}")
    assert not any(path.name == "m.gguf" for path in home.parent.rglob("*"))


def test_the_plan_lists_files_and_bytes_without_fetching(hub: Site, home: Path) -> None:
    add_repository(hub, "org/repo", PARTS)
    outline = locate.plan(HubName("org/repo")).outline
    assert outline.files == tuple(PARTS)
    assert outline.download_bytes == 60_000
    assert not home.exists()
