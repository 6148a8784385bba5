"""Debian's Chromium for the tests of the page, or a clear line why there is none."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

# As root there is no sandbox; the rest keeps it from asking hosts of its own.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--force-color-profile=srgb", "--disable-dev-shm-usage"),
)
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
PUT = "text => { ask.value = text; ask.dispatchEvent(new Event('input', { bubbles: true })); ask.focus(); }"


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        reason = "the page is not tested: there is no chromium here; `apt-get install chromium` lets its tests run"
        warnings.warn(
            reason, stacklevel=2
        )  # a reader of the summary sees it, which tells no reasons of what was skipped
        pytest.skip(reason)
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=list(FLAGS), env={**os.environ, "LANG": "C.UTF-8"}
        )
        yield browser
        browser.close()


@dataclass
class Tab:
    """One page, and everything it did that it should not: errors, dialogs, requests to other hosts."""

    page: Page
    url: str
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @staticmethod
    def open(context: BrowserContext, url: str, key: str | None, path: str = "/") -> Tab:
        """Open the page with a key that is there already, as after a reload; None: there is none."""
        tab = Tab(context.new_page(), url)
        tab._watch()
        if key is not None:
            tab.page.add_init_script(f"sessionStorage.setItem('kvarn.key', {key!r})")
        tab.page.goto(url + path)
        tab.page.wait_for_selector("#ask, .live")
        return tab

    @property
    def foreign(self) -> list[str]:
        """Requests to anything but the server."""
        own = (self.url + "/", "blob:", "data:")
        return [url for url in self.requests if not url.startswith(own)]

    def _watch(self) -> None:
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("console", self._on_console)

    def _on_console(self, message: Any) -> None:
        if "Content Security Policy" in message.text or "Trusted" in message.text:
            self.problems.append(message.text)

    def send(self, text: str) -> None:
        """Type a message and send it."""
        self.page.fill("#ask", text)
        self.page.press("#ask", "Enter")

    def ask(self, text: str, *, at_once: bool = False) -> str:
        """Send a message and wait until its answer has ended; its text. at_once: no typing, which Chromium does line
        by line and which takes seconds for thousands of lines."""
        before = self.page.locator(".answer-foot").count()
        if at_once:
            self.page.evaluate(PUT, text)
            self.page.press("#ask", "Enter")
        else:
            self.send(text)
        self.page.wait_for_function("n => document.querySelectorAll('.answer-foot').length > n", arg=before)
        return self.answer

    @property
    def answer(self) -> str:
        """The text of the last answer."""
        return self.page.locator(".message.assistant .markdown").last.inner_text()

    def violations(self) -> list[str]:
        """What axe-core finds on the page as it is now."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
        found = self.page.evaluate("axe.run({resultTypes: ['violations']}).then(result => result.violations)")
        return [
            f"{one['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:300]}"
            for one in found
            for node in one["nodes"]
        ]
