"""The pictures of the documents, written to docs/images under --long: real models and answers, every view in use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.open import open_weights
from kvarn.hub import BUNDLED
from tests.assets import qwen_coder
from tests.page.browser import DESKTOP, PHONE, Tab
from tests.server.process import MINILM, ROOT, ServerProcess, model_path

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

pytestmark = [pytest.mark.long, pytest.mark.model]
PICTURES = ROOT / "docs" / "images"
CODER, STORIES = "qwen2.5-coder", "tiny-stories"
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"  # a story goes on
CODE = "Write a Python function that reverses the words of a sentence, with a docstring. Only the code."
TCP = "Name three differences between TCP and UDP as a short numbered list."
NOTES = """# The mill at Vrigstad

The millstone weighs 812 kilograms and was cut from Lugnås stone in 1904. It is dressed every winter, when the frost \
stops the wheel: the furrows are cut anew by hand, which takes two people four days.

# Flour

Rye is ground in two passes, wheat in three. The second pass runs slower, at 70 turns a minute, to keep the flour cool.
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("pictures")
    models: list[str | Path] = []
    for name, path in ((CODER, qwen_coder()), (STORIES, telling_stories(folder / "stories.gguf"))):
        models += ["--model", f"{name}={path}"]
    env = {"KVARN_HOME": str(folder / "home")}
    with ServerProcess(*models, "--model", model_path(MINILM), "--context", "4096", env=env) as process:
        yield process


def telling_stories(path: Path) -> Path:
    """The bundled diffusion model with a template, so that it goes on with what is said to it."""
    source = open_weights(BUNDLED["tiny-diffusion"])
    tensors = {name: Stored(info.type, info.shape, source.raw(name)) for name, info in source.tensors.items()}
    write_gguf(path, dict(source.metadata) | {"tokenizer.chat_template": PLAIN}, tensors)
    source.close()
    return path


@pytest.fixture(scope="module")
def profile(browser: Browser) -> Iterator[BrowserContext]:
    """One profile for all pictures: the list of conversations fills."""
    fresh = browser.new_context(viewport=DESKTOP, device_scale_factor=1.5, reduced_motion="reduce")  # type: ignore[arg-type]
    fresh.set_default_timeout(150_000)
    yield fresh
    fresh.close()


@pytest.fixture(scope="module")
def page(profile: BrowserContext, served: ServerProcess) -> Page:
    return Tab.open(profile, served.url, None).page


@pytest.fixture
def tab(page: Page, served: ServerProcess) -> Tab:
    page.set_viewport_size(DESKTOP)  # type: ignore[arg-type]
    page.goto(served.url + "/#")
    page.wait_for_selector("#ask")
    page.click(".new-chat")
    return Tab(page, served.url)


def look(page: Page, name: str, theme: str, size: dict[str, int] = DESKTOP) -> None:
    """Take the picture, without a cursor that blinks and a button that is hovered over."""
    for _ in range(3):
        if page.locator(f"html[data-theme={theme}]").count():
            break
        page.evaluate("document.querySelector(\"[aria-label^='Theme']\").click()")
        page.wait_for_timeout(50)
    page.set_viewport_size(size)  # type: ignore[arg-type]
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement?.blur()")
    taken(page, name)


def taken(page: Page, name: str) -> None:
    page.wait_for_timeout(400)
    page.screenshot(path=PICTURES / name)
    assert (PICTURES / name).stat().st_size > 5_000


def with_fields(page: Page, **fields: Any) -> None:
    page.click("[aria-label=Settings]")
    page.evaluate("document.querySelectorAll('.settings details').forEach((one) => (one.open = true))")
    for name, value in fields.items():
        page.fill(f"#field-{name}", str(value))
    page.press(f"#field-{name}", "Tab")
    page.click("[aria-label='Close settings']")


def test_a_chat(tab: Tab) -> None:
    page = tab.page
    page.select_option(".model select", CODER)
    with_fields(page, temperature=0, max_tokens=200)
    tab.ask(TCP)
    page.click(".new-chat")
    with_fields(page, temperature=0, max_tokens=200)
    tab.ask(CODE)
    page.wait_for_selector(".markdown .code")
    page.wait_for_timeout(1_000)  # until it is highlighted
    look(page, "chat-light.png", "light")
    look(page, "chat-phone.png", "dark", PHONE)
    page.click("button[aria-label=Conversations]")
    taken(page, "sidebar-phone.png")
    page.click("[aria-label='Close the list']")
    page.set_viewport_size(DESKTOP)  # type: ignore[arg-type]
    page.click(".entry:has-text('three differences') .title")
    page.wait_for_selector(".markdown ol")
    page.click("[aria-label=Settings]")
    look(page, "chat-dark.png", "dark")
    page.click("[aria-label='Close settings']")


