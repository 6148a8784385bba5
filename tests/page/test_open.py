"""`kvarn serve --open`: the browser gets the address of a page that is there."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.chat_model import write_chat_model
from tests.server.edge_client import until
from tests.server.process import ServerProcess


def test_the_browser_gets_the_address_once_the_page_is_there(tmp_path: Path) -> None:
    model, told = write_chat_model(tmp_path / "chatty"), tmp_path / "told"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {told}.part && mv {told}.part {told}\n', encoding="utf-8")
    browser.chmod(0o755)
    with ServerProcess("--model", model, "--context", "512", "--open", env={"BROWSER": f"{browser} %s"}) as server:
        until(told.exists)
        address = told.read_text(encoding="utf-8")
        assert address.rstrip("/") == server.url
        page = httpx.get(address, headers={"accept": "text/html"}, trust_env=False)
        assert (page.status_code, "page/app.js" in page.text) == (200, True)


def test_a_browser_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "chatty")
    env = {"BROWSER": "/no/such/browser %s", "DISPLAY": "", "WAYLAND_DISPLAY": "", "PATH": "/nowhere"}
    with ServerProcess("--model", model, "--context", "512", "--open", env=env) as server:
        until(lambda: f"no browser could be opened here; open {server.url}" in server.log)
        assert httpx.get(server.url, trust_env=False).status_code == 200
