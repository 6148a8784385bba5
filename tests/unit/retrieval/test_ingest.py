"""Files to documents to chunks."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from pathlib import Path

import pytest

from kvarn.errors import ConfigError, DocumentError, InvalidParameter
from kvarn.retrieval.ingest.chunking import Chunking, split
from kvarn.retrieval.ingest.files import MAX_FILE_BYTES, list_files, read_bytes, read_file
from kvarn.retrieval.ingest.readers.html import html_to_text
from kvarn.retrieval.types import Document, Kind
from kvarn.tokenizer import text_units
from tests.unit.retrieval.pdfs import make_pdf

MARKDOWN = """# Mills
Grain goes in.

## Water
A wheel turns.

```
# no heading
```

## Wind
Sails turn.
"""
CODE = """import os

def first():
    return 1

@cached
def second():
    return 2
"""


def _count(text: str) -> int:
    return len(text.split())


def test_every_chunk_is_a_slice_of_its_document_and_within_the_limit() -> None:
    text = "\n\n".join(" ".join(f"w{p}-{n}." for n in range(p * 7 % 60 + 1)) for p in range(40))
    chunks = split(Document(text), Chunking(50, 10), _count)
    assert all(text[chunk.start : chunk.end] == chunk.text and _count(chunk.text) <= 50 for chunk in chunks)


def test_chunks_cover_everything_and_overlap() -> None:
    text = " ".join(f"word{n}." for n in range(500))
    chunks = split(Document(text), Chunking(50, 10), _count)
    assert {word for chunk in chunks for word in chunk.text.split()} == set(text.split())
    assert all(after.start < before.end for before, after in pairwise(chunks))


def test_markdown_is_split_at_headings_and_keeps_them() -> None:
    chunks = split(Document(MARKDOWN, kind="markdown"), Chunking(50, 10), _count)
    assert [chunk.heading for chunk in chunks] == ["Mills", "Mills > Water", "Mills > Wind"]
    assert "# no heading" in chunks[1].text


def test_code_is_split_at_definitions() -> None:
    chunks = split(Document(CODE, kind="code"), Chunking(50, 0), _count)
    assert [chunk.text.split("\n")[0] for chunk in chunks] == ["import os", "def first():", "@cached"]


def test_a_heading_without_a_text_is_no_chunk_of_its_own() -> None:
    text = "# Mills\n\n## Water\n\n### Wheels\n\nThey turn.\n\n## Wind\n\nIt blows.\n\n## Empty\n"
    chunks = split(Document(text, kind="markdown"), Chunking(), lambda part: len(part.split()))
    assert [(chunk.text.split()[-1], chunk.heading) for chunk in chunks] == [
        ("turn.", "Mills > Water > Wheels"),
        ("blows.", "Mills > Wind"),
        ("Empty", "Mills > Empty"),
    ]
    assert chunks[0].text.startswith("# Mills")


def test_a_heading_of_restructured_text_is_no_chunk_of_its_own() -> None:
    text = "====\nMill\n====\n\n.. _build:\n\nBuild\n=====\n\nTurn it.\n\nRun\n---\n\nIt turns.\n\nEnd\n---\n"
    chunks = split(Document(text, kind="rst"), Chunking(), lambda part: len(part.split()))
    assert [(chunk.text.split()[0], chunk.text.split()[-1], chunk.heading) for chunk in chunks] == [
        ("====", "it.", "Mill > Build"),
        ("Run", "turns.", "Mill > Build > Run"),
        ("End", "---", "Mill > Build > End"),
    ]


def test_a_word_longer_than_a_chunk_is_split() -> None:
    chunks = split(Document("x" * 1000), Chunking(100, 0), len)
    assert "".join(chunk.text for chunk in chunks) == "x" * 1000
    assert max(len(chunk.text) for chunk in chunks) <= 100


@pytest.mark.parametrize(("tokens", "overlap"), [(0, 0), (7, 0), (100, 51), (100, -1), (True, 0)])
def test_a_wrong_chunking_is_refused(tokens: int, overlap: int) -> None:
    with pytest.raises(InvalidParameter):
        Chunking(tokens, overlap)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("markdown", "# a" + " " * 60_000 + "b"),
        ("markdown", "# a" + "#" * 60_000 + "b"),
        ("markdown", "```\n```\n# x\n" * 6_000),
        ("markdown", "# " + "x" * 60_000 + "\n## y" * 12_000),
        ("code", "@a\n" * 20_000),
        ("code", "@a\ndef f():\n" * 5_000),
        ("text", "\n \t" * 20_000),
        ("text", "a. " * 20_000),
    ],
    ids=["blanks", "hashes", "fences", "long heading", "decorators", "definitions", "blank lines", "sentences"],
)
def test_hostile_texts_are_split_in_linear_time(kind: Kind, text: str, patience: float) -> None:
    began = time.process_time()
    chunks = split(Document(text, kind=kind), Chunking(), lambda part: len(part) // 4)
    assert time.process_time() - began < 1.0 * patience  # when it grew with the square: many times that
    assert all(len(chunk.heading) <= 200 for chunk in chunks)


def test_a_definition_begins_with_its_decorators() -> None:
    code = "@a\nx = 1\n@b(1)\n@c\nasync def f():\n    pass\n"
    chunks = split(Document(code, kind="code"), Chunking(), len)
    assert [chunk.text.split()[0] for chunk in chunks] == ["@a", "@b(1)"]


def test_headings_lose_closing_marks() -> None:
    text = "# Mill ##\nx\n## Wind \t\ny\n```\n# no\n```\n### ###\nz"
    headings = [chunk.heading for chunk in split(Document(text, kind="markdown"), Chunking(), len)]
    assert headings == ["Mill", "Mill > Wind", "Mill > Wind > #"]


def test_html_keeps_text_and_headings_only() -> None:
    page = b"<html><head><style>p{}</style></head><body><h2>Mill</h2><p>Water &amp; wind<script>x()</script><li>one"
    text = read_bytes(page, "page.html").text
    assert "## Mill" in text
    assert "Water & wind" in text
    assert "x()" not in text
    assert "p{}" not in text


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<ul><li><p>one</p><li>two</ul>three", "- one\n\n- two\n\nthree"),
        ("<h2></h2><p>plain", "plain"),
        ("3 < 4 and 5 > 4 <- arrow", "3 < 4 and 5 > 4 <- arrow"),
        ("<a title=\"<p> > it's\" href='x\">'>link</a> end", "link end"),
        ('<p title="unclosed>text', "text"),
        ("a<!-- <p> > -->b<!doctype html>c<?xml?>d<!-- never ends", "abcd<!-- never ends"),
        ("a <b>b</b>  <i> c</i>", "a b c"),
        ("<PRE>\n a\n\n\n\n  b  \n</PRE>z", "a\n\n  b\n\nz"),
        ("<script>if (a </b>) '<p>'</SCRIPT >x<style/>y", "xy"),
        ("<svg><svg><p>no</svg>yes<head><style>p{}</style>no</head>yes", "yesyes"),
        ("&lt;b&gt; &#65;&#0; &#99999999999; &nosuch;", "<b> A\ufffd \ufffd &nosuch;"),
        ("unfinished <a", "unfinished <a"),
        ("<head><title> A &amp;\nB </title><style>p{}</style></head><p>c", "# A & B\n\nc"),
        ("<head><title>A</title></head><h1>B</h1>c", "# B\n\nc"),
        ("<head><title>A<p>c</head>d", "# Ac\n\nd"),
        ("<head><title></title></head>c<svg><title>no</title></svg>", "c"),
    ],
)
def test_html_is_read_however_broken(page: str, text: str) -> None:
    assert html_to_text(page) == text + "\n"


@pytest.mark.parametrize(
    "unit",
    [
        *("<", "<a ", "<!", "<!--", "</", "<?", '<a "', "<a \"'", "<a '<b \" ", "<a\"<a'", "<script>", "</script"),
        *("<svg><x></head>", " <b></b>", "<li> ", "<pre> ", "&#9", "&#", "&a", "#", " \n\t"),
    ],
)
def test_hostile_html_takes_linear_time(unit: str, patience: float) -> None:
    began = time.process_time()
    for end in ("", ">", "'", '"', "-->"):
        html_to_text(unit * (60_000 // len(unit)) + end)
    assert time.process_time() - began < 1.5 * patience  # when it grew with the square: minutes


def test_a_huge_number_of_a_character_is_none() -> None:
    assert html_to_text(f"a&#{'9' * 50_000};b") == "a\ufffdb\n"


def test_a_pdf_gives_its_text() -> None:
    document = read_bytes(make_pdf("Grain and flour"), "book.pdf")
    assert document.kind == "pdf"
    assert "Grain and flour" in document.text


@pytest.mark.parametrize(
    ("data", "name", "words"),
    [
        (b"%PDF-1.7 nothing", "a.pdf", "broken PDF"),
        (b"", "a.txt", "empty"),
        (b" \n ", "a.md", "empty"),
        (b"caf\xe9 latin", "a.txt", "not UTF-8"),
        (b"a\0b", "a.txt", "zero bytes"),
    ],
)
def test_what_cannot_be_read_is_told(data: bytes, name: str, words: str) -> None:
    with pytest.raises(DocumentError, match=words):
        read_bytes(data, name)


def test_a_pdf_without_text_is_told() -> None:
    with pytest.raises(DocumentError, match="without text"):
        read_bytes(make_pdf(""), "scan.pdf")


def test_texts_with_a_byte_order_mark_are_read() -> None:
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        assert read_bytes("grüße".encode(encoding), "a.txt").text == "grüße"


def test_a_file_of_100_mb_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "big.txt"
    with path.open("wb") as file:
        file.truncate(100_000_000)
    with pytest.raises(DocumentError, match=f"at most {MAX_FILE_BYTES:,}"):
        read_file(path)


def test_a_folder_means_its_files_of_known_kinds(tmp_path: Path) -> None:
    for name in ("a.md", "b.bin", ".hidden.md", "sub/c.py", ".git/d.md", "node_modules/e.js"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [path.relative_to(tmp_path).as_posix() for path in list_files([tmp_path])] == ["a.md", "sub/c.py"]
    with pytest.raises(ConfigError, match="does not exist"):
        list_files([tmp_path / "nope"])


@pytest.mark.parametrize("kind", ["text", "markdown", "code"])
def test_a_text_searched_by_windows_gives_the_chunks_of_one_searched_at_once(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    pieces = [
        "word ",
        "mill. ",
        "\n",
        "\n\n",
        "# Head\n",
        "## Sub ##\n",
        "```\n",
        "~~~\n",
        "def f():\n",
        "@x\n",
        "\n \n",
    ]
    texts = ["".join(rng.choices(pieces, k=200)) for _ in range(50)]
    at_once = [split(Document(text, kind=kind), Chunking(16, 4), count_words) for text in texts]
    monkeypatch.setattr(text_units, "WINDOW", 2 * text_units.WINDOW_OVERLAP)
    by_windows = [split(Document(text, kind=kind), Chunking(16, 4), count_words) for text in texts]
    assert by_windows == at_once


@pytest.mark.parametrize("text", ["x" * 100_000, "\u4e2d" * 100_000, "x" * 50_000 + "\n" + "y" * 50_000])
def test_a_chunk_has_a_limited_number_of_characters_whatever_its_tokens(text: str) -> None:
    """A model may make one token of a word, however long that is."""
    chunks = split(Document(text), Chunking(32, 8), count_words)
    assert max(len(one.text) for one in chunks) <= 32 * text_units.CHARS_PER_TOKEN
    assert {at for one in chunks for at in range(one.start, one.end)} >= set(range(100_000)) - {50_000}


def test_blank_space_takes_no_units() -> None:
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return count_words(text)

    chunks = split(Document("a" + " \n" * 100_000 + "b"), Chunking(16, 4), count)
    assert [one.text for one in chunks] == ["a", "b"]
    assert len(counted) < 100


def count_words(text: str) -> int:
    return len(text.split())
