"""Word documents, books, notebooks and tables: what is read of them, where it stands, and which are refused."""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import string
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from kvarn.errors import DocumentError
from kvarn.retrieval.ingest import files
from kvarn.retrieval.ingest.chunking import Chunking, split
from kvarn.retrieval.ingest.files import is_known_kind, list_files, read_bytes, read_file
from kvarn.retrieval.ingest.readers import archive
from kvarn.retrieval.ingest.readers.archive import MAX_MEMBERS
from kvarn.retrieval.ingest.sections import sections
from kvarn.retrieval.types import Document, Kind, TextChunk
from tests.unit.retrieval.archives import entity_bomb, make_docx, make_epub, make_zip, paragraph, zip_bomb
from tests.unit.retrieval.pdfs import make_pdf

TEXT = paragraph("Grain", '<w:pStyle w:val="berschrift1"/>') + paragraph("A mill <![CDATA[&]]> its wheel.")
RST = """=====
Mills
=====

Grain goes in.

Water
-----

A wheel turns::

    ====  ====
    a     b
    ====  ====

Deep
~~~~
Under water.

Wind
----
Sails turn.
"""


def _chunks(document: Document, tokens: int = 200) -> list[TextChunk]:
    return split(document, Chunking(tokens, 0), lambda text: len(text.split()))


def test_a_word_document_gives_headings_paragraphs_items_and_rows() -> None:
    row = "".join(f"<w:tc>{paragraph(text)}</w:tc>" for text in ("stone", "granite"))
    body = (
        TEXT
        + paragraph("Wheels", '<w:pStyle w:val="berschrift2"/>')
        + paragraph("oak", "<w:numPr/>")
        + f"<w:tbl><w:tr>{row}</w:tr></w:tbl>"
        + "<w:p><w:r><w:t>one</w:t><w:br/><w:t>two</w:t><w:noBreakHyphen/><w:t>fold</w:t></w:r>"
        + "<w:moveFrom><w:r><w:t>gone</w:t></w:r></w:moveFrom></w:p>"
    )
    document = read_bytes(make_docx(body), "a.docx")
    assert document.kind == "docx"
    assert document.text == "# Grain\n\nA mill & its wheel.\n\n## Wheels\n\n- oak\n\nstone | granite\n\none\ntwo-fold\n"
    assert [chunk.heading for chunk in _chunks(document)] == ["Grain", "Grain > Wheels"]


def test_text_boxes_and_their_fallback_are_read_once() -> None:
    box = f"<w:txbxContent>{paragraph('in a box')}</w:txbxContent>"
    body = f"<w:p><w:r><w:Choice>{box}</w:Choice><w:Fallback>{box}</w:Fallback><w:t>outside</w:t></w:r></w:p>"
    assert read_bytes(make_docx(body), "a.docx").text == "in a box\n\noutside\n"


def test_a_book_is_read_in_the_order_of_its_spine() -> None:
    pages = {"z%20one.xhtml": "<h1>One</h1><p>Mills grind.</p>", "a.xhtml": "<h1>Two</h1><p>Stars shine.</p>"}
    document = read_bytes(make_epub(pages), "a.epub")
    assert document.text == "# One\n\nMills grind.\n\n# Two\n\nStars shine.\n"
    assert [chunk.heading for chunk in _chunks(document)] == ["One", "Two"]


def test_a_protected_book_is_refused_and_one_with_encrypted_fonts_is_not() -> None:
    for name, is_read in (("OEBPS/a.xhtml", False), ("OEBPS/font.otf", True)):
        encryption = f'<encryption><CipherReference URI="{name}"/></encryption>'
        data = make_epub({"a.xhtml": "<p>text</p>"}, {"META-INF/encryption.xml": encryption})
        if is_read:
            assert read_bytes(data, "a.epub").text == "text\n"
        else:
            with pytest.raises(DocumentError, match="protected"):
                read_bytes(data, "a.epub")


def test_a_notebook_gives_its_cells_without_outputs() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Mills\n", "Grain."]},
        {"cell_type": "code", "source": "grind()", "outputs": [{"text": "flour"}]},
        {"cell_type": "code", "source": []},
    ]
    expected = "# Mills\nGrain.\n\n```\ngrind()\n```\n"
    assert read_bytes(json.dumps({"cells": cells}).encode(), "a.ipynb").text == expected
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": "grind()"}]}]}
    assert read_bytes(json.dumps(old).encode(), "a.ipynb").text == "```\ngrind()\n```\n"


