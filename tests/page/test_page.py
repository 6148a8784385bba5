"""The page in a real browser, against a real server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvarn.server.page.assets import NAMES, PAGE_PATHS, POLICY
from tests.chat_model import write_chat_model
from tests.page.browser import Tab
from tests.page.conftest import PageServer
from tests.page.live_stream import counts_of, frames
from tests.page.payloads import PAYLOADS
from tests.server.edge_client import until
from tests.server.process import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

FORBIDDEN = ("img", "script", "iframe", "object", "embed", "link", "style", "form", "use", "video", "base", "meta")
ENDLESS = {
    "stars": "**" * 60_000,
    "quotes": "> " * 5_000 + "deep",
    "one word": "a" * 300_000,
    "table": "| a " * 200 + "|\n" + "|---" * 200 + "|\n" + ("| b " * 200 + "|\n") * 50,
}
# Milliseconds until the page does the next thing.
LAG = (
    "() => { const at = performance.now(); return new Promise((on) => setTimeout(() => on(performance.now() - at))); }"
)
MARKDOWN = """say: # Title

Some **bold** text, a [link](https://example.org) and `code`: $e^{i\\pi} = -1$.

```python
def double(x):
    return 2 * x  # twice
```

| name | value |
|------|------:|
| one  | 1     |

1. first
2. second
"""


def test_only_the_page_and_its_files_open_without_a_key(page_server: PageServer) -> None:
    with page_server.process.client() as http:
        assert {path: http.get(path).status_code for path in PAGE_PATHS} == dict.fromkeys(PAGE_PATHS, 200)
        assert http.head("/").status_code == 200
        refused = [("POST", "/"), ("DELETE", "/page/app.js"), ("GET", "/page/"), ("GET", "/page/vendor/manifest.json")]
        refused += [("GET", "/page/index.html"), ("GET", "/page//app.js"), ("GET", "/page/x.js"), ("GET", "/v1/models")]
        assert {http.request(method, path).status_code for method, path in refused} == {401}
        with_key = {"authorization": f"Bearer {page_server.key}"}
        assert http.get("/page/vendor/manifest.json", headers=with_key).status_code == 404
        assert http.post("/", headers=with_key).status_code == 405
    assert len(PAGE_PATHS) == len(NAMES) + 1


def test_every_file_has_the_policy_and_is_sent_once(page_server: PageServer) -> None:
    with page_server.process.client() as http:
        browser = {"accept": "text/html,application/xhtml+xml"}
        first = http.get("/", headers=browser)
        assert first.headers["content-security-policy"] == POLICY
        assert "require-trusted-types-for 'script'" in POLICY
        assert "unsafe" not in POLICY
        assert first.headers["content-encoding"] == "gzip"
        again = http.get("/", headers={"if-none-match": first.headers["etag"], **browser})
        assert (again.status_code, again.content) == (304, b"")
        assert http.get("/").text == "Ollama is running"  # what its clients look for, and they take no HTML
        plain = http.get("/page/app.js", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.text == http.get("/page/app.js").text


def test_a_chat_streams_is_kept_and_comes_back(tab: Tab) -> None:
    page = tab.page
    tab.ask(MARKDOWN)
    assert page.locator(".markdown h3").inner_text() == "Title"
    assert page.locator(".markdown strong").inner_text() == "bold"
    assert page.locator(".markdown td").count() == 2
    page.wait_for_selector(".hljs-keyword")
    page.wait_for_selector(".markdown math")
    assert "5 tokens" in page.locator(".figures").inner_text()
    assert "4 cached" in page.locator(".figures").inner_text()
    page.reload()
    page.wait_for_selector(".markdown h3")
    assert page.locator(".message").count() == 2
    page.fill("#search", "twice")
    page.wait_for_function("() => document.querySelectorAll('.entry').length === 1")
    page.fill("#search", "no such word")
    page.wait_for_selector("text=Nothing has")


def test_the_model_itself_answers_and_is_stopped(tab: Tab, page_server: PageServer) -> None:
    page = tab.page
    headers = {"authorization": f"Bearer {page_server.key}"}
    page.click("[aria-label=Settings]")
    page.fill("#field-temperature", "0")
    page.click("summary:has-text('Length and end')")
    page.select_option("#field-ignore_eos", "true")
    with httpx.Client(base_url=page_server.url, headers=headers, trust_env=False) as http:
        http.post("/fault/slow?seconds=0.05")
        tab.send("hello")
        page.wait_for_selector(".message.assistant .markdown")
        assert page.locator(".message.assistant").get_attribute("aria-busy") == "true"
        page.keyboard.press("Escape")
        page.wait_for_selector(".answer-foot")
        http.post("/fault/slow?seconds=0")
    figures = page.locator(".figures").inner_text()
    assert "stopped" in figures
    assert "token" in figures
    assert "first token" in figures
    page.wait_for_function("() => document.querySelector('button.send').getAttribute('aria-label') === 'Send'")


def test_edits_and_regenerations_are_branches(tab: Tab) -> None:
    page = tab.page
    tab.ask("say: one")
    page.click("[aria-label=Regenerate]")
    page.wait_for_selector(".assistant .siblings:has-text('2/2')")
    page.press("#ask", "ArrowUp")
    page.fill(".editing textarea", "say: two")
    page.press(".editing textarea", "Control+Enter")
    page.wait_for_selector(".user .siblings:has-text('2/2')")
    page.wait_for_selector(".markdown:has-text('two')")
    page.click(".user [aria-label='Previous version']")
    page.wait_for_selector(".markdown:has-text('one')")
    assert page.locator(".assistant .siblings").inner_text() == "2/2"
    page.reload()
    page.wait_for_selector(".assistant .siblings:has-text('2/2')")
    assert tab.answer == "one"


def test_a_conversation_is_renamed_deleted_and_brought_back(tab: Tab) -> None:
    page = tab.page
    tab.ask("say: first")
    page.hover(".entry")
    page.click(".entry [aria-label^=Rename]")
    page.fill(".rename", "My title")
    page.press(".rename", "Enter")
    page.wait_for_selector(".entry:has-text('My title')")
    page.hover(".entry")
    page.click(".entry [aria-label^=Delete]")
    page.click(".entry .confirm")
    page.wait_for_selector(".entry", state="detached")
    page.click(".toast button")
    page.wait_for_selector(".entry:has-text('My title')")
    assert tab.answer == "first"


def test_conversations_leave_and_enter_as_a_file(tab: Tab, tmp_path: object) -> None:
    page = tab.page
    tab.ask("say: keep me")
    with page.expect_download() as download:
        page.click("[aria-label='Export all conversations']")
    exported = json.loads(download.value.path().read_text(encoding="utf-8"))
    assert [message["role"] for message in exported["messages"]] == ["user", "assistant"]
    page.set_input_files("[aria-label='Import conversations']", download.value.path())
    page.wait_for_function("() => document.querySelectorAll('.entry').length === 2")
    broken = {"name": "x.json", "mimeType": "application/json", "buffer": b'{"format": "other"}'}
    page.set_input_files("[aria-label='Import conversations']", broken)  # type: ignore[arg-type]
    page.wait_for_selector(".toast:has-text('no conversations of Kvarn')")


def test_a_key_is_asked_for_and_a_revoked_one_again(context: BrowserContext, page_server: PageServer) -> None:
    key = page_server.add("temporary")
    tab = Tab.open(context, page_server.url, None)
    page = tab.page
    page.wait_for_selector("dialog.key:has-text('needs an API key')")
    page.fill("dialog.key input[type=password]", "sk-kvarn-" + "A" * 43)
    page.click("dialog.key .primary")
    page.wait_for_selector("dialog.key [role=alert]:not(:has-text('needs an API key'))")
    for _ in range(20):  # the file is read again when it has changed, at most once a second
        page.fill("dialog.key input[type=password]", key)
        page.click("dialog.key .primary")
        page.wait_for_timeout(200)
        if page.locator("dialog.key").count() == 0:
            break
    assert tab.ask("hello") is not None
    assert page.evaluate("[sessionStorage.getItem('kvarn.key'), localStorage.getItem('kvarn.key')]") == [key, None]
    page_server.revoke("temporary")
    for _ in range(20):
        tab.send("again")
        page.wait_for_timeout(200)
        if page.locator("dialog.key").count():
            break
    page.wait_for_selector("dialog.key")
    assert not [url for url in tab.requests if key in url]
    assert key not in page_server.process.log
    assert not tab.problems


def test_a_lost_connection_and_a_full_server_are_told(tab: Tab) -> None:
    page = tab.page
    tab.ask("lost: half of an ans")
    page.wait_for_selector(".problem:has-text('connection was lost')")
    assert tab.answer == "half of an ans"
    page.wait_for_selector(".banner", state="detached")
    page.click("[aria-label='New chat'], .new-chat")
    tab.send("busy: 2")
    page.wait_for_selector(".problem button:has-text('Try again in')")
    assert page.locator(".problem button").is_disabled()
    page.wait_for_selector(".problem button:not([disabled])")


def test_two_tabs_show_the_same_conversations(tab: Tab, context: BrowserContext, page_server: PageServer) -> None:
    other = Tab.open(context, page_server.url, page_server.key)
    tab.ask("say: seen by both")
    other.page.wait_for_selector(".entry:has-text('seen by both')")
    other.page.click(".entry .title")
    other.page.wait_for_selector(".markdown:has-text('seen by both')")
    assert not other.problems


def test_a_full_or_missing_storage_is_told_and_chats_go_on(context: BrowserContext, page_server: PageServer) -> None:
    full = "IDBObjectStore.prototype.put = () => { throw new DOMException('', 'QuotaExceededError'); }"
    context.add_init_script(full)
    tab = Tab.open(context, page_server.url, page_server.key)
    assert tab.ask("say: not kept") == "not kept"
    tab.page.wait_for_selector(".banner:has-text('storage is full')")


def test_no_payload_runs_or_asks_another_host(tab: Tab) -> None:
    page = tab.page
    page.evaluate(
        "addEventListener('securitypolicyviolation', (event) => (window.refused ??= []).push(event.violatedDirective))"
    )
    for start in range(0, len(PAYLOADS), 8):
        tab.ask("say: " + "\n\n".join(PAYLOADS[start : start + 8]))
    for link in page.locator(".markdown a").all():
        assert (link.get_attribute("href") or "").startswith(("https://", "mailto:"))
        assert link.get_attribute("rel") == "noopener noreferrer nofollow ugc"
    page.wait_for_timeout(300)
    assert page.evaluate("window.hit") is None
    assert (
        page.locator(
            ".markdown :is(img, script, iframe, object, embed, link, style, form, use, video, base, meta)"
        ).count()
        == 0
    )
    assert page.evaluate("window.refused") is None  # nothing even had to be refused by the policy
    assert len(PAYLOADS) == 40


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_or_broken_answer_does_not_freeze_the_page(tab: Tab, kind: str) -> None:
    tab.ask(f"say: {ENDLESS[kind]}")
    assert tab.page.evaluate(LAG) < 2_000


def test_a_million_characters_do_not_freeze_the_page(tab: Tab) -> None:
    tab.ask("often: 50000 The **mill** stood.")
    assert tab.page.evaluate(LAG) < 2_000
    assert tab.page.locator(".markdown strong").count() < 1_000  # the rest is drawn when it is asked for


def test_controls_that_turn_text_around_are_shown_by_name(tab: Tab) -> None:
    assert "[U+202E]" in tab.ask("say: safe\u202e danger")


def test_a_token_shows_its_alternatives_and_another_answer_begins_there(tab: Tab) -> None:
    page = tab.page
    page.click("[aria-label=Settings]")
    page.check("text=Token probabilities")
    page.fill("#field-seed", "3")
    page.click("summary:has-text('Length and end')")
    page.fill("#field-max_tokens", "12")
    page.click("summary:has-text('Request')")
    page.fill("#field-logit_bias", json.dumps({str(letter): 100 for letter in range(97, 102)}))  # bytes a to e
    first = tab.ask("hello")
    page.click("[aria-label='Token probabilities']")
    assert page.locator(".token").all_inner_texts() == list(first)
    for index in range(12):  # the model's noise has bytes that are no characters: look for an alternative that is one
        page.click(f".token >> nth={index}")
        page.wait_for_selector(f".alternatives[aria-label='Alternatives to token {index + 1}'] button:not([disabled])")
        shares = page.locator(".alternatives meter").evaluate_all("all => all.map(one => one.value)")
        assert len(shares) in (5, 6)  # five, and the chosen one where it is none of them
        assert 0 < sum(shares) <= 1.001
        others = page.locator(".alternatives li:has(button) code").all_inner_texts()
        if letters := [other for other in others if re.fullmatch("[!-~]", other)]:
            break
    page.locator(f".alternatives li:has(button):has(code:text-is('{letters[0]}')) button").click()
    page.wait_for_selector(".assistant .siblings:has-text('2/2')")
    page.wait_for_selector(".answer-foot")
    assert tab.answer.startswith(first[:index] + letters[0])
    assert letters[0] != first[index]
    page.click(".prompt-share")
    page.wait_for_selector(".prompt-dialog pre:has-text('hello')")
    assert tab.violations() == []


# What stands on the canvas while an answer forms, each text once.
SEEN = """() => {
    window.seen = [];
    const look = () => {
        const text = document.querySelector("[aria-busy=true] .canvas")?.textContent;
        if (text !== undefined && seen.at(-1) !== text) seen.push(text);
    };
    new MutationObserver(look).observe(document.body, {childList: true, subtree: true, characterData: true});
}"""


def denoised(server: PageServer, text: str) -> list[dict[str, Any]]:
    """The steps of which the API tells for a message."""
    body = {"model": "misty", "messages": [{"role": "user", "content": text}], "max_tokens": 12, "ignore_eos": True}
    body |= {"temperature": 0, "stream": True, "diffusion": {"block_length": 4, "events": True}}
    with server.process.client(headers={"authorization": f"Bearer {server.key}"}) as http:
        lines = http.post("/v1/chat/completions", json=body).text.splitlines()
    told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [chunk["diffusion"] for chunk in told if "diffusion" in chunk]


def test_an_answer_is_seen_while_it_forms_and_replayed(tab: Tab, page_server: PageServer) -> None:
    page = tab.page
    page.select_option(".model select", "misty")
    page.click("[aria-label=Settings]")
    page.fill("#field-temperature", "0")
    page.click("summary:has-text('Length and end')")
    page.fill("#field-max_tokens", "12")
    page.select_option("#field-ignore_eos", "true")
    page.click("summary:has-text('Diffusion')")
    page.fill("#field-diffusion-block_length", "4")
    page.press("#field-diffusion-block_length", "Tab")
    steps = denoised(page_server, "hi")
    assert len(steps) > 3
    texts = [step["text"] for step in steps]
    page.evaluate(SEEN)
    with page_server.process.client(headers={"authorization": f"Bearer {page_server.key}"}) as http:
        http.post("/fault/slow?model=misty&seconds=0.2")
        try:
            tab.send("hi")
            page.wait_for_selector("[aria-busy=true] .canvas .mask")
            page.wait_for_selector(".answer-foot")
        finally:
            http.post("/fault/slow?model=misty&seconds=0")
    seen = page.evaluate("seen")
    assert len(seen) > len(texts) // 2  # a frame of the browser may hold two steps, ...
    assert [
        text for text in dict.fromkeys(texts) if text in seen
    ] == seen  # ... and none that is not one, or out of turn
    assert any(0 < text.count("\u2591") < len(text) for text in seen)
    page.click("[aria-label='Replay the denoising']")
    slider = page.locator("[aria-label='Denoising step']")
    assert slider.get_attribute("max") == str(len(steps) - 1)
    for place, step in enumerate(steps):
        slider.fill(str(place))
        page.wait_for_selector(f".replay .facts:has-text('step {step['step']} of')")
        assert page.locator(".canvas").text_content() == step["text"]
    assert tab.violations() == []
    page.click("text=Done")
    page.wait_for_selector(".replay", state="detached")


DROP = """([name, text, type]) => {
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([text], name, {type}));
    window.dispatchEvent(new DragEvent("drop", {dataTransfer, cancelable: true}));
}"""


def test_a_dropped_file_is_looked_up_and_its_passage_shown(tab: Tab) -> None:
    page = tab.page
    page.evaluate(DROP, ["holiday.png", "x", "image/png"])
    page.wait_for_selector(".toast:has-text('Images cannot be read')")
    page.evaluate(DROP, ["mill.md", "The millstone of Vrigstad weighs 812 kilograms.", "text/markdown"])
    page.wait_for_selector(".files li:has-text('mill.md') button")
    page.click("[aria-label=Settings]")
    page.click("summary:has-text('Length and end')")
    page.fill("#field-max_tokens", "4")
    page.press("#field-max_tokens", "Tab")
    tab.send("How heavy is the millstone?")
    page.wait_for_selector(".source:has-text('[1] mill.md')")
    page.click(".source")
    page.wait_for_selector(".passage:has-text('812 kilograms')")
    assert tab.violations() == []
    page.click("[aria-label='Remove mill.md']")
    page.wait_for_selector(".files", state="detached")


def test_requests_that_begin_are_nobody_elses_and_have_names_of_their_own(tab: Tab, page_server: PageServer) -> None:
    body = {"model": "chatty", "prompt": "hi", "ignore_eos": True, "stream": True, "max_tokens": 300}
    headers = {"authorization": f"Bearer {page_server.key}"}

    def ask(_: int) -> int:
        with page_server.process.client(headers=headers) as http:
            return http.post("/v1/completions", json=body, timeout=120).status_code

    with page_server.process.client(headers=headers) as http, ThreadPoolExecutor(8) as users:
        http.post("/fault/slow?seconds=0.02")
        asked = users.map(ask, range(8))
        told = list(islice((one["models"][0]["engine"] for one in frames(http)), 12))
        tab.page.goto(f"{tab.url}/#live")
        tab.page.wait_for_function("() => document.querySelectorAll('tbody tr').length > 1")
        names = tab.page.locator("tbody .mono-text").all_inner_texts()
        http.post("/fault/slow?seconds=0")
        assert set(asked) == {200}
    assert max(one["running"] for one in told) > 1
    assert {one["others_running"] + one["others_waiting"] for one in told} == {0}
    assert len(set(names)) == len(names) > 1


def test_the_stream_shows_own_requests_and_counts_the_others(page_server: PageServer) -> None:
    other = page_server.add("bert")
    keys = {"anna": page_server.key, "bert": other}
    clients = {
        name: page_server.process.client(headers={"authorization": f"Bearer {key}"}) for name, key in keys.items()
    }
    anna, bert = clients["anna"], clients["bert"]
    until(lambda: bert.get("/v1/models").status_code == 200)  # the key file is read again once a second
    body = {"model": "chatty", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "stream": True}
    anna.post("/fault/slow?seconds=0.02")
    try:
        with anna.stream("POST", "/v1/chat/completions", json=body | {"max_tokens": 1500}) as answer:
            request_id = answer.headers["x-request-id"]
            own = next(one for one in frames(anna) if one["requests"] and one["requests"][0]["phase"] == "decode")
            foreign = next(iter(frames(bert)))
    finally:
        anna.post("/fault/slow?seconds=0")
    assert [one["id"] for one in own["requests"]] == [request_id]
    assert 0 < own["requests"][0]["deadline_s"] <= 600
    assert foreign["requests"] == []
    assert request_id not in str(foreign)
    mine, theirs = own["models"][0]["engine"], foreign["models"][0]["engine"]
    assert (mine["running"], mine["others_running"]) == (1, 0)
    assert (theirs["running"], theirs["others_running"]) == (1, 1)
    for engine in (mine, theirs):
        kv, counts = engine["kv"], counts_of(engine["kv"])
        assert sum(counts.values()) == kv["num_blocks"]
        assert (counts["f"], counts["c"], counts["s"], counts["o"]) == (
            kv["free"],
            kv["cached"],
            kv["shared"],
            kv["own"],
        )
        assert counts["o"] + counts["u"] + counts["s"] == kv["used"]
    assert mine["kv"]["own"] > 0
    assert theirs["kv"]["own"] == 0
    assert [len(step) for step in mine["steps"]] == [5] * len(mine["steps"])
    assert page_server.process.client().get("/v1/live").status_code == 401
    page_server.revoke("bert")


def test_the_engine_is_watched_on_the_page_and_in_the_terminal(
    tab: Tab, page_server: PageServer, tmp_path: Path
) -> None:
    page = tab.page
    tab.ask("hello")
    page.click(".foot-link:has-text('Engine')")
    page.wait_for_selector(".card:has-text('chatty') canvas.map")
    assert "free" in (page.locator("canvas.map").first.get_attribute("aria-label") or "")
    page.wait_for_function("() => document.querySelector('.steps').width > 0")
    (tmp_path / "key").write_text(page_server.key, encoding="utf-8")
    command = [sys.executable, "-m", "kvarn.cli.main", "top", "--once", "--url", page_server.url, "--key-file"]
    shown = subprocess.run([*command, tmp_path / "key"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "chatty" in shown
    assert "blocks of" in shown
    (tmp_path / "key").write_text("two words", encoding="utf-8")
    refused = subprocess.run([*command, tmp_path / "key"], capture_output=True, text=True, timeout=60, check=False)
    assert (refused.returncode, "kvarn keys new" in refused.stderr) == (2, True)


MANY = """async (count) => {
    const asked = indexedDB.open("kvarn", 1);
    const database = await new Promise((on) => (asked.onsuccess = () => on(asked.result)));
    const stores = database.transaction(["conversations", "messages"], "readwrite");
    const at = Date.now() - count - 10;
    for (let number = 0; number < count; number++) stores.objectStore("messages").put({
        id: `m${number}`, conversation: "long", parent: number ? `m${number - 1}` : null, created: at + number,
        role: number % 2 ? "assistant" : "user", state: "done",
        content: `Message **${number}**\\n\\n- with\\n- a list`});
    stores.objectStore("conversations").put(
        {id: "long", title: "Long", settings: {}, head: `m${count - 1}`, created: at, updated: at + count});
    await new Promise((on) => (stores.oncomplete = on));
}"""
# Milliseconds from a key to the frame after it, the median of several.
KEYSTROKE = """async () => {
    const times = [];
    for (let number = 0; number < 9; number++) {
        const area = document.querySelector("#ask");
        const at = performance.now();
        area.value += "x";
        area.dispatchEvent(new Event("input", {bubbles: true}));
        area.offsetHeight;
        times.push(performance.now() - at);
        await new Promise(requestAnimationFrame);
    }
    return times.sort((a, b) => a - b)[4];
}"""


def test_two_thousand_messages_leave_typing_quick(tab: Tab) -> None:
    page = tab.page
    page.evaluate(MANY, 2000)
    page.reload()
    page.click(".entry .title")
    page.wait_for_selector(".markdown:has-text('Message 1999')")
    assert page.locator(".message").count() < 200
    assert page.evaluate(KEYSTROKE) < 50
    page.evaluate("document.querySelector('.messages').scrollTop = 0")
    page.wait_for_selector(".bubble:has-text('Message **1920**')")


def test_the_page_works_below_a_prefix(browser: Browser, tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "chatty")
    options = ("--model", model, "--context", "512", "--root-path", "/llm")
    with ServerProcess(*options, module="tests.page.scripted") as server:
        fresh = browser.new_context()
        for path in ("/llm", "/llm/"):
            tab = Tab.open(fresh, server.url, None, path)
            tab.page.wait_for_selector("option:has-text('chatty')", state="attached")
            assert all(url.startswith(f"{server.url}/llm") for url in tab.requests)
        fresh.close()
