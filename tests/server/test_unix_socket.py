"""A server on a Unix socket: real clients, a file that comes and goes with it, and what lies there already."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from kvarn.server.access.keyfile import draw_key, write_keys
from tests.chat_model import write_chat_model
from tests.forked import told_by_kvarn
from tests.server.edge_client import until
from tests.server.process import SMOLLM2, ServerProcess, model_path

MODEL = "tiny.gguf"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model") / MODEL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


@pytest.fixture(scope="module")
def local(folder: Path, model: Path) -> Iterator[ServerProcess]:
    with ServerProcess("--model", model, "--uds", folder / "kvarn.sock") as process:
        yield process


def asking(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://kvarn", timeout=60)


def test_clients_reach_the_server_by_its_file_and_nowhere_else(local: ServerProcess, folder: Path) -> None:
    path = folder / "kvarn.sock"
    assert local.address == f"unix:{path}"
    assert path.stat().st_mode & 0o777 == 0o660
    with asking(path) as http:  # whatever the Host header says: no browser comes this way
        assert http.get("/v1/models").json()["data"][0]["id"] == MODEL
        client = openai.OpenAI(base_url="http://kvarn/v1", api_key="none", http_client=http)
        answer = client.completions.create(model=MODEL, prompt="ab", max_tokens=3)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
    if shutil.which("curl"):
        words = ["curl", "-sS", "--noproxy", "*", "--unix-socket", str(path), "http://localhost/health"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(done.stdout)["status"] == "ok"
    listening = Path(f"/proc/{local.pid}/net/tcp").read_text(encoding="ascii") if sys.platform == "linux" else ""
    inodes = {os.readlink(one)[8:-1] for one in Path(f"/proc/{local.pid}/fd").iterdir() if one.is_symlink()}
    assert not [line for line in listening.splitlines()[1:] if line.split()[9] in inodes]


def test_a_socket_that_somebody_listens_on_is_left_alone(local: ServerProcess, folder: Path, model: Path) -> None:
    assert "another server does" in _refusal(model, folder / "kvarn.sock")
    with asking(folder / "kvarn.sock") as http:
        assert http.get("/health").status_code == 200


def test_another_file_is_left_alone_and_a_path_too_long_is_told(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    assert "no socket" in _refusal(model, path)
    assert path.read_text() == "mine"
    assert "too long" in _refusal(model, tmp_path / ("x" * 120))
    assert "No such file" in _refusal(model, tmp_path / "nowhere" / "s")


def test_a_stale_socket_is_replaced_and_the_own_one_removed(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with ServerProcess("--model", model, "--uds", path, "--drain-delay", "0") as server:
        with asking(path) as http:
            assert http.get("/health").status_code == 200
        assert server.stop() == 0
        assert not path.exists()


@pytest.mark.parametrize("phase", ["bound", "loading", "second signal"])
def test_the_socket_is_removed_whenever_a_signal_comes(tmp_path: Path, model: Path, phase: str) -> None:
    path = tmp_path / "s"
    chosen = model if phase == "second signal" else model_path(SMOLLM2)  # which takes longer to load than to be told
    with ServerProcess("--model", chosen, "--uds", path, waits=phase == "second signal") as server:
        until(path.exists)
        if phase == "loading":
            until(lambda: _status(path) == 503)
        if phase == "second signal":
            server.process.send_signal(signal.SIGINT)
        seconds = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # whichever was seen second
        assert server.stop() in (seconds if phase == "second signal" else (0,))
        assert not path.exists()
        assert bool(server.output) == (phase == "second signal")


def _status(path: Path) -> int | None:
    try:
        with asking(path) as http:
            return http.get("/health/startup").status_code
    except httpx.TransportError:
        return None


def test_metrics_need_a_key_because_whoever_comes_may_be_a_proxy(tmp_path: Path, model: Path) -> None:
    key, entry = draw_key("boss", "enterprise")
    write_keys(tmp_path / "keys.toml", [entry])
    with (
        ServerProcess("--model", model, "--uds", tmp_path / "s", keys=tmp_path / "keys.toml"),
        asking(tmp_path / "s") as http,
    ):
        assert http.get("/metrics").status_code == 401
        assert http.get("/metrics", headers={"authorization": f"Bearer {key}"}).status_code == 200


def _refusal(model: Path, path: Path) -> str:
    done = told_by_kvarn("serve", "--model", str(model), "--uds", str(path))
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"kvarn: cannot listen on {path}: ")
    return line
