"""axe-core on every view, panel and dialog, in both themes, on a desktop and on a phone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.page.browser import DESKTOP, PHONE, Tab
from tests.page.conftest import PageServer

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

TEXT = """# Title

Some **bold** text [1], a [link](https://example.org) and `code`.

```python
def double(x):
    return 2 * x  # twice
```

| name | value |
|------|------:|
| one  | 1,024 |

- [x] done
"""
TOKENS = [
    {"t": word, "p": logprob, "b": list(word.encode()), "a": [{"t": " other", "p": -1.0, "b": [32, 111]}]}
    for word, logprob in (("One", -0.01), (" word", -0.4), (" after", -1.0), (" the", -1.6), (" other\n", -4.0))
]
FRAMES = [{"step": step, "block": None, "text": "word " * step + "\u2591" * (6 - step)} for step in range(1, 7)]
SOURCES = [{"number": 1, "source": "mill.md", "text": "A mill grinds.", "place": "lines 1\u20132"}]
USAGE = {"prompt_tokens": 20, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16}}
ANSWERED = {"usage": USAGE, "timing": {"firstToken": 0.1, "rate": 12.5}, "model": "chatty", "state": "done"}
CALL = [{"id": "call_1", "name": "weather", "args": '{"city": "Oslo"}'}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": TEXT, "reasoning": "Let me think.", "sources": SOURCES, **ANSWERED},
    {"role": "user", "content": "another"},
    {"role": "assistant", "content": "One word after the other\n", "tokens": TOKENS, "frames": FRAMES, **ANSWERED},
    {"role": "user", "content": "and the weather?"},
    {"role": "assistant", "content": "", "calls": CALL, **ANSWERED},
    {"role": "tool", "content": "cold", "callId": "call_1", "name": "weather"},
    {"role": "assistant", "content": "half", **ANSWERED, "state": "lost", "error": {"message": "It was lost."}},
]


def conversation() -> bytes:
    chain = [
        {"id": f"m{at}", "conversation": "a", "parent": f"m{at - 1}" if at else None, "created": at, **message}
        for at, message in enumerate(MESSAGES)
    ]
    whole = {"id": "a", "title": "Everything", "head": chain[-1]["id"], "settings": {}}
    return json.dumps(
        {"format": "kvarn-conversations", "version": 1, "conversations": [whole], "messages": chain}
    ).encode()


@pytest.fixture(params=["light", "dark"])
def theme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[DESKTOP, PHONE], ids=["desktop", "phone"])
def tab(context: BrowserContext, page_server: PageServer, theme: str, request: pytest.FixtureRequest) -> Tab:
    """The page with an admin's key, in one theme and size."""
    context.add_init_script(f"localStorage.setItem('kvarn.theme', '{theme}')")
    opened = Tab.open(context, page_server.url, page_server.admin_key)
    opened.page.set_viewport_size(request.param)
    opened.page.emulate_media(reduced_motion="reduce")
    return opened


def open_list(page: Page) -> None:
    if (page.viewport_size or DESKTOP)["width"] < DESKTOP["width"]:
        page.click("button[aria-label=Conversations]")
        page.wait_for_selector(".sidebar[data-open=true]")


def test_a_conversation_with_everything_in_it(tab: Tab) -> None:
    page = tab.page
    assert tab.violations() == []  # an empty chat
    open_list(page)
    given = {"name": "x.json", "mimeType": "application/json", "buffer": conversation()}
    page.set_input_files("[aria-label='Import conversations']", given)  # type: ignore[arg-type]
    page.wait_for_selector(".entry:has-text('Everything')")
    assert tab.violations() == []  # the list, over the chat on a phone
    page.click(".entry .title")
    page.wait_for_selector(".hljs-keyword")
    page.wait_for_selector(".toast", state="detached")
    assert tab.violations() == []
    page.click(".cite")
    page.wait_for_selector(".passage")
    assert tab.violations() == []
    page.click("[aria-label='Token probabilities']")
    page.click(".token >> nth=2")
    page.wait_for_selector(".alternatives")
    assert tab.violations() == []
    page.click("[aria-label='Replay the denoising']")
    page.wait_for_selector(".replay input")
    assert tab.violations() == []
    page.locator("[aria-label='Rewrite a part']").nth(1).click()
    page.wait_for_selector(".rewrite textarea")
    assert tab.violations() == []
    page.locator("[aria-label='Edit and ask again']").first.click()
    page.wait_for_selector(".editing textarea")
    assert tab.violations() == []


def test_panels_and_dialogs(tab: Tab) -> None:
    page = tab.page
    tab.ask("say: hello")
    page.click(".prompt-share")
    page.wait_for_selector(".prompt-dialog pre")
    assert tab.violations() == []
    page.click(".prompt-dialog .primary")
    page.keyboard.press("Control+/")
    page.wait_for_selector(".help-dialog")
    assert tab.violations() == []
    page.click(".help-dialog .primary")
    page.click("[aria-label=Settings]")
    page.wait_for_selector(".settings")
    page.evaluate("document.querySelectorAll('.settings details').forEach((one) => (one.open = true))")
    assert tab.violations() == []
    page.click("[aria-label='Close settings']")
    open_list(page)
    page.click("[aria-label='Forget the API key']")
    page.wait_for_selector("dialog.key")
    assert tab.violations() == []


def test_the_other_views(tab: Tab) -> None:
    page = tab.page
    for view, selector in (("models", ".model-list li"), ("fill", ".slots"), ("live", "canvas.map")):
        page.goto(f"{tab.url}/#{view}")
        page.reload()
        page.wait_for_selector(selector)
        assert tab.violations() == [], view
