"""One server with keys, scripts and two tiny models, and one browser, for all tests of the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvarn.server.access.keyfile import draw_key, editing, write_keys
from tests.chat_model import write_chat_model
from tests.diffusing import write_talking_model
from tests.page.browser import DESKTOP, Tab, chromium
from tests.server.process import MINILM, ROOT, ServerProcess, model_path
from tests.unit.hub.servers import Site, add_repository, serving
from tests.unit.hub.wheels import random_bytes

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext


PICTURES = ROOT / "build" / "page"  # a picture of each test
CONFIG = """
[tiers.narrow]
concurrency = 1
"""


@dataclass(frozen=True)
class PageServer:
    """The process, and keys that open it."""

    process: ServerProcess
    file: Path
    key: str
    admin_key: str
    hub: Site

    @property
    def url(self) -> str:
        return self.process.url

    def revoke(self, name: str) -> None:
        with editing(self.file) as entries:
            entries[:] = [entry for entry in entries if entry.name != name]

    def add(self, name: str, tier: str = "enterprise") -> str:
        key, entry = draw_key(name, tier)
        with editing(self.file) as entries:
            entries.append(entry)
        return key


@pytest.fixture(scope="module")
def page_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """Two models that talk noise behind keys, chatty from left to right and misty by denoising, and minilm."""
    folder = tmp_path_factory.mktemp("page")
    chatty = write_chat_model(folder / "chatty")
    misty = write_talking_model(folder / "misty.gguf").rename(folder / "misty")
    key, entry = draw_key("anna", "enterprise")
    admin_key, admin = draw_key("root", "enterprise", is_admin=True)
    file = folder / "keys.toml"
    write_keys(file, [entry, admin])
    models = ("--model", chatty, "--model", misty, "--model", model_path(MINILM), "--context", "2048")
    with serving(Site()) as hub:
        add_repository(hub, "org/tiny", {"tiny.gguf": write_chat_model(folder / "tiny.gguf").read_bytes()})
        add_repository(hub, "org/slow", {"slow.gguf": random_bytes(8 << 20)})
        env = {
            "KVARN_HOME": str(folder / "home"),
            "HF_ENDPOINT": hub.url,
            "NO_PROXY": "127.0.0.1",
            "KVARN_OFFLINE": "0",
        }
        with ServerProcess(*models, config=CONFIG, keys=file, env=env, module="tests.page.scripted") as process:
            yield PageServer(process, file, key, admin_key, hub)


# Of a module: playwright's event loop would run on under the tests of other files.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def context(browser: Browser, request: pytest.FixtureRequest) -> Iterator[BrowserContext]:
    """A fresh profile: no conversation, no key."""
    fresh = browser.new_context(viewport=DESKTOP)  # type: ignore[arg-type]
    fresh.set_default_timeout(60_000)  # of a busy machine
    yield fresh
    keep_pictures(fresh, request.node.name)
    fresh.close()


def keep_pictures(context: BrowserContext, name: str) -> None:
    """What the pages of a test show at its end, for whoever wants to look; the folder is not in the repository."""
    for number, page in enumerate(context.pages):
        file = re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:120] + (f"-{number}" if number else "") + ".jpg"
        with suppress(playwright_errors()):  # a page that crashed, or has a million characters
            page.screenshot(path=PICTURES / file, type="jpeg", quality=70, timeout=5_000)


def playwright_errors() -> type[Exception]:
    from playwright.sync_api import Error

    return Error


@pytest.fixture
def tab(context: BrowserContext, page_server: PageServer) -> Iterator[Tab]:
    """The page, open with a key; whatever a test does, no error is thrown and no other host is asked."""
    opened = Tab.open(context, page_server.url, page_server.key)
    yield opened
    assert not opened.problems
    assert not opened.foreign
    assert not [url for url in opened.requests if page_server.key in url]
