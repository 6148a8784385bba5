"""What a chat has besides its messages: a system prompt, a JSON schema, tools whose results the user types."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.page.browser import Tab
from tests.page.conftest import PageServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHAT = "**/v1/chat/completions"
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
ARGUMENTS = '{"city": "Oslo"}'


def set_field(page: Page, label: str, text: str) -> None:
    """One of the settings that are texts."""
    page.click("[aria-label=Settings]")
    page.evaluate("document.querySelectorAll('.settings details').forEach((one) => (one.open = true))")
    page.fill(f"label:has-text('{label}') textarea", text)
    page.click("[aria-label='Close settings']")


def asked(tab: Tab, text: str) -> dict[str, Any]:
    """Send a message; the request that the server got for it."""
    with tab.page.expect_request(CHAT) as sent:
        tab.ask(text)
    told: dict[str, Any] = sent.value.post_data_json
    return told


def test_the_system_prompt_is_read_by_the_model(tab: Tab, page_server: PageServer) -> None:
    page = tab.page
    set_field(page, "System prompt", "You are a miller.")
    page.click("[aria-label=Settings]")
    page.click("summary:has-text('Length and end')")
    page.fill("#field-max_tokens", "4")
    page.click("[aria-label='Close settings']")
    sent = asked(tab, "hello")
    messages = [{"role": "system", "content": "You are a miller."}, {"role": "user", "content": "hello"}]
    assert sent["messages"] == messages
    headers = {"authorization": f"Bearer {page_server.key}"}
    with page_server.process.client(headers=headers) as http:
        counts = [
            http.post("/tokenize", json={"model": "chatty", "messages": part}).json()["count"]
            for part in (messages, messages[1:])
        ]
    assert counts[0] > counts[1]
    assert f"prompt {counts[0]}" in page.locator(".prompt-share").inner_text()  # what the engine read
    page.click(".prompt-share")
    page.wait_for_selector(".prompt-dialog pre:has-text('You are a miller.')")
    page.click(".prompt-dialog .primary")
    page.reload()
    page.wait_for_selector(".answer-foot")
    assert [one["role"] for one in asked(tab, "again")["messages"]] == ["system", "user", "assistant", "user"]


def test_a_schema_is_followed_by_the_model(tab: Tab) -> None:
    page = tab.page
    page.click("[aria-label=Settings]")
    page.click("summary:has-text('Structure')")
    field = page.locator(".field:has-text('JSON schema')")
    field.locator("textarea").fill('{"enum": ["dog", ')
    assert field.locator("textarea").get_attribute("aria-invalid") == "true"
    tab.send("a pet")
    page.wait_for_selector(".problem:has-text('The JSON schema is not JSON')")  # told, and nothing was asked
    field.locator("textarea").fill('{"enum": ["dog", "cat"]}')
    answers = {tab.ask(f"a pet {number}") for number in range(3)}
    assert answers <= {'"dog"', '"cat"'}
    field.locator("textarea").fill("")
    assert "response_format" not in asked(tab, "say: free again")


def test_the_user_types_what_a_tool_returns(tab: Tab) -> None:
    page = tab.page
    set_field(page, "Tools", json.dumps([WEATHER]))
    tab.send(f"call: weather {ARGUMENTS}")
    page.wait_for_selector(".call:has-text('calls weather')")
    page.wait_for_selector(".answer-foot")
    assert page.locator(".call pre").inner_text() == ARGUMENTS
    assert tab.violations() == []
    page.fill(".call textarea", "say: It is 4 degrees.")
    with page.expect_request(CHAT) as sent:
        page.click("button:text-is('Send result')")
    page.wait_for_selector(".markdown:has-text('It is 4 degrees.')")
    told = sent.value.post_data_json
    call = {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    assert told["tools"] == [{"type": "function", "function": WEATHER}]
    assert told["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "say: It is 4 degrees.", "tool_call_id": "call_0"},
    ]
    assert page.locator(".call textarea").count() == 0  # it is answered
    page.reload()
    page.wait_for_selector(".message.tool:has-text('It is 4 degrees.')")
    assert page.locator(".message").count() == 4
    page.locator("[aria-label=Regenerate]").last.click()
    page.wait_for_selector(".assistant .siblings:has-text('2/2')")
    assert page.locator(".message").count() == 4


def test_several_calls_are_answered_together(tab: Tab) -> None:
    page = tab.page
    tab.send("calls: " + json.dumps([["weather", ARGUMENTS], ["clock", "{}"]]))
    page.wait_for_selector(".call:has-text('calls clock')")
    page.wait_for_selector(".answer-foot")
    for place, text in enumerate(("4 degrees", "say: noon")):
        page.locator(".call textarea").nth(place).fill(text)
    with page.expect_request(CHAT) as sent:
        page.click("button:text-is('Send results')")
    page.wait_for_selector(".markdown:has-text('noon')")
    results = [one for one in sent.value.post_data_json["messages"] if one["role"] == "tool"]
    assert [(one["tool_call_id"], one["content"]) for one in results] == [
        ("call_0", "4 degrees"),
        ("call_1", "say: noon"),
    ]


@pytest.mark.parametrize("text", ["{", "5", "null"])
def test_tools_that_are_none_are_told(tab: Tab, text: str) -> None:
    set_field(tab.page, "Tools", text)
    tab.send("hello")
    tab.page.wait_for_selector(".problem:has-text('ools')")
    set_field(tab.page, "Tools", "")
    assert tab.ask("say: fine") == "fine"
