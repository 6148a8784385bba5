"""Under systemd: the unit file is one that systemd takes, and the server tells a manager what it waits for."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chat_model import write_chat_model
from tests.server.process import ROOT, ServerProcess

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
