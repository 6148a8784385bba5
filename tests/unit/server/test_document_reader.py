"""Clients' files and HTML: read in a child process that may fail, be late or be killed without harm."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from kvarn.errors import CapacityError, DocumentError, HelperUnavailable
from kvarn.server.access.priority_semaphore import Claim
from kvarn.server.collections.document_reader import CHILD, DocumentReader, ReadingLimits
from tests.children import child_ids
from tests.unit.retrieval.archives import entity_bomb, make_docx, make_epub, paragraph, zip_bomb
from tests.unit.retrieval.pdfs import bomb, make_pdf

pytest.importorskip("pypdf")


def _read(data: bytes, limits: ReadingLimits) -> str:
    return asyncio.run(DocumentReader(limits).file_text("pdf", data, "a.pdf"))


def test_the_text_of_all_pages_comes_back() -> None:
    assert _read(make_pdf("Grain", 3), ReadingLimits()) == "Grain\n\n\fGrain\n\n\fGrain"


@pytest.mark.parametrize(
    ("data", "limits", "words"),
    [
        (make_pdf("Grain", 3), ReadingLimits(max_pages=2), "a.pdf: has 3 pages, at most 2 are read"),
        (make_pdf("Grain", 3), ReadingLimits(max_chars=12), "a.pdf: has more than 12 characters"),
        (bomb(30_000_000), ReadingLimits(cpu_s=1), "a.pdf: takes more than 1 s"),
        (bomb(30_000_000), ReadingLimits(memory_bytes=8 << 20), "a.pdf: "),
    ],
    ids=["pages", "characters", "computing", "memory"],
)
def test_what_takes_too_much_is_refused_with_the_limit(data: bytes, limits: ReadingLimits, words: str) -> None:
    with pytest.raises(DocumentError) as caught:
        _read(data, limits)
    assert words in str(caught.value)


def test_word_documents_books_and_notebooks_are_read_too() -> None:
    async def read() -> list[str]:
        reader = DocumentReader()
        return [
            await reader.file_text("docx", make_docx(paragraph("Grain")), "a.docx"),
            await reader.file_text("epub", make_epub({"a.xhtml": "<h1>Stars</h1>"}), "a.epub"),
            await reader.file_text("notebook", b'{"cells": [{"cell_type": "raw", "source": "x"}]}', "a.ipynb"),
        ]

    assert asyncio.run(read()) == ["Grain\n", "# Stars\n", "x\n"]


@pytest.mark.parametrize(
    ("data", "limits", "words"),
    [
        (entity_bomb(), ReadingLimits(), "declares entities"),
        (zip_bomb(100_000_000), ReadingLimits(memory_bytes=16 << 20, max_chars=1_000), "a.docx: "),
        (make_docx(paragraph("Grain")), ReadingLimits(max_chars=4), "more than 4 characters"),
    ],
    ids=["entities", "zip", "characters"],
)
def test_hostile_word_documents_are_refused(data: bytes, limits: ReadingLimits, words: str) -> None:
    with pytest.raises(DocumentError, match=words):
        print(asyncio.run(DocumentReader(limits).file_text("docx", data, "a.docx")))


def test_a_machine_that_is_too_busy_is_no_fault_of_the_document() -> None:
    with pytest.raises(CapacityError, match="too busy"):
        _read(make_pdf("Grain"), ReadingLimits(deadline_s=0.01))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_child_that_is_lost_is_replaced_once(signum: signal.Signals, num_lost: int) -> None:
    """A slow document: its child is struck as soon as it runs, and so is the second one, or it is left alone."""

    async def read() -> str:
        reader = DocumentReader(ReadingLimits(cpu_s=20))
        reading = asyncio.ensure_future(reader.file_text("pdf", bomb(700_000), "a.pdf"))
        struck: set[int] = set()
        while not reading.done():
            for pid in set(child_ids(CHILD.name)) - struck:
                if len(struck) < num_lost:
                    struck.add(pid)
                    os.kill(pid, signum)
            await asyncio.sleep(0.005)
        assert len(struck) == num_lost
        return await reading

    if num_lost == 1:
        assert asyncio.run(read())
    else:
        with pytest.raises(HelperUnavailable):
            asyncio.run(read())


def test_a_cancelled_read_kills_its_process() -> None:
    async def abandon() -> None:
        reader = DocumentReader(max_at_once=1)
        task = asyncio.ensure_future(reader.file_text("pdf", bomb(30_000_000), "a.pdf"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await reader.file_text("pdf", make_pdf("next"), "b.pdf") == "next"  # its slot is free again

    asyncio.run(abandon())


def test_pages_are_read_together() -> None:
    pages = ["<h1>Mill</h1><p>Grain", "<p>Flour \u20ac &amp; \U0001f35e"]
    texts = asyncio.run(DocumentReader().html_texts(pages, "HTML"))
    assert texts == ["# Mill\n\nGrain\n", "Flour \u20ac & \U0001f35e\n"]


def test_pages_that_take_too_long_are_refused() -> None:
    with pytest.raises(DocumentError) as caught:
        asyncio.run(DocumentReader(ReadingLimits(cpu_s=1)).html_texts(["<!" * 3_000_000], "page.html"))
    assert "page.html: takes more than 1 s" in str(caught.value)


def test_a_paid_page_is_read_before_free_ones_that_wait() -> None:
    async def run() -> list[str]:
        reader, read = DocumentReader(max_at_once=1), []

        async def ask(name: str, priority: int) -> None:
            pages = ["<!" * 400_000 if name == "slow" else name]
            await reader.html_texts(pages, name, Claim(priority))
            read.append(name)

        tasks = []
        for name, priority in (("slow", 0), ("b", 0), ("c", 0), ("paid", 10)):
            tasks.append(asyncio.create_task(ask(name, priority)))
            await asyncio.sleep(0.02)
        await asyncio.gather(*tasks)
        return read

    read = asyncio.run(run())
    assert [name for name in read if name != "paid"] == ["slow", "b", "c"]
    assert read.index("paid") < read.index("b")


def test_pages_of_one_key_leave_a_process_to_another() -> None:
    async def run() -> list[str]:
        reader, read = DocumentReader(), []

        async def ask(name: str) -> None:
            pages = ["<!" * 400_000 if name == "greedy" else name]
            await reader.html_texts(pages, name, Claim(0, name))
            read.append(name)

        tasks = []
        for name in ("greedy", "greedy", "greedy", "modest"):
            tasks.append(asyncio.create_task(ask(name)))
            await asyncio.sleep(0.02)
        await asyncio.gather(*tasks)
        return read

    assert "modest" in asyncio.run(run())[:2]
