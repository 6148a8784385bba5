"""The page in a real browser: first paint of a first visit, and a keystroke in a conversation of 2,000 messages.

    python -m benchmarks.page [--rounds 9] [--messages 2000] [--write page]

First paint is the browser's own first-contentful-paint, of a fresh profile each time, from a server on this machine;
a keystroke is the time of what the page does for a key, with a layout forced, not the frame after it. Both are
milliseconds of the clock: run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chat_model import write_chat_model
from tests.page.browser import DESKTOP, Tab, chromium
from tests.page.test_page import KEYSTROKE, MANY
from tests.results import write_result
from tests.server.process import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAINT = """() => new Promise((on) => {
    const read = () => performance.getEntriesByName("first-contentful-paint")[0]?.startTime;
    const look = () => (read() === undefined ? requestAnimationFrame(look) : on(read()));
    look();
})"""
# Until the page itself is there, not only its name.
USABLE = """() => new Promise((on) => {
    const look = () => (document.querySelector("#ask") ? on(performance.now()) : requestAnimationFrame(look));
    look();
})"""


def main() -> None:
    """Print a table for people and one JSON line, last, for machines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--write", metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        model = write_chat_model(Path(folder) / "chatty")
        with ServerProcess("--model", model, "--context", "512") as server:
            paints = [first_paint(browser, server.url) for _ in range(options.rounds)]
            key_ms = keystroke(browser, server.url, options.messages)
    figures: dict[str, Any] = {
        "rounds": options.rounds,
        "first_paint_ms": round(statistics.median(paint for paint, _ in paints), 1),
        "first_paint_worst_ms": round(max(paint for paint, _ in paints), 1),
        "usable_ms": round(statistics.median(usable for _, usable in paints), 1),
        "messages": options.messages,
        "keystroke_ms": round(key_ms, 2),
        "browser": browser.version,
    }
    print(f"first paint {figures['first_paint_ms']} ms (worst {figures['first_paint_worst_ms']}), box to write in")
    print(f"{figures['usable_ms']} ms; a key with {options.messages:,} messages {figures['keystroke_ms']} ms")
    if options.write:
        write_result(options.write, figures, command=f"python -m benchmarks.page --rounds {options.rounds}")
    print(json.dumps(figures))


def first_paint(browser: Browser, url: str) -> tuple[float, float]:
    """Milliseconds from the navigation to the first paint with content, and to the box to write in; a fresh profile."""
    fresh = browser.new_context(viewport=DESKTOP)  # type: ignore[arg-type]
    page = fresh.new_page()
    page.goto(url, wait_until="commit")
    usable, paint = page.evaluate(USABLE), page.evaluate(PAINT)
    fresh.close()
    return paint, usable


def keystroke(browser: Browser, url: str, messages: int) -> float:
    """Milliseconds from a key to the frame after it, the median of several."""
    fresh = browser.new_context(viewport=DESKTOP)  # type: ignore[arg-type]
    page = Tab.open(fresh, url, None).page
    page.evaluate(MANY, messages)
    page.reload()
    page.click(".entry .title")
    page.wait_for_selector(f".markdown:has-text('Message {messages - 1}')")
    found = float(page.evaluate(KEYSTROKE))
    fresh.close()
    return found


if __name__ == "__main__":
    main()
