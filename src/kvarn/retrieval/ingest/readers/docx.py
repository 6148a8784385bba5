"""Word documents (.docx) to text: paragraphs, headings as Markdown's, tables row by row. Deleted text is left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvarn.retrieval.ingest.readers.archive import Archive, parse_xml
from kvarn.retrieval.types import MAX_DOCUMENT_CHARS

BODY, STYLES = "word/document.xml", "word/styles.xml"
SKIPPED = frozenset({"Fallback", "moveFrom", "del", "pPrChange", "rPrChange"})  # shown elsewhere, or no more
MAX_LEVEL = 6
_HEADING = re.compile(r"heading ([1-9])", re.IGNORECASE)


def docx_to_text(data: bytes, source: str, max_chars: int = MAX_DOCUMENT_CHARS) -> str:
    """The text of the document's body."""
    archive = Archive(data, source, "Word document")
    styles = _Styles()
    if STYLES in archive:
        parse_xml(archive, STYLES, styles)
    body = _WordText(styles.levels, max_chars, archive)
    parse_xml(archive, BODY, body)
    return "\n\n".join(body.blocks) + "\n"


class _Styles:
    """Finds which styles are headings: their names are English in every language, their ids are not."""

    def __init__(self) -> None:
        self.levels: dict[str, int] = {}  # by id
        self._id = ""

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        if name == "style":
            self._id = attributes.get("styleId", "")
        elif name == "name" and self._id:
            shown = attributes.get("val", "")
            match = _HEADING.fullmatch(shown)
            if match or shown.lower() == "title":
                self.levels[self._id] = int(match[1]) if match else 1

    def end(self, name: str) -> None:
        if name == "style":
            self._id = ""

    def text(self, data: str) -> None:
        """Styles have none."""


@dataclass(slots=True)
class _Paragraph:
    parts: list[str] = field(default_factory=list)
    level: int = 0  # of a heading
    is_item: bool = False

    def text(self) -> str:
        text = "".join(self.parts).strip()
        if not text:
            return ""
        if self.level:
            return "#" * min(self.level, MAX_LEVEL) + " " + " ".join(text.split())
        return f"- {text}" if self.is_item else text


@dataclass(slots=True)
class _Table:
    lines: list[str] = field(default_factory=list)
    row: list[str] = field(default_factory=list)
    cell: list[str] = field(default_factory=list)


class _WordText:
    """Collects blocks: paragraphs and tables, which may lie in each other (text boxes, nested tables)."""

    def __init__(self, levels: Mapping[str, int], max_chars: int, archive: Archive) -> None:
        self.blocks: list[str] = []
        self._levels = levels
        self._left = max_chars
        self._max_chars = max_chars
        self._archive = archive
        self._paragraphs: list[_Paragraph] = []  # open ones
        self._tables: list[_Table] = []  # open ones
        self._num_skipped = 0  # open elements that are left out
        self._is_text = False

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        if self._num_skipped or name in SKIPPED:
            self._num_skipped += 1
        elif name == "p":
            self._paragraphs.append(_Paragraph())
        elif name == "tbl":
            self._tables.append(_Table())
        elif self._paragraphs:
            self._start_in(self._paragraphs[-1], name, attributes)

    def end(self, name: str) -> None:
        if self._num_skipped:
            self._num_skipped -= 1
        elif name == "t":
            self._is_text = False
        elif name == "p" and self._paragraphs:
            self._add(self._paragraphs.pop().text())
        elif self._tables:
            self._end_in_table(self._tables[-1], name)

    def text(self, data: str) -> None:
        if not self._is_text or self._num_skipped:
            return
        self._left -= len(data)
        if self._left < 0:
            raise self._archive.error(f"has more than {self._max_chars:,} characters; split it")
        self._paragraphs[-1].parts.append(data)

    def _start_in(self, paragraph: _Paragraph, name: str, attributes: Mapping[str, str]) -> None:
        value = attributes.get("val", "")
        if name == "t":
            self._is_text = True
        elif name == "pStyle":
            paragraph.level = self._levels.get(value, 0)
        elif name == "outlineLvl" and value.isdecimal() and int(value[:4]) < MAX_LEVEL:
            paragraph.level = int(value[:4]) + 1
        elif name == "numPr":
            paragraph.is_item = True
        elif name in ("br", "cr"):
            paragraph.parts.append("\n")
        elif name == "noBreakHyphen":
            paragraph.parts.append("-")
        elif name == "tab" and not attributes:  # with attributes it sets a tab stop
            paragraph.parts.append("\t")

    def _end_in_table(self, table: _Table, name: str) -> None:
        if name == "tc":
            table.row.append(" ".join(table.cell))
            table.cell = []
        elif name == "tr":
            if any(table.row):
                table.lines.append(" | ".join(table.row))
            table.row = []
        elif name == "tbl":
            self._tables.pop()
            self._add("\n".join(table.lines))

    def _add(self, block: str) -> None:
        if block:
            (self._tables[-1].cell if self._tables else self.blocks).append(block)
