"""Under systemd: the unit file is one that systemd takes, and the server tells a manager what it waits for."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.chat_model import write_chat_model
from tests.server.edge_client import until
from tests.server.process import ROOT, ServerProcess

GROUP = 64_321
SOMEBODY = ("setpriv", "--reuid", "64320", "--regid", str(GROUP), "--clear-groups")
UNIT = ROOT / "docs" / "kvarn.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_unit_file(tmp_path: Path) -> None:
    text = UNIT.read_text(encoding="utf-8")
    here = tmp_path / "kvarn.service"
    here.write_text(text.replace("/usr/local/bin/kvarn", sys.executable))  # what it starts must exist
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(here)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(here) not in done.stderr
    broken = tmp_path / "broken.service"
    broken.write_text(here.read_text().replace("Type=notify", "Type=nothing").replace("ExecStart", "ExecStrat"))
    again = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(broken)], capture_output=True, text=True, timeout=60, check=False
    )
    assert again.returncode != 0  # so the check above can fail


def test_the_units_times_and_flags_are_the_servers() -> None:
    text = UNIT.read_text(encoding="utf-8")
    assert "Type=notify" in text
    stop_s = int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0])
    from kvarn.server.process.settings import ServerConfig

    config = ServerConfig()
    assert stop_s > config.drain_delay_s + config.drain_timeout_s + 5


def test_the_unit_runs_as_a_user_whose_group_may_read_the_keys() -> None:
    lines = UNIT.read_text(encoding="utf-8").splitlines()
    assert "User=kvarn" in lines
    assert not [line for line in lines if line.startswith(("DynamicUser=", "LoadCredential="))]
    assert any("chgrp kvarn /etc/kvarn/keys.toml && chmod 640" in line for line in lines)


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root, to be somebody else")
def test_another_user_serves_with_keys_that_its_group_may_read_and_sees_them_revoked() -> None:
    with tempfile.TemporaryDirectory(prefix="kvarn-unit-") as name:  # pytest's own folders are closed to others
        folder = Path(name)
        model, keys = write_chat_model(folder / "tiny.gguf"), folder / "keys.toml"
        for one in (folder, model):
            one.chmod(0o755)
        key = _kvarn("keys", "new", "alice", "--keys", keys).stdout.strip()
        words = ("serve", "--model", model, "--keys", keys, "--port", "0")
        refused = _kvarn(*words, prefix=SOMEBODY, env={"KVARN_HOME": str(folder)})
        assert refused.returncode == 2
        assert "belongs to root:root, mode 600, and this process runs as " in refused.stderr
        os.chown(keys, 0, GROUP)
        keys.chmod(0o640)
        env = {"KVARN_HOME": str(folder)}
        with ServerProcess("--model", model, keys=keys, env=env, prefix=SOMEBODY) as server, server.client() as http:
            headers = {"authorization": f"Bearer {key}"}
            assert http.get("/v1/models", headers=headers).status_code == 200
            _kvarn("keys", "revoke", "alice", "--keys", keys)
            until(lambda: http.get("/v1/models", headers=headers).status_code == 401)


def _kvarn(
    *words: str | Path, prefix: tuple[str, ...] = (), env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-m", "kvarn.cli.main", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, env={**os.environ, **(env or {})}
    )


def test_a_manager_is_told_of_readiness_life_reload_and_the_end(tmp_path: Path, patience: float) -> None:
    model = write_chat_model(tmp_path / "tiny.gguf")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60 * patience)
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        with ServerProcess("--model", model, "--drain-delay", "0", env=env) as server:
            ready = _told(manager, lambda text: "READY=1" in text)
            assert f"STATUS=serving tiny.gguf on {server.url}" in ready
            for _ in range(3):
                _told(manager, lambda text: text == "WATCHDOG=1")
            server.process.send_signal(signal.SIGHUP)
            assert re.search(r"^MONOTONIC_USEC=\d+$", _told(manager, lambda text: "RELOADING=1" in text), re.MULTILINE)
            _told(manager, lambda text: "READY=1" in text)
            server.process.send_signal(signal.SIGTERM)
            _told(manager, lambda text: "STOPPING=1" in text)
            assert server.process.wait(60 * patience) == 0


def _told(manager: socket.socket, is_wanted: Callable[[str], bool]) -> str:
    """The next message of a kind; a watchdog's may come between."""
    while True:
        text = manager.recv(4096).decode()
        if is_wanted(text):
            return text
        assert text == "WATCHDOG=1", text