@pytest.mark.parametrize(
    ("data", "name", "words"),
    [
        (entity_bomb(), "a.docx", "declares entities"),
        (make_zip({str(n): b"" for n in range(MAX_MEMBERS + 1)}), "a.epub", "holds more than 10,000 files"),
        (make_zip({"word/document.xml": b"<w></w>"}, zipfile.ZIP_LZMA), "a.docx", "packed by method 14"),
        (make_docx(TEXT)[:-40], "a.docx", "broken Word document"),
        (make_docx(TEXT).replace(b"word/document.xml", b"word/documenT.xml"), "a.docx", "no word/document.xml"),
        (make_zip({"word/document.xml": b"<w><p>"}), "a.docx", "broken Word document"),
        (make_docx("<w:p/>"), "a.docx", "empty"),
        (b"no zip", "a.epub", "broken EPUB"),
        (make_epub({}), "a.epub", "empty"),
        (b"[" * 100_000, "a.ipynb", "broken notebook"),
        (b'{"cells": [1]}', "a.ipynb", "broken notebook"),
        (b'{"cells": [{"cell_type": "code", "source": ' + b"9" * 10_000 + b"}]}", "a.ipynb", "broken notebook"),
        (b"\xff\xfe\x00", "a.ipynb", "broken notebook"),
        (b'{"cells": [{"cell_type": "heading", "source": "a", "level": 1e999}]}', "a.ipynb", "broken notebook"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_and_broken_files_are_refused_with_the_reason(data: bytes, name: str, words: str) -> None:
    with pytest.raises(DocumentError, match=words):
        read_bytes(data, name)


def test_what_unpacks_to_too_much_is_refused_before_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_UNPACKED_BYTES", 4 << 20)
    with pytest.raises(DocumentError, match="unpacks to more than 4 MiB"):
        read_bytes(zip_bomb(8 << 20), "a.docx")


@pytest.mark.parametrize("name", ["a.docx", "a.epub", "a.ipynb"])
def test_damaged_files_give_a_document_or_a_reason(name: str) -> None:
    good = {
        "a.docx": make_docx(TEXT * 5),
        "a.epub": make_epub({"a.xhtml": "<p>text</p>"}),
        "a.ipynb": json.dumps({"cells": [{"cell_type": "code", "source": ["a", "b"]}]}).encode(),
    }[name]
    rng = random.Random(0)
    for _ in range(300):
        damaged = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        length = rng.choice([len(damaged), rng.randrange(len(damaged))])
        with suppress(DocumentError):  # nothing else is raised
            assert read_bytes(bytes(damaged[:length]), name).text


def test_rst_is_split_at_underlined_titles() -> None:
    document = read_bytes(RST.encode(), "a.rst")
    headings = ["Mills", "Mills > Water", "Mills > Water > Deep", "Mills > Wind"]
    assert [chunk.heading for chunk in _chunks(document)] == headings
    assert _chunks(document)[0].text.startswith("=====\nMills")


@pytest.mark.parametrize("kind", ["rst", "markdown"])
def test_headings_below_many_long_ones_take_no_more_memory_than_the_text(kind: Kind) -> None:
    marks = string.punctuation if kind == "rst" else [*itertools.accumulate("######")]
    above = [f"{'T' * 200}\n{mark * 200}\n\n" if kind == "rst" else f"{mark} {'T' * 200}\n" for mark in marks]
    below = f"a\n{marks[-1] * 2}\n\n" if kind == "rst" else f"{marks[-1]} a\n"
    text = "".join(above) + below * 20_000 + "the end"
    tracemalloc.start()
    try:
        found = sum(1 for _ in sections(text, kind))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found
    assert peak < 8 * len(text), f"{peak:,} bytes for {len(text):,} characters"


@pytest.mark.parametrize(
    ("told", "encoding", "said"),
    [
        ('<meta charset="iso-8859-1">', "cp1252", "Gruyère – reift"),
        ("<meta http-equiv=Content-Type content='text/html; charset=Shift_JIS'>", "shift_jis", "来週の会議"),
        ('<?xml version="1.0" encoding="windows-1251"?>', "cp1251", "Мельница"),
        ('<meta charset="iso-8859-1">', "utf-8", "Gruyère, converted"),
    ],
)
def test_a_page_is_read_in_the_encoding_that_it_tells(told: str, encoding: str, said: str) -> None:
    page = f"<html><head>{told}</head><body><p>{said}</p></body></html>"
    assert read_bytes(page.encode(encoding), "page.html").text.strip() == said


@pytest.mark.parametrize("told", ["", "<meta charset=punycode>", "<meta charset=rot13>", "<meta charset=none-such>"])
def test_a_page_that_tells_no_encoding_is_not_guessed(told: str) -> None:
    with pytest.raises(DocumentError, match="not UTF-8"):
        read_bytes(f"{told}<p>Gruyère</p>".encode("cp1252"), "page.html")
    with pytest.raises(DocumentError, match="not UTF-8"):
        read_bytes("<meta charset=iso-8859-1>Gruyère".encode("cp1252"), "page.txt")


def test_every_chunk_of_a_table_knows_the_names_of_its_columns() -> None:
    rows = "".join(f"mill {n},{n}\n" for n in range(40))
    chunks = _chunks(read_bytes(f"name,year\n{rows}".encode(), "a.csv"), tokens=20)
    assert len(chunks) > 3
    assert {chunk.heading for chunk in chunks} == {"name,year"}
    assert (chunks[0].text.split("\n")[:2], chunks[0].lines[0]) == (["name,year", "mill 0,0"], 1)
    assert {chunk.heading for chunk in _chunks(read_bytes(rows.encode(), "a.csv"))} == {""}  # 0 is no name


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a.rst", "a.csv"])
def test_chunks_know_their_lines(name: str) -> None:
    rng = random.Random(1)
    lines = [
        rng.choice(["", "# Mill", "def mill():", "grain and flour, water", "    x = 1", "====="]) for _ in range(400)
    ]
    document = read_bytes("\r\n".join(lines).encode(), name)
    for chunk in split(document, Chunking(24, 8), lambda text: len(text.split())):
        assert chunk.lines is not None
        first, last = chunk.lines
        shown = "\n".join(lines[first - 1 : last])
        assert chunk.text in shown
        assert chunk.text.startswith(shown.split("\n")[0].lstrip())
        assert shown.rstrip().endswith(chunk.text.split("\n")[-1])


def test_chunks_of_a_pdf_know_their_page() -> None:
    document = read_bytes(make_pdf("Grain and flour in the mill", num_pages=3), "a.pdf")
    assert [chunk.page for chunk in _chunks(document, tokens=8)] == [1, 2, 3]
    assert all(chunk.lines is None for chunk in _chunks(document))


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Grain.", encoding="utf-8")
    os.mkfifo(tmp_path / "b.txt")
    (tmp_path / "c.txt").symlink_to(tmp_path / "gone")
    assert [path.name for path in list_files([tmp_path])] == ["a.txt", "c.txt"]


@pytest.mark.parametrize("name", ["pipe.txt", "endless.txt", "socket.txt"])
def test_a_pipe_or_device_that_is_named_is_told_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "endless.txt").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket.txt"))
        with pytest.raises(DocumentError, match=r"is a pipe, a socket or a device|No such device"):
            read_file(tmp_path / name)


def test_a_file_that_grows_is_read_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 100)
    endless = Path("/proc/kallsyms")  # of no bytes, says its size
    if not endless.exists() or endless.stat().st_size:
        pytest.skip("this system has no file that is larger than it says")
    with pytest.raises(DocumentError, match="has 101 bytes, at most 100 are read"):
        read_file(endless)


def test_source_trees_are_read_and_what_tools_generate_is_not(tmp_path: Path) -> None:
    for name in ("Makefile", "README", "a.kt", "a.proto", "CMakeLists.txt", "a.ipynb", "a.docx"):
        assert is_known_kind(name)
    for name in ("package-lock.json", "jquery.min.js", "a.png", "core", "~$a.docx"):
        assert not is_known_kind(name)
    (tmp_path / "Makefile").write_text("all:\n\techo")
    assert read_file(tmp_path / "Makefile").kind == "code"