def test_sources(tab: Tab) -> None:
    page = tab.page
    page.select_option(".model select", CODER)
    with_fields(page, temperature=0, max_tokens=120)
    given = {"name": "mill.md", "mimeType": "text/markdown", "buffer": NOTES.encode()}
    page.set_input_files("[aria-label='Add files']", given)  # type: ignore[arg-type]
    page.wait_for_selector(".files li:has-text('mill.md') button")
    page.wait_for_selector(".toast", state="detached")
    tab.ask("How heavy is the millstone, and when is it dressed? Cite the source.")
    page.click(".source")
    page.wait_for_selector(".passage")
    look(page, "sources-light.png", "light")


def test_tokens(tab: Tab) -> None:
    page = tab.page
    page.select_option(".model select", CODER)
    page.click("[aria-label=Settings]")
    page.check("text=Token probabilities")
    page.click("[aria-label='Close settings']")
    with_fields(page, temperature=0.8, seed=4, max_tokens=70)
    tab.ask("Explain how a millstone is dressed, in three sentences.")
    page.click("[aria-label='Token probabilities']")
    tokens = page.locator(".token.level-0, .token.level-1")
    (tokens.first if tokens.count() else page.locator(".token").nth(3)).click()
    page.wait_for_selector(".alternatives button:not([disabled])")
    look(page, "tokens-light.png", "light")


def test_denoising(tab: Tab) -> None:
    page = tab.page
    page.select_option(".model select", STORIES)
    with_fields(page, temperature=0, max_tokens=96)
    tab.ask("Once upon a time, a little girl named Lily went to the mill with her dog.")
    page.click("[aria-label='Replay the denoising']")
    slider = page.locator("[aria-label='Denoising step']")
    slider.fill(str(int(slider.get_attribute("max") or 0) * 2 // 5))
    look(page, "replay-dark.png", "dark")
    page.click("text=Done")
    page.click("[aria-label='Rewrite a part']")
    page.wait_for_selector(".rewrite textarea")
    page.evaluate("document.querySelector('.rewrite textarea').setSelectionRange(10, 42)")
    page.wait_for_selector(".rewrite:has-text('32 characters selected')")
    page.set_viewport_size(DESKTOP)  # type: ignore[arg-type]
    page.mouse.move(0, 0)
    taken(page, "rewrite-dark.png")


def test_a_template(tab: Tab) -> None:
    page = tab.page
    page.goto(f"{tab.url}/#fill")
    page.select_option(".fill-form select", STORIES)
    page.click("button:text-is('Fill')")
    page.wait_for_selector(".filled mark")
    look(page, "fill-light.png", "light")
    look(page, "fill-dark-phone.png", "dark", PHONE)


def test_the_models(tab: Tab) -> None:
    tab.page.goto(f"{tab.url}/#models")
    tab.page.wait_for_selector(".model-list li")
    look(tab.page, "models-light.png", "light")
    look(tab.page, "models-dark-phone.png", "dark", PHONE)


def test_a_busy_engine(tab: Tab, served: ServerProcess) -> None:
    page, ended = tab.page, threading.Event()
    preface = f"{NOTES}\n\n{NOTES}\n\nIn other words: "

    def ask(number: int) -> None:
        prompt = preface if number % 2 else f"Story {number}. Once upon a time"
        body = {"model": CODER, "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True, "seed": number}
        with served.client() as http, http.stream("POST", "/v1/completions", json=body, timeout=600) as answer:
            for _ in answer.iter_lines():
                if ended.is_set():
                    return

    with ThreadPoolExecutor(6) as users:
        for number in range(6):
            users.submit(ask, number)
        page.goto(f"{tab.url}/#live")
        page.wait_for_selector("canvas.map")
        page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 6")
        page.wait_for_function(
            "() => [...document.querySelectorAll('tbody tr')].every((row) => row.innerText.includes('decode'))"
        )
        page.wait_for_timeout(20_000)
        look(page, "engine-dark.png", "dark")
        look(page, "engine-phone.png", "light", PHONE)
        ended.set()
