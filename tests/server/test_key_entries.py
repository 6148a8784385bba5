"""A wrong entry in the key file, from the command line to a running server: it opens nothing and blocks nobody."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.chat_model import write_chat_model
from tests.server.edge_client import until
from tests.server.process import ServerProcess


def test_a_server_starts_and_serves_beside_wrong_entries_and_forgets_those_that_are_removed(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    good, typo = (_kvarn("new", name, "--tier", "pro", "--keys", str(file)) for name in ("good", "typo"))
    text = file.read_text()
    last = text.rindex("[[keys]]")  # as somebody edits it by hand, or as it was written before tiers were checked
    file.write_text(text[:last] + text[last:].replace('"pro"', '"profesional"') + '\n[[keys]]\nname = "half"\n')
    model = write_chat_model(tmp_path / "tiny.gguf")
    with ServerProcess("--model", model, keys=file) as server, server.client() as http:
        assert _status(http, good) == 200
        assert _status(http, typo) == 403
        assert "key 'typo' opens nothing: there is no tier 'profesional'; choose one of free, pro" in server.log
        assert "key 'half' opens nothing: " in server.log
        new = _kvarn("new", "new", "--keys", str(file))
        until(lambda: _status(http, new) == 200)
        _kvarn("rm", "typo", "--keys", str(file))
        until(lambda: _status(http, typo) == 401)
        _kvarn("revoke", "new", "--keys", str(file))
        until(lambda: _status(http, new) == 401)
        assert _status(http, good) == 200
        assert '"half"' in file.read_text()  # nobody removed it


def _status(http: httpx.Client, key: str) -> int:
    time.sleep(0.05)
    return http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code


def _kvarn(*words: str) -> str:
    command = [sys.executable, "-m", "kvarn.cli.main", "keys", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
