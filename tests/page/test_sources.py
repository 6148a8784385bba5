"""Files that a conversation looks things up in, and what its answers say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.page.browser import DESKTOP, PHONE, Tab
from tests.page.conftest import PageServer
from tests.unit.retrieval.archives import make_docx, make_epub, paragraph

if TYPE_CHECKING:
    from playwright.sync_api import Page

NOTEBOOK = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"cell_type": "markdown", "source": ["Rye"]}]}
FILES: dict[str, bytes] = {
    "word.docx": make_docx(paragraph("The walrus sleeps on the ice.")),
    "book.epub": make_epub({"one.xhtml": "<p>Chapter of the millers.</p>"}),
    "cells.ipynb": json.dumps(NOTEBOOK).encode(),
    "table.csv": b"grain,tons\nrye,12\n",
    "notes.rst": b"Notes\n=====\n\nThe weir is closed.\n",
    "wide.txt": "The sluice of 1904.".encode("utf-16"),
}
BROKEN: dict[str, bytes] = {"bad.docx": b"no archive", "latin.txt": "Mühle".encode("latin-1")}


def add(page: Page, files: dict[str, bytes]) -> None:
    given = [{"name": name, "mimeType": "", "buffer": content} for name, content in files.items()]
    page.set_input_files("[aria-label='Add files']", given)  # type: ignore[arg-type]


def answer_briefly(page: Page) -> None:
    page.click("[aria-label=Settings]")
    page.click("summary:has-text('Length and end')")
    page.fill("#field-max_tokens", "4")
    page.press("#field-max_tokens", "Tab")
    page.click("[aria-label='Close settings']")


def test_every_kind_that_the_server_reads_is_taken_and_what_is_broken_told(tab: Tab) -> None:
    page = tab.page
    add(page, FILES | BROKEN)
    page.wait_for_selector(".toast:has-text('6 files')")
    assert "Not taken: bad.docx" in page.locator(".toast").inner_text()
    assert "And 1 more" in page.locator(".toast").inner_text()
    names = page.locator(".files li span[dir]").all_inner_texts()
    assert sorted(names) == sorted(FILES)
    answer_briefly(page)
    tab.send("Where does the walrus sleep?")
    page.wait_for_selector(".source:has-text('word.docx')")
    page.click(".source:has-text('word.docx')")
    page.wait_for_selector(".passage:has-text('sleeps on the ice')")


def test_a_folder_is_taken_without_what_tools_have_made_and_removed_as_one(tab: Tab, tmp_path: Path) -> None:
    page, tree = tab.page, tmp_path / "mill"
    written = (
        "src/wheel.py",
        "README",
        "docs/flow.md",
        ".git/config",
        "node_modules/a/index.js",
        "a.bin",
        "lib.min.js",
    )
    for name in written:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(f"The {name} of the mill.", encoding="utf-8")
    page.set_input_files("[aria-label='Add a folder']", tree)
    page.wait_for_selector(".files li:has-text('mill/ 3 files')")
    answer_briefly(page)
    tab.send("What is wheel.py?")
    page.wait_for_selector(".source:has-text('mill/src/wheel.py')")
    assert page.locator(".files li").count() == 1
    page.click("[aria-label='Remove mill/']")
    page.wait_for_selector(".files", state="detached")


def test_a_passage_is_what_the_model_read_whatever_becomes_of_the_file(tab: Tab) -> None:
    page = tab.page
    add(page, {"mill.md": b"The millstone of Vrigstad weighs 812 kilograms and was cut in 1904."})
    page.wait_for_selector(".files li:has-text('mill.md') button")
    answer_briefly(page)
    tab.ask("How heavy is the millstone of Vrigstad?")
    tab.ask("And why?")  # looked up together with the question before it, which this one alone would not find
    page.wait_for_function("() => document.querySelectorAll('.sources').length === 2")
    page.click("[aria-label='Remove mill.md']")
    page.wait_for_selector(".files", state="detached")
    page.reload()
    page.wait_for_selector(".source")
    sources = page.locator(".source").all()
    assert len(sources) == 2
    for source in sources:
        source.click()
        page.wait_for_selector(".passage:has-text('812 kilograms')")
        page.click("[aria-label='Close the passage']")


def test_a_number_in_an_answer_leads_to_its_passage_beside_the_text(tab: Tab) -> None:
    page = tab.page
    tab.ask("cite: The millstone weighs 812 kg [1], says `[1]`, and [7] is no source.")
    cites = page.locator(".markdown .cite")
    assert cites.all_inner_texts() == ["[1]"]
    assert tab.answer == "The millstone weighs 812 kg [1], says [1], and [7] is no source."
    cites.first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".passage:has-text('of Vrigstad weighs 812 kilograms')")
    assert "lines 3–4" in page.locator(".passage-head").inner_text()
    assert tab.violations() == []
    for size, is_beside in ((DESKTOP, True), (PHONE, False)):
        page.set_viewport_size(size)  # type: ignore[arg-type]
        page.wait_for_timeout(100)
        passage, text = page.locator(".passage").bounding_box(), page.locator(".assistant .markdown").bounding_box()
        assert passage is not None
        assert text is not None
        assert (passage["x"] >= text["x"] + text["width"]) == is_beside
        assert (passage["y"] >= text["y"] + text["height"]) != is_beside
    page.reload()
    page.click(".markdown .cite")
    page.wait_for_selector(".passage:has-text('of Vrigstad')")


def test_a_model_that_cannot_fill_templates_is_not_offered_for_them(tab: Tab, page_server: PageServer) -> None:
    page = tab.page
    with page_server.process.client(headers={"authorization": f"Bearer {page_server.key}"}) as http:
        cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert {name: card["can_fill"] for name, card in cards.items()} == {"chatty": False, "misty": True, "minilm": False}
    told = {"object": "list", "data": [cards["chatty"], cards["misty"] | {"can_fill": False}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=told))
    page.reload()
    tab.ask("say: something to rewrite")
    assert page.locator("[aria-label='Rewrite a part']").count() == 0
    page.select_option(".model select", "misty")
    page.click("[aria-label=Settings]")
    page.click("summary:has-text('Diffusion')")
    assert page.locator(":is(input, select)[id^=field-diffusion]").evaluate_all("all => all.map((one) => one.id)") == [
        "field-diffusion-steps"
    ]
    page.goto(f"{tab.url}/#fill")
    page.wait_for_selector(".problem:has-text('no model that fills templates')")
