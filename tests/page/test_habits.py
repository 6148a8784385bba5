"""What people are used to from other pages: presets, going on after a cut, a way to the end, files of conversations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.page.browser import Tab
from tests.page.conftest import PageServer

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

CYCLE = {
    "format": "kvarn-conversations",
    "version": 1,
    "conversations": [
        {"id": "a", "title": "turned \u202e around", "head": "m2", "settings": {"files": "all", "system": 5}},
        {"id": "b", "title": "tail", "head": "missing", "settings": None},
    ],
    "messages": [
        {"id": "m1", "conversation": "a", "role": "user", "content": "question", "parent": "m2", "created": 1},
        {
            **{"id": "m2", "conversation": "a", "role": "assistant", "content": "answer", "parent": "m1", "created": 2},
            **{"sources": 5, "tokens": [{"t": 1}], "frames": [None, None], "calls": {"x": 1}, "usage": {}},
        },
        {"id": "m3", "conversation": "b", "role": "user", "content": "alone", "parent": "nobody", "__proto__": {}},
        {"id": "m4", "conversation": "b", "role": "system", "content": "dropped"},
        None,
    ],
}


def import_file(tab: Tab, content: dict[str, Any]) -> None:
    file = {"name": "x.json", "mimeType": "application/json", "buffer": json.dumps(content).encode()}
    tab.page.set_input_files("[aria-label='Import conversations']", file)  # type: ignore[arg-type]


def test_a_preset_keeps_settings_for_new_chats(tab: Tab) -> None:
    page = tab.page
    page.click("[aria-label=Settings]")
    page.fill(".settings textarea", "You are a miller.")
    page.fill("#field-temperature", "0.3")
    page.click("[aria-label='Save as a preset']")
    page.fill("#preset-name", "Miller")
    page.press("#preset-name", "Enter")
    page.wait_for_selector("#preset")
    assert page.locator("#preset").input_value() == "Miller"
    assert tab.violations() == []
    tab.ask("say: hello")
    page.click(".new-chat")
    page.wait_for_function("() => document.querySelector('#field-temperature').value === '0.3'")
    assert page.locator(".settings textarea").first.input_value() == "You are a miller."
    page.select_option("#preset", "")
    page.wait_for_function("() => document.querySelector('#field-temperature').value === ''")
    page.select_option("#preset", "Miller")
    page.click("[aria-label='Delete the preset Miller']")
    page.click(".preset-row .confirm")
    page.wait_for_function("() => document.querySelectorAll('#preset option').length === 1")
    assert page.locator("#field-temperature").input_value() == "0.3"  # what the chat has stays


def test_a_cut_answer_goes_on_where_it_ended(tab: Tab) -> None:
    page = tab.page
    page.click("[aria-label=Settings]")
    page.click("summary:has-text('Length and end')")
    page.fill("#field-max_tokens", "6")
    page.select_option("#field-ignore_eos", "true")
    page.click("summary:has-text('Request')")
    page.fill("#field-logit_bias", json.dumps({str(letter): 100 for letter in range(97, 102)}))  # bytes a to e
    first = tab.ask("hello")
    page.click("[aria-label='Go on from here']")
    page.wait_for_selector(".assistant .siblings:has-text('2/2')")
    page.wait_for_selector(".answer-foot")
    assert tab.answer.startswith(first)
    assert len(tab.answer) == len(first) + 6
    page.click(".assistant [aria-label='Previous version']")
    page.wait_for_function("text => document.querySelector('.assistant .markdown').innerText === text", arg=first)


def test_an_answer_that_ended_or_has_parts_besides_its_text_does_not_go_on(tab: Tab) -> None:
    tab.ask("say: ended")
    assert tab.page.locator("[aria-label='Go on from here']").count() == 0
    tab.ask("lost: half of an ans")
    assert tab.page.locator("[aria-label='Go on from here']").count() == 1


def test_the_prompt_is_shown_as_text(tab: Tab, page_server: PageServer) -> None:
    page = tab.page
    tab.ask("two words\nand a line")
    page.click(".prompt-share")
    page.wait_for_selector(".prompt-dialog pre:has-text('two words')")
    headers = {"authorization": f"Bearer {page_server.key}"}
    messages = [{"role": "user", "content": "two words\nand a line"}]
    with page_server.process.client(headers=headers) as http:
        prompt = http.post("/apply-template", json={"model": "chatty", "messages": messages}).json()["prompt"]
    assert page.locator(".prompt-dialog pre").text_content() == prompt


def test_the_mark_covers_the_tokens_that_lay_in_the_cache(tab: Tab, page_server: PageServer) -> None:
    page = tab.page
    question = "a question that is longer than a block of the cache, which has sixteen tokens"
    tab.ask(question)
    page.click("[aria-label=Regenerate]")
    page.wait_for_selector(".assistant .siblings:has-text('2/2')")
    page.wait_for_selector(".prompt-share:has-text('cached')")
    cached = int(page.locator(".prompt-share").inner_text().split("prompt")[1].split(",")[1].split()[0])
    page.click(".prompt-share")
    page.wait_for_selector(".prompt-dialog pre:has-text('a question')")
    headers = {"authorization": f"Bearer {page_server.key}"}
    messages = [{"role": "user", "content": question}]
    with page_server.process.client(headers=headers) as http:
        ids = http.post("/tokenize", json={"model": "chatty", "messages": messages}).json()["tokens"]
        wanted = http.post("/detokenize", json={"model": "chatty", "tokens": ids[:cached]}).json()["prompt"]
    assert 16 <= cached < len(ids)
    assert page.locator(".prompt-dialog pre mark").text_content() == wanted
    assert f"{cached} tokens" in page.locator(".prompt-dialog .facts mark").inner_text()


def test_tokens_break_lines_where_the_text_does(tab: Tab) -> None:
    page = tab.page
    page.click("[aria-label=Settings]")
    page.check("text=Token probabilities")
    page.fill("#field-temperature", "0")
    page.click("summary:has-text('Length and end')")
    page.fill("#field-max_tokens", "5")
    page.click("summary:has-text('Request')")
    page.fill("#field-logit_bias", json.dumps({"10": 100}))  # the byte of a line break
    page.press("#field-logit_bias", "Tab")
    before = page.locator(".answer-foot").count()
    tab.send("hello")
    page.wait_for_function("n => document.querySelectorAll('.answer-foot').length > n", arg=before)
    page.click("[aria-label='Token probabilities']")
    assert page.locator(".token").all_inner_texts() == ["↵"] * 5
    places = page.locator(".token").evaluate_all("all => all.map((one) => one.getBoundingClientRect().top)")
    assert sorted(set(places)) == places  # each on a line of its own


def test_a_button_leads_to_the_end_and_versions_move_nothing(tab: Tab) -> None:
    page = tab.page
    for text in ("say: short", "often: 30 Part one of the story.", "often: 30 Part two of the story."):
        tab.ask(text)
    page.wait_for_selector(".to-end button", state="detached")
    page.evaluate("document.querySelector('.messages').scrollTop = 0")
    page.click("[aria-label='To the end']")
    page.wait_for_selector(".to-end button", state="detached")
    page.locator("[aria-label=Regenerate]").first.click()
    page.wait_for_selector(".assistant .siblings:has-text('2/2')")
    page.wait_for_function("() => !document.querySelector('[aria-busy=true].message')")
    for label, number in (("Previous", 6), ("Next", 2), ("Previous", 6)):
        page.click(f".assistant [aria-label='{label} version']")
        page.wait_for_function("n => document.querySelectorAll('.message').length === n", arg=number)
    page.evaluate(FRAMES)
    assert page.evaluate("document.querySelector('.messages').scrollTop") < 100


def test_a_deleted_conversation_is_brought_back_from_every_view(tab: Tab) -> None:
    page = tab.page
    tab.ask("say: first")
    page.click(".foot-link:has-text('Engine')")
    page.wait_for_selector("canvas.map")
    page.hover(".entry")
    page.click(".entry [aria-label^=Delete]")
    page.click(".entry .confirm")
    page.click(".toast button:text-is('Undo')")
    page.wait_for_selector(".entry:has-text('first')")
    assert page.locator(".entry").count() == 1


def test_a_new_chat_is_begun_from_every_view_and_stays_after_a_reload(tab: Tab) -> None:
    page = tab.page
    tab.ask("say: first")
    page.click(".foot-link:has-text('Models')")
    page.wait_for_selector(".model-list")
    page.keyboard.press("Control+Shift+O")
    page.wait_for_selector(".welcome")
    page.reload()
    page.wait_for_selector(".entry:has-text('first')")
    assert page.locator(".welcome").count() == 1


def test_a_conversation_is_saved_as_markdown(tab: Tab) -> None:
    page = tab.page
    tab.ask("say: **bold** words")
    with page.expect_download() as download:
        page.click("[aria-label='Save this conversation as Markdown']")
    assert download.value.suggested_filename == "say bold words.md"
    written = download.value.path().read_text(encoding="utf-8")
    assert written == "# say: **bold** words\n\n## You\n\nsay: **bold** words\n\n## chatty\n\n**bold** words\n"


def test_a_file_that_was_tampered_with_breaks_nothing(tab: Tab) -> None:
    page = tab.page
    import_file(tab, CYCLE)
    page.wait_for_selector(".toast:has-text('2 imported')")
    page.click(".entry:has-text('turned') .title")
    page.wait_for_selector(".markdown:has-text('answer')")  # the circle of parents was cut
    page.click("[aria-label=Settings]")
    page.wait_for_selector(".settings")
    assert tab.ask("say: still here") == "still here"
    page.click(".entry:has-text('tail') .title")
    page.wait_for_selector(".bubble:has-text('alone')")
    assert page.locator(".message").count() == 1
    import_file(tab, {"format": "kvarn-conversations", "version": 1, "conversations": [None], "messages": []})
    page.wait_for_selector(".toast:has-text('no conversations of Kvarn')")


FRAMES = "() => new Promise((on) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(on))))"
# A record that an older page, or a hand in the developer tools, left in the storage.
BREAK = """async () => {
    const asked = indexedDB.open("kvarn", 1);
    const database = await new Promise((on) => (asked.onsuccess = () => on(asked.result)));
    const stored = database.transaction("messages", "readwrite").objectStore("messages");
    const all = await new Promise((on) => { const read = stored.getAll(); read.onsuccess = () => on(read.result); });
    const answer = all.find((one) => one.role === "assistant");
    await new Promise((on) => (stored.put({...answer, sources: 5}).onsuccess = on));
}"""


def test_a_message_that_cannot_be_shown_leaves_the_others(tab: Tab) -> None:
    page = tab.page
    tab.ask("say: first")
    page.evaluate(BREAK)
    page.reload()
    page.wait_for_selector(".problem:has-text('This message cannot be shown')")
    assert page.locator(".bubble").inner_text() == "say: first"
    assert tab.ask("say: second") == "second"


JUNK = """() => {
    for (const name of ["settings", "presets", "theme", "open", "template", "draft"])
        for (const storage of [localStorage, sessionStorage]) storage.setItem(`kvarn.${name}`, "JUNK");
}"""


@pytest.mark.parametrize("junk", ["{bad", "null", "[1, 2]", '{\\"template\\": null, \\"preset\\": {}}'])
def test_junk_in_the_storage_is_passed_over(tab: Tab, junk: str) -> None:
    page = tab.page
    page.evaluate(JUNK.replace("JUNK", junk))
    page.reload()
    page.wait_for_selector("#ask")
    page.fill("#ask", "")
    assert tab.ask("say: fine") == "fine"
    page.goto(f"{tab.url}/#fill")
    page.reload()
    page.wait_for_selector("#template")


def test_a_browser_that_keeps_nothing_still_chats(context: BrowserContext, page_server: PageServer) -> None:
    refuse = "{ get() { throw new DOMException('', 'SecurityError'); } }"
    for name in ("localStorage", "sessionStorage", "indexedDB"):
        context.add_init_script(f"Object.defineProperty(window, '{name}', {refuse})")
    page = context.new_page()
    page.goto(page_server.url)
    page.fill("dialog.key input[type=password]", page_server.key)
    page.click("dialog.key .primary")
    page.wait_for_selector("dialog.key", state="detached")
    page.wait_for_selector(".banner:has-text('keeps nothing')")
    page.fill("#ask", "say: still here")
    page.press("#ask", "Enter")
    page.wait_for_selector(".markdown:has-text('still here')")
    assert page.locator(".entry").count() == 1  # for as long as the page is open


PASTE = """(text) => {
    const clipboardData = new DataTransfer();
    clipboardData.setData("text/plain", text);
    return document.querySelector("#ask").dispatchEvent(new ClipboardEvent("paste", {clipboardData, cancelable: true}));
}"""


def test_a_text_too_long_for_the_box_is_refused_before_it_freezes(tab: Tab) -> None:
    assert tab.page.evaluate(PASTE, "short") is True  # the browser pastes it
    assert tab.page.evaluate(PASTE, "word " * 120_000) is False
    tab.page.wait_for_selector(".toast:has-text('600,000 characters are too many')")
