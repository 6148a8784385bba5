"""Models, templates and rewriting on the page, and what goes wrong for real: in a browser, against a real server."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.chat_model import write_chat_model
from tests.page.browser import DESKTOP, FLAGS, Tab
from tests.page.conftest import PageServer
from tests.server.edge_client import until
from tests.server.process import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

BODY = {"prompt": "x", "max_tokens": 1}


@pytest.fixture
def admin(context: BrowserContext, page_server: PageServer) -> Iterator[Tab]:
    """The models of the server, open with the key of an admin."""
    opened = Tab.open(context, page_server.url, page_server.admin_key, "/#models")
    yield opened
    assert not opened.problems
    assert not opened.foreign


def client(server: PageServer, key: str | None = None) -> httpx.Client:
    return server.process.client(headers={"authorization": f"Bearer {key or server.admin_key}"})


def look_up(page: Page, name: str) -> None:
    page.fill("#get-name", name)
    page.click("text=Look it up")


def test_a_model_is_planned_pulled_loaded_and_unloaded(admin: Tab) -> None:
    page = admin.page
    look_up(page, "hf:org/gone")
    page.wait_for_selector(".problem:has-text(\"no repository 'org/gone'\")")
    look_up(page, "hf:org/tiny")
    page.wait_for_selector(".plan:has-text('memory, about')")
    assert "free" in page.locator(".plan .numbers").inner_text()
    assert admin.violations() == []
    page.click(".plan button:text-is('Pull')")
    page.wait_for_selector("li:has-text('hf:org/tiny'):has-text('on disk')")
    page.click("[aria-label='Load hf:org/tiny']")
    page.wait_for_selector("li:has-text('hf:org/tiny') .loader:has-text('Nothing has to leave')")
    page.click("[aria-label='Load hf:org/tiny now']")
    page.wait_for_selector("li:has-text('hf:org/tiny') .chip:text-is('in memory')")
    page.click("a:has-text('Back to the chat')")
    page.select_option(".model select", "hf:org/tiny")
    assert admin.ask("hello") is not None
    page.goto(f"{admin.url}/#models")
    page.click("[aria-label='Unload hf:org/tiny']")
    page.wait_for_selector("li:has-text('hf:org/tiny') .chip:text-is('on disk')")


def test_a_pull_shows_how_far_it_is_in_every_tab_and_is_cancelled(
    admin: Tab, context: BrowserContext, page_server: PageServer
) -> None:
    page = admin.page
    page_server.hub.seconds_per_chunk = 0.04  # 5 s in all
    try:
        look_up(page, "hf:org/slow")
        page.click(".plan button:text-is('Pull')")
        page.wait_for_function("() => document.querySelector('progress')?.value > 1e6")
        other = Tab.open(context, page_server.url, page_server.admin_key, "/#models")
        other.page.wait_for_selector("progress[aria-label='Pull of hf:org/slow']")
        assert admin.violations() == []
        page.click("[aria-label='Cancel the pull of hf:org/slow']")
        for one in (page, other.page):
            one.wait_for_selector(".pull:has-text('cancelled; the next pull goes on')")
    finally:
        page_server.hub.seconds_per_chunk = 0.0
    page.click(".pull button:text-is('Pull again')")
    page.wait_for_selector("li:has-text('hf:org/slow'):has-text('on disk')")
    page.click("[aria-label='Load hf:org/slow']")
    page.wait_for_selector("li:has-text('hf:org/slow') .problem:has-text('cannot be loaded')")


def test_a_model_in_use_is_unloaded_when_its_requests_have_ended(admin: Tab, page_server: PageServer) -> None:
    page = admin.page
    with client(page_server) as http:
        http.post("/fault/slow?seconds=0.05")
        body = {"model": "chatty", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # kept: its end would end the request
            next(lines)
            page.click("[aria-label='Unload chatty']")
            page.wait_for_selector("li:has-text('chatty') .problem:has-text('in use, requests: 1')")
            page.click("text=Unload when they have ended")
            page.wait_for_selector("[aria-label='Unload chatty']:has-text('Unloading')")
        http.post("/fault/slow?seconds=0")
        page.wait_for_selector("li:has-text('chatty') .chip:text-is('not loaded')")
        assert http.post("/v1/completions", json={"model": "chatty", **BODY}).status_code == 200
    page.wait_for_selector("li:has-text('chatty') .chip:text-is('in memory')")


def test_other_keys_see_the_models_and_change_nothing(context: BrowserContext, page_server: PageServer) -> None:
    tab = Tab.open(context, page_server.url, page_server.key, "/#models")
    tab.page.wait_for_selector(".note:has-text('admin = true')")
    tab.page.wait_for_selector("li:has-text('misty')")
    assert tab.page.locator("#get-name, .model-list button").count() == 0
    assert tab.violations() == []


def test_a_template_and_a_schema_are_filled(tab: Tab) -> None:
    page = tab.page
    page.goto(f"{tab.url}/#fill")
    page.fill("#template", "A {{pet}} of {{age}} years.")
    page.select_option("[aria-label='Rule of pet']", "choices")
    page.fill("[aria-label='Choices of pet']", "dog | cat")
    page.select_option("[aria-label='Rule of age']", "regex")
    page.fill("[aria-label='Pattern of age']", "[1-9]")
    page.click("button:text-is('Fill')")
    page.wait_for_selector(".filled mark")
    pet, age = page.locator(".filled mark").all_inner_texts()
    assert (pet in ("dog", "cat"), age in "123456789") == (True, True)
    assert page.locator(".filled").inner_text() == f"A {pet} of {age} years."
    page.select_option("[aria-label='Rule of age']", "schema")
    page.fill("[aria-label='Schema of age']", "{")
    page.click("button:text-is('Fill')")
    page.wait_for_selector(".fill-form .problem:has-text('The schema of age is no JSON')")
    page.fill("[aria-label='Schema of age']", '{"type": "integer", "minimum": 3, "maximum": 5}')
    page.click("button:text-is('Fill')")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.filled mark')].some((one) => /^[345]$/.test(one.innerText))"
    )
    page.select_option("[aria-label='Rule of age']", "regex")
    page.fill("[aria-label='Pattern of age']", "(")
    page.click("button:text-is('Fill')")
    page.wait_for_selector(".fill-form .problem:has-text('slots')")
    page.click("text=JSON schema")
    page.fill(".fill-form textarea.mono", '{"type": "object"')
    page.click("button:text-is('Fill')")
    page.wait_for_selector(".fill-form .problem:has-text('no JSON')")
    page.fill(".fill-form textarea.mono", '{"type": "object", "properties": {"ok": {"type": "boolean"}}}')
    page.click("button:text-is('Fill')")
    page.wait_for_selector(".filled:has-text('ok')")
    assert isinstance(json.loads(page.locator(".filled").inner_text())["ok"], bool)
    assert tab.violations() == []
    page.reload()
    page.wait_for_selector(".fill-form textarea.mono")  # the form is kept for the tab


SELECT = """(word) => {
    const walker = document.createTreeWalker(document.querySelector(".assistant .markdown"), NodeFilter.SHOW_TEXT);
    let node; while ((node = walker.nextNode()) && !node.data.includes(word));
    const range = document.createRange();
    range.setStart(node, node.data.lastIndexOf(word));
    range.setEnd(node, node.data.lastIndexOf(word) + word.length);
    const selection = getSelection(); selection.removeAllRanges(); selection.addRange(range);
}"""


def test_a_selected_part_of_an_answer_is_rewritten_in_place(tab: Tab) -> None:
    page = tab.page
    tab.ask("say: the mill by the mill stood **still** today")
    page.evaluate(SELECT, "mill")  # the second one
    page.click(".rewrite-pop button")
    page.wait_for_selector(".assistant .siblings:has-text('2/2')")
    assert tab.answer.startswith("the mill by the ")
    assert tab.answer.endswith(" stood still today")
    assert "partly rewritten" in page.locator(".figures").inner_text()
    page.click(".assistant [aria-label='Previous version']")
    page.wait_for_selector(".markdown:has-text('the mill by the mill')")
    page.click("[aria-label='Rewrite a part']")
    page.wait_for_selector(".rewrite textarea")
    assert tab.violations() == []
    page.evaluate("document.querySelector('.rewrite textarea').setSelectionRange(0, 3)")
    page.wait_for_selector(".rewrite:has-text('3 characters selected')")
    page.click(".rewrite .primary")
    page.wait_for_selector(".assistant .siblings:has-text('3/3')")
    assert tab.answer.endswith(" mill by the mill stood still today")


SECONDS_LEFT = "() => document.querySelector('.problem button')?.innerText.match(/Try again in (\\d+)/)?.[1]"


def test_a_busy_key_is_told_how_long_to_wait(context: BrowserContext, page_server: PageServer) -> None:
    key = page_server.add("narrow", "narrow")
    with client(page_server, key) as http:
        until(lambda: http.get("/v1/models").status_code == 200)  # the key file is read again once a second
        http.post("/fault/slow?seconds=0.05")
        body = {"model": "chatty", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:  # all that the tier allows at once
            lines = answer.iter_lines()
            next(lines)
            wait = int(http.post("/v1/completions", json={"model": "chatty", **BODY}).headers["retry-after"])
            tab = Tab.open(context, page_server.url, key)
            tab.send("hello")
            told = tab.page.wait_for_function(SECONDS_LEFT).json_value()  # read as it is found: it counts down
            assert 1 <= int(told) <= wait + 1
            assert tab.page.locator(".problem button").is_disabled()
        http.post("/fault/slow?seconds=0")
    tab.page.click(".problem button:has-text('Try again'):not([disabled])")
    tab.page.wait_for_selector(".answer-foot .figures:has-text('token')")
    page_server.revoke("narrow")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64M", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here, so that no disk of the browser's can be filled")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_of_the_browser_is_told_and_nothing_is_lost(
    browser: Browser, page_server: PageServer, small_disk: Path
) -> None:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    profile = browser.browser_type.launch_persistent_context(
        small_disk / "profile", executable_path=path, args=[*FLAGS]
    )
    profile.set_default_timeout(60_000)
    tab = Tab.open(profile, page_server.url, page_server.key)
    page = tab.page
    assert tab.ask("say: kept") == "kept"
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    long = "not kept " + "x" * 200_000
    assert tab.ask(f"say: {long}").startswith("not kept")
    page.wait_for_selector(".banner:has-text('storage is full')")
    with page.expect_download() as download:
        page.click("[aria-label='Export all conversations']")
    (small_disk / "filler").unlink()
    exported = json.loads(download.value.path().read_text(encoding="utf-8"))
    assert long in [message["content"] for message in exported["messages"]]
    assert tab.ask("say: kept again") == "kept again"
    page.wait_for_selector(".banner", state="detached")
    page.reload()
    page.wait_for_function(
        "() => document.querySelectorAll('.message').length === 6"
    )  # what found no room is there, too
    assert not tab.problems
    profile.close()


def test_a_server_that_is_killed_in_mid_answer_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "chatty")
    options = ("--model", model, "--context", "2048")
    first = ServerProcess(*options, module="tests.server.faulty")
    with first:
        fresh = browser.new_context(viewport=DESKTOP)  # type: ignore[arg-type]
        fresh.set_default_timeout(60_000)
        tab = Tab.open(fresh, first.url, None)
        page = tab.page
        page.click("[aria-label=Settings]")
        page.click("summary:has-text('Length and end')")
        page.select_option("#field-ignore_eos", "true")
        page.fill("#field-temperature", "0")
        with first.client() as http:
            http.post("/fault/slow?seconds=0.05")
        tab.send("hello")
        page.wait_for_selector(".message.assistant .markdown")
        half = tab.answer
        first.process.kill()
        page.wait_for_selector(".problem:has-text('connection was lost')")
        assert tab.answer.startswith(half)
        page.wait_for_selector(".banner:has-text('does not answer')")
        kept = tab.answer
    with ServerProcess(*options, "--port", str(first.port)):
        page.wait_for_selector(".banner", state="detached")
        assert tab.answer == kept
        page.fill("#field-max_tokens", "8")
        page.press("#field-max_tokens", "Tab")
        page.click(".problem button:has-text('Regenerate')")
        page.wait_for_selector(".assistant .siblings:has-text('2/2')")
        page.wait_for_selector(".figures:has-text('8 tokens')")
        fresh.close()
    assert not tab.problems


# The texts of all messages that are stored, in order.
STORED = """async () => {
    const asked = indexedDB.open("kvarn", 1);
    const database = await new Promise((on) => (asked.onsuccess = () => on(asked.result)));
    const all = database.transaction("messages").objectStore("messages").getAll();
    return new Promise((on) => (all.onsuccess = () => on(all.result.map((one) => one.content).sort())));
}"""


def test_two_tabs_write_into_one_conversation(tab: Tab, context: BrowserContext, page_server: PageServer) -> None:
    tab.ask("say: first")
    other = Tab.open(context, page_server.url, page_server.key)
    other.page.click(".entry .title")
    other.page.wait_for_selector(".markdown:has-text('first')")
    tab.send("say: from one " + "a" * 200)
    other.send("say: from two " + "b" * 200)
    for one in (tab, other):
        one.page.wait_for_function("() => !document.querySelector('[aria-busy=true].message')")
    texts = other.page.evaluate(STORED)
    assert [text for text in texts if text.startswith("from ")] == ["from one " + "a" * 200, "from two " + "b" * 200]
    assert not other.problems


def test_the_tab_that_ends_last_shows_what_the_other_wrote(
    tab: Tab, context: BrowserContext, page_server: PageServer
) -> None:
    tab.ask("say: first")
    other = Tab.open(context, page_server.url, page_server.key)
    other.page.click(".entry .title")
    other.page.wait_for_selector(".markdown:has-text('first')")
    tab.send("slow: 3 the long one")
    tab.page.wait_for_selector(".markdown:has-text('the long one')")
    other.page.wait_for_selector(".facts:has-text('Another tab is writing')")
    other.ask("say: meanwhile")
    tab.page.wait_for_selector(".markdown:has-text('meanwhile')")  # what was asked below it, once its own has ended
    assert tab.page.locator(".message").count() == other.page.locator(".message").count() == 6
    assert not other.problems


def test_an_answer_goes_on_with_the_fields_of_the_model_that_wrote_it(tab: Tab) -> None:
    page = tab.page
    tab.ask("lost: half of it")
    page.select_option(".model select", "misty")
    page.click("[aria-label=Settings]")
    page.click("summary:has-text('Length and end')")
    page.fill("#field-max_tokens", "4")
    page.click("summary:text-is('Diffusion')")
    page.select_option("#field-diffusion-policy", "random")
    page.click("[aria-label='Go on from here']")
    page.wait_for_selector(".assistant .siblings:has-text('2/2')")
    page.wait_for_selector(".answer-foot .figures:has-text('4 tokens')")
    assert tab.answer.startswith("half of it")
    assert page.locator(".model-name").last.inner_text() == "chatty"
