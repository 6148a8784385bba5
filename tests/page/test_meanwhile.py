"""What is under way when its conversation is left, deleted or gone back to: it goes on, and ends where it belongs."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from tests.page.browser import DESKTOP, PHONE, Tab
from tests.page.conftest import PageServer
from tests.server.edge_client import until

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page, Route

MILL = b"The millstone of Vrigstad weighs 812 kilograms and was cut in 1904."
NOT_BUSY = "() => !document.querySelector('[aria-busy=true].message')"


def go_to(page: Page, title: str) -> None:
    page.click(f".entry:has-text('{title}') .title")
    page.wait_for_selector(f".entry.is-open:has-text('{title}')")


def add(page: Page, name: str) -> None:
    given = {"name": name, "mimeType": "text/markdown", "buffer": MILL}
    page.set_input_files("[aria-label='Add files']", given)  # type: ignore[arg-type]


def late(seconds: float, page: Page, path: str) -> None:
    """Answers from this path come later than they do."""

    def wait(route: Route) -> None:
        time.sleep(seconds)
        route.continue_()

    page.route(path, wait)


def delete(page: Page, title: str) -> None:
    page.hover(f".entry:has-text('{title}')")
    page.click(f".entry:has-text('{title}') [aria-label^=Delete]")
    page.click(".entry .confirm")


def test_an_answer_goes_on_while_another_conversation_is_open(tab: Tab) -> None:
    page = tab.page
    tab.ask("say: short")
    page.click(".new-chat")
    tab.send("slow: 60 the long one")
    page.wait_for_selector(".markdown:has-text('the long one')")
    go_to(page, "short")
    page.wait_for_selector(".markdown p:text-is('short')")
    go_to(page, "the long one")
    page.wait_for_selector("[aria-busy=true].message .markdown:has-text('the long one')")
    assert page.locator(".problem, [aria-label=Send]").count() == 0  # it is neither lost nor over
    page.click("[aria-label=Stop]")
    page.wait_for_selector(".figures:has-text('stopped')")
    assert page.locator(".problem").count() == 0
    assert tab.answer == "the long one"


def test_back_leads_to_the_conversation_that_was_open_before(tab: Tab) -> None:
    page = tab.page
    tab.ask("say: first")
    page.click(".new-chat")
    tab.ask("say: second")
    go_to(page, "first")
    page.click(".foot-link:has-text('Engine')")
    page.wait_for_selector("canvas.map")
    for text in ("first", "second", "first"):
        page.go_back()
        page.wait_for_selector(f".markdown p:text-is('{text}')")
    page.go_forward()
    page.wait_for_selector(".markdown p:text-is('second')")
    page.reload()
    page.wait_for_selector(".markdown p:text-is('second')")


def test_files_belong_to_the_chat_that_they_were_given_to(tab: Tab) -> None:
    page = tab.page
    tab.ask("say: other")
    page.click(".new-chat")
    tab.ask("say: with files")
    late(1.0, page, "**/documents")
    add(page, "mill.md")
    page.wait_for_selector(".files li:has-text('reading mill.md')")
    go_to(page, "other")
    page.wait_for_selector(".toast:has-text('mill.md: 1 passage')")
    assert page.locator(".files").count() == 0
    go_to(page, "with files")
    page.wait_for_selector(".files li:has-text('mill.md') button")
    page.reload()
    page.wait_for_selector(".files li:has-text('mill.md') button")


def test_files_for_a_chat_that_was_left_before_it_began_are_told(tab: Tab) -> None:
    page = tab.page
    tab.ask("say: other")
    page.click(".new-chat")
    late(1.0, page, "**/documents")
    add(page, "mill.md")
    page.wait_for_selector(".files li:has-text('reading mill.md')")
    go_to(page, "other")
    page.wait_for_selector(".toast:has-text('was left before it began')")


def test_the_files_of_a_deleted_conversation_leave_the_server(tab: Tab, page_server: PageServer) -> None:
    page = tab.page
    headers = {"authorization": f"Bearer {page_server.key}"}
    tab.ask("say: with files")
    with page.expect_response("**/documents") as added:
        add(page, "mill.md")
    collection = added.value.url.split("/")[-2]
    page.wait_for_selector(".files li:has-text('mill.md') button")
    page.clock.install()
    with page_server.process.client(headers=headers) as http:
        delete(page, "with files")
        page.click(".toast button:text-is('Undo')")
        page.clock.fast_forward(12_000)
        page.wait_for_selector(".files li:has-text('mill.md') button")
        assert http.get(f"/v1/collections/{collection}").status_code == 200
        delete(page, "with files")
        page.wait_for_selector(".entry", state="detached")
        page.clock.fast_forward(12_000)
        until(lambda: http.get(f"/v1/collections/{collection}").status_code == 404)


def test_a_deleted_conversation_takes_no_collection_that_is_not_its_own(tab: Tab, page_server: PageServer) -> None:
    page = tab.page
    headers = {"authorization": f"Bearer {page_server.key}"}
    conversation = {"id": "a", "title": "foreign", "head": None, "settings": {"collection": "handbook", "files": ["x"]}}
    message = {"id": "m", "conversation": "a", "role": "user", "content": "question"}
    data = {"format": "kvarn-conversations", "version": 1, "conversations": [conversation], "messages": [message]}
    with page_server.process.client(headers=headers) as http:
        http.post("/v1/collections", json={"name": "handbook"})
        given = {"name": "x.json", "mimeType": "application/json", "buffer": json.dumps(data).encode()}
        page.set_input_files("[aria-label='Import conversations']", given)  # type: ignore[arg-type]
        page.wait_for_selector(".entry:has-text('foreign')")
        page.clock.install()
        delete(page, "foreign")
        page.wait_for_selector(".entry", state="detached")
        with page.expect_response("**/v1/models"):
            page.clock.fast_forward(12_000)
            page.goto(f"{tab.url}/#models")
        assert http.delete("/v1/collections/handbook").status_code == 200


def test_files_of_a_collection_that_is_gone_are_taken_out(tab: Tab, page_server: PageServer) -> None:
    page = tab.page
    with page.expect_response("**/documents") as added:
        add(page, "mill.md")
    page.wait_for_selector(".files li:has-text('mill.md') button")
    collection = added.value.url.split("/")[-2]
    with page_server.process.client(headers={"authorization": f"Bearer {page_server.key}"}) as http:
        assert http.delete(f"/v1/collections/{collection}").status_code == 200
    page.click("[aria-label='Remove mill.md']")
    page.wait_for_selector(".files", state="detached")


def test_a_rewritten_part_belongs_to_its_conversation(tab: Tab) -> None:
    page = tab.page
    tab.ask("say: other")
    page.click(".new-chat")
    tab.ask("say: the mill stood still today")
    late(1.0, page, "**/v1/completions")
    page.click("[aria-label='Rewrite a part']")
    page.wait_for_function("() => document.activeElement.matches('.rewrite textarea')")
    page.evaluate("document.querySelector('.rewrite textarea').setSelectionRange(0, 3)")
    page.wait_for_selector(".rewrite:has-text('3 characters selected')")
    page.click(".rewrite .primary")
    go_to(page, "other")
    page.wait_for_selector(".toast:has-text('became')")
    assert page.locator(".message").count() == 2
    go_to(page, "stood still")
    page.wait_for_selector(".assistant .siblings:has-text('2/2')")


def test_what_is_written_into_a_deleted_conversation_ends(tab: Tab) -> None:
    page = tab.page
    tab.send("slow: 60 hello")
    page.wait_for_selector("[aria-busy=true].message .markdown")
    with page.expect_request(lambda one: one.method == "DELETE" and "/v1/requests/" in one.url):
        delete(page, "hello")
    page.wait_for_selector(".welcome")
    assert page.locator(".entry").count() == 0


def test_a_server_that_comes_back_with_other_models_is_asked_for_them(tab: Tab) -> None:
    page = tab.page
    card = {"id": "newcomer", "kind": "generate", "max_model_len": 64, "is_loaded": True, "sampling": {}}
    page.wait_for_selector("option:has-text('chatty')", state="attached")
    for path in ("**/v1/chat/completions", "**/health/ready"):
        page.route(path, lambda route: route.abort())
    tab.send("hello")
    page.wait_for_selector(".banner:has-text('does not answer')")
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": [card]}))
    page.unroute("**/health/ready")
    page.wait_for_selector(".banner", state="detached")
    page.wait_for_selector("option:has-text('newcomer')", state="attached")


def test_a_refused_key_is_not_tried_again_and_again(context: BrowserContext, page_server: PageServer) -> None:
    tab = Tab.open(context, page_server.url, "sk-kvarn-" + "A" * 43, "/#live")
    tab.page.wait_for_selector("dialog.key")
    asked = len([url for url in tab.requests if "/v1/" in url])
    tab.page.goto(f"{tab.url}/#models")
    tab.page.wait_for_timeout(4_000)
    assert len([url for url in tab.requests if "/v1/" in url]) == asked


def test_the_keyboard_is_back_in_the_box_when_an_answer_was_stopped(tab: Tab) -> None:
    page = tab.page
    tab.send("slow: 20 something")
    page.wait_for_selector(".markdown:has-text('something')")
    page.focus("[aria-label=Stop]")
    page.keyboard.press("Enter")
    page.wait_for_selector(".figures:has-text('stopped')")
    page.wait_for_function("() => document.activeElement?.id === 'ask'")


def test_a_title_ends_with_a_whole_character(tab: Tab) -> None:
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
    tab.ask(f"say: {family * 80}")
    title = tab.page.locator(".entry .title").inner_text()
    assert title == "say: " + family * 54 + "\u2026"


def test_what_a_model_writes_is_named_where_it_would_turn_text_around(tab: Tab) -> None:
    page = tab.page
    tab.send('call: we\u202eather {"city": "\u2066Oslo"}')
    page.wait_for_selector(".call:has-text('Oslo')")
    page.wait_for_selector(".answer-foot")
    told = page.locator(".call").inner_text()
    assert "we[U+202E]ather" in told
    assert '{"city": "[U+2066]Oslo"}' in told
    tokens = [{"t": "safe\u202e", "p": -0.1, "b": [115], "a": [{"t": "o\u2067ther", "p": -1.0, "b": [111]}]}]
    frames = [{"step": step, "block": None, "text": "\u202esafe" + "\u2591" * (2 - step)} for step in (1, 2)]
    answer = {"id": "m1", "conversation": "a", "parent": "m0", "role": "assistant", "content": "safe", "state": "done"}
    messages = [
        {"id": "m0", "conversation": "a", "role": "user", "content": "question"},
        {**answer, "created": 1, "model": "chatty", "tokens": tokens, "frames": frames},
    ]
    whole = {"id": "a", "title": "Turned", "head": "m1", "settings": {}}
    data = {"format": "kvarn-conversations", "version": 1, "conversations": [whole], "messages": messages}
    given = {"name": "x.json", "mimeType": "application/json", "buffer": json.dumps(data).encode()}
    page.set_input_files("[aria-label='Import conversations']", given)  # type: ignore[arg-type]
    go_to(page, "Turned")
    page.click("[aria-label='Token probabilities']")
    assert page.locator(".token").inner_text() == "safe[U+202E]"
    page.click(".token")
    assert "o[U+2067]ther" in page.locator(".alternatives").inner_text()
    page.click("[aria-label='Replay the denoising']")
    assert "[U+202E]safe" in page.locator(".canvas").inner_text()


HIDE = """(isHidden) => {
    Object.defineProperty(document, "hidden", {configurable: true, get: () => isHidden});
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_a_tab_that_nobody_sees_watches_nothing(tab: Tab) -> None:
    page = tab.page
    page.click(".foot-link:has-text('Engine')")
    page.wait_for_selector("canvas.map")
    with page.expect_event("requestfailed", lambda one: one.url.endswith("/v1/live")):
        page.evaluate(HIDE, True)
    with page.expect_request("**/v1/live"):
        page.evaluate(HIDE, False)
    assert page.locator(".problem").count() == 0


def test_a_long_question_is_shown_in_part_and_edited_whole(tab: Tab) -> None:
    page = tab.page
    text = "say: word " + "mill " * 4_000
    tab.ask(text, at_once=True)
    assert len(page.locator(".bubble").inner_text()) < 5_000
    page.click("text=Show all 20,010 characters")
    assert page.locator(".bubble").text_content() == text
    page.hover(".message.user")
    page.click("[aria-label='Edit and ask again']")
    assert page.locator(".editing textarea").input_value() == text
    box = page.locator(".editing textarea").bounding_box()
    assert box is not None
    assert box["height"] > 200


def test_what_is_told_and_many_files_leave_room_for_the_chat(tab: Tab) -> None:
    page = tab.page
    given = [{"name": f"note {number}.md", "mimeType": "", "buffer": MILL} for number in range(27)]
    given += [{"name": f"{'long' * 40}.exe", "mimeType": "", "buffer": bytes(range(256))}]
    page.set_input_files("[aria-label='Add files']", given)  # type: ignore[arg-type]
    page.wait_for_selector(".toast:has-text('27 files')")
    for size in (DESKTOP, PHONE):
        page.set_viewport_size(size)  # type: ignore[arg-type]
        toast, files = page.locator(".toast").bounding_box(), page.locator(".files").bounding_box()
        assert toast is not None
        assert files is not None
        assert 0 <= toast["x"] < toast["x"] + toast["width"] <= size["width"]
        assert files["height"] < size["height"] / 4
    assert tab.violations() == []


def test_a_conversation_that_another_tab_deletes_does_not_come_back(
    tab: Tab, context: BrowserContext, page_server: PageServer
) -> None:
    page = tab.page
    tab.ask("say: short")
    tab.send("slow: 60 the long one")
    page.wait_for_selector(".markdown:has-text('the long one')")
    other = Tab.open(context, page_server.url, page_server.key)
    delete(other.page, "short")
    page.wait_for_selector(".welcome")
    page.wait_for_selector("[aria-label=Send]")
    other.page.wait_for_selector(".entry", state="detached")
    page.reload()
    page.wait_for_selector("#ask")
    page.wait_for_timeout(500)
    assert page.locator(".entry").count() == 0
    other.page.click(".toast button:text-is('Undo')")
    page.wait_for_selector(".entry:has-text('short')")
    go_to(page, "short")
    assert page.locator(".message.user").count() == 2
