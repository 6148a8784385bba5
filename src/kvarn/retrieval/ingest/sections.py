"""The sections of documents and their headings, by kind: Markdown, reStructuredText, tables, definitions in code.

The texts are untrusted: every search takes time in proportion to their length.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterable, Iterator

from kvarn.retrieval.types import Kind
from kvarn.tokenizer.text_units import found_in

MAX_HEADING_CHARS = 200
MAX_LINE_CHARS = 2_000  # of lines in which headings are looked for
MARKDOWN_KINDS: frozenset[Kind] = frozenset({"markdown", "html", "docx", "epub", "notebook"})  # as their readers write
RULES = frozenset(string.punctuation)
_NUMBER = re.compile(r"[-+]?[\d.,:/]+%?")
_HEADING_OR_FENCE = re.compile(r"^(?:(#{1,6})[ \t]+([^\n]+)|(```|~~~))", re.MULTILINE)
_DEFINITION = re.compile(
    r"^(?:async def|def|class|fn|pub fn|impl|func|function|export|struct|enum|interface|type|template)"
    r"\b[^\n]*",
    re.MULTILINE,
)
_TARGET = re.compile(r"\.\. _[^\n]*:$")
_DECORATOR = re.compile(r"@\w")


def sections(text: str, kind: Kind) -> Iterator[tuple[int, int, str]]:
    """Start, end and heading of a document's sections; a heading without a text belongs to the section below it."""
    starts = itertools.chain([(0, "")], _marks(text, kind), [(len(text), "")])
    begun: int | None = None  # where a heading stands that has nothing of its own below it
    for (start, heading), (end, _) in itertools.pairwise(starts):
        if heading and end < len(text) and _is_bare(text[start:end], kind):
            begun = start if begun is None else begun
        elif text[start:end].strip():
            yield start if begun is None else begun, end, heading
            begun = None


def _is_bare(section: str, kind: Kind) -> bool:
    """Whether a section is its heading alone; in reStructuredText with rules about it, and names for links."""
    if kind != "rst":
        return not section.strip().partition("\n")[2].strip()
    said = (line for _, line in _lines(section) if line and not _is_rule(line) and not _TARGET.match(line))
    return len(list(itertools.islice(said, 2))) < 2


def _marks(text: str, kind: Kind) -> Iterable[tuple[int, str]]:
    """Where each section begins, and its heading."""
    if kind in MARKDOWN_KINDS:
        return _paths(_markdown_headings(text))
    if kind == "rst":
        return _paths(_rst_headings(text))
    if kind == "csv":
        return _below_column_names(text)
    return [(start, "") for start in _definitions(text)] if kind == "code" else []


def _definitions(text: str) -> Iterator[int]:
    """Where each definition begins, with the decorators above it."""
    floor = 0
    for match in found_in(_DEFINITION, text, (0, len(text))):
        start = match.start()
        while start > floor and _DECORATOR.match(text, above := text.rfind("\n", floor, start - 1) + 1 or floor):
            start = above
        yield start
        floor = match.end()


def _paths(headings: Iterable[tuple[int, int, str]]) -> Iterator[tuple[int, str]]:
    """Where each heading begins, with the path of those above it: "Install > From source"; from start, level, title.

    Only the front of a path is kept, and one path at a time: a text may have a heading in every other line.
    """
    paths: list[tuple[int, str]] = []  # of the headings that are open, by level
    for start, level, title in headings:
        paths = [one for one in paths if one[0] < level]
        path = f"{paths[-1][1]} > {title}" if paths else title
        paths.append((level, path[:MAX_HEADING_CHARS]))
        yield start, paths[-1][1]


def _markdown_headings(text: str) -> Iterator[tuple[int, int, str]]:
    fence = ""  # of the code block that is open
    for match in found_in(_HEADING_OR_FENCE, text, (0, len(text))):
        if mark := match.group(3):
            fence = "" if fence == mark else fence or mark
        if fence or mark:
            continue
        title = match.group(2)[: 2 * MAX_HEADING_CHARS]  # bounded: every heading below repeats it
        yield match.start(), len(match.group(1)), title.rstrip(" \t#") or title[0]


def _rst_headings(text: str) -> Iterator[tuple[int, int, str]]:
    """Lines that are underlined with one character, at least as long; its first use tells the level."""
    levels: dict[tuple[str, bool], int] = {}
    before = title = ""  # the two lines above
    before_at = title_at = 0
    for start, line in _lines(text):
        if _is_rule(line) and title.strip() and not title[0].isspace() and not _is_rule(title):
            has_overline = before == line
            if len(title) <= min(len(line), MAX_HEADING_CHARS) and (has_overline or not before.strip()):
                level = levels.setdefault((line[0], has_overline), len(levels) + 1)
                yield before_at if has_overline else title_at, level, title
        before, before_at, title, title_at = title, title_at, line, start


def _is_rule(line: str) -> bool:
    """Whether a line is one character of punctuation, repeated."""
    return len(line) > 1 and line[0] in RULES and line == line[0] * len(line)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Start and text of each line, without the blanks at its end; long ones are cut."""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield start, text[start : min(end, start + MAX_LINE_CHARS)].rstrip()
        start = end + 1


def _below_column_names(text: str) -> list[tuple[int, str]]:
    """A table as one section, whose heading is the first row if that holds names; all chunks repeat it."""
    end = text.find("\n")
    first = text[: max(end, 0)]
    cells = [cell.strip(" \"'") for cell in re.split("[,;\t|]", first[:MAX_LINE_CHARS])]
    if len(cells) < 2 or not all(cells) or any(_NUMBER.fullmatch(cell) for cell in cells):
        return []
    return [(0, first)]
