"""The live view of a model most of whose layers see a window: blocks of the whole context, and of the windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.assets import gemma3
from tests.page.browser import DESKTOP, Tab
from tests.page.live_stream import counts_of, frames
from tests.server.process import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BODY = {"model": "gemma", "prompt": "word " * 700, "max_tokens": 200, "ignore_eos": True, "stream": True}


@pytest.mark.model
def test_the_map_has_the_blocks_of_the_context_and_windows_are_counted(browser: Browser) -> None:
    with ServerProcess("--model", f"gemma={gemma3()}", "--context", "2048") as server, server.client() as http:
        with http.stream("POST", "/v1/completions", json=BODY) as answer:
            lines = answer.iter_lines()
            next(lines)
            with server.client() as watching:
                engine = next(
                    frame["models"][0]["engine"]
                    for frame in frames(watching)
                    if frame["requests"] and frame["requests"][0]["phase"] == "decode"
                )
            fresh = browser.new_context(viewport=DESKTOP)  # type: ignore[arg-type]
            page = Tab.open(fresh, server.url, None, "/#live").page
            page.wait_for_selector(".numbers dt:text-is('window blocks')")
        kv, counts = engine["kv"], counts_of(engine["kv"])
        used, total = engine["window_blocks"]
        assert sum(counts.values()) == kv["num_blocks"]
        assert counts["o"] == kv["own"] >= 700 // kv["block_size"]  # the whole prompt ...
        assert 0 < used < kv["own"] < total + kv["num_blocks"]  # ... and of the windows less
        assert f"of {total:,}" in page.locator(".numbers div:has(dt:text-is('window blocks'))").inner_text()
        fresh.close()
