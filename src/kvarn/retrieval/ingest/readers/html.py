"""HTML to text that keeps its structure: headings as Markdown's, blocks as paragraphs; no scripts, no styles.

A page without an <h1> begins with its <title>, which most often says the same.

Takes time in proportion to the length of untrusted input, whereas the standard library's parser searches the rest of
the page for the end of every unfinished tag.
"""

from __future__ import annotations

import codecs
import re
from contextlib import suppress
from html import unescape

SKIPPED = frozenset({"script", "style", "template", "noscript", "svg", "head"})
RAW = {name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE) for name in ("script", "style")}  # where each one ends
BLOCKS = frozenset(
    {"address", "article", "aside", "blockquote", "body", "br", "dd", "div", "dl", "dt", "fieldset", "figcaption"}
    | {"figure", "footer", "form", "header", "hr", "li", "main", "nav", "ol", "p", "pre", "section", "table", "td"}
    | {"th", "tr", "ul", "h1", "h2", "h3", "h4", "h5", "h6"}
)
MARKERS = {"li": "- ", **{f"h{level}": "#" * level + " " for level in range(1, 7)}}

_MARKUP = re.compile(r"<(?=[a-zA-Z!?/])")
# Quoted values may hold < and >. A failing match ends at a < outside of quotes, and no two matches are in one state
# (outside, in "", in '') at one position: so at most three of them read any character.
_TAG = re.compile(r"""<(/?)([a-zA-Z][^\s/<>"']*)((?:[^<>"']++|"[^"]*+"|'[^']*+')*+)>""")
_BROKEN_TAG = re.compile(r"<(/?)([a-zA-Z][^\s/<>\"']*)([^<>]*+)>")  # with unbalanced quotes
_DECLARATION = re.compile(r"<[!?/][^<>]*+>")
_HUGE_NUMBER = re.compile(r"&#[0-9]{8,};?")  # beyond Unicode, and slow to convert


_CHARSET = re.compile(rb"""(?:charset|encoding)\s*=\s*["']?\s*([a-z0-9_-]+)""", re.IGNORECASE)
CHARSET_BYTES = 1_024  # at the beginning of a page, where HTML wants it told
CHARSETS = frozenset(
    {"koi8-r", "koi8-u", "mac-roman", "cp874", "shift_jis", "euc_jp", "euc_kr", "gb2312", "gbk", "gb18030", "big5"}
    | {f"cp{number}" for number in range(1250, 1259)}
    | {f"iso8859-{number}" for number in range(2, 17)}
)


def charset_of(page: bytes) -> str | None:
    """The encoding that a page tells of itself, other than Unicode; Latin-1 means Windows-1252, as in browsers."""
    if told := _CHARSET.search(page[:CHARSET_BYTES]):
        with suppress(LookupError):
            name = codecs.lookup(told[1].decode("ascii")).name
            name = "cp1252" if name in ("iso8859-1", "ascii") else name
            return name if name in CHARSETS else None
    return None


def html_to_text(html: str) -> str:
    """The readable text of a page, however broken its markup is."""
    reader = _HtmlReader(html)
    reader.read()
    return reader.page.text()


class _HtmlReader:
    """Splits a page into tags and the text between them."""

    def __init__(self, html: str) -> None:
        self.page = _Page()
        self._html = html
        self._has_comment_ends = True

    def read(self) -> None:
        at = 0
        while found := _MARKUP.search(self._html, at):
            self._add_text(at, found.start())
            at = self._read_markup(found.start())
        self._add_text(at, len(self._html))

    def _add_text(self, start: int, end: int) -> None:
        if start < end:
            self.page.add_text(unescape(_HUGE_NUMBER.sub("\ufffd", self._html[start:end])))

    def _read_markup(self, start: int) -> int:
        """Read the markup at a < and return its end; a < that begins none is text."""
        tag = _TAG.match(self._html, start) or _BROKEN_TAG.match(self._html, start)
        if tag is not None:
            return self._read_tag(tag)
        end = self._comment_end(start) if self._html.startswith("<!--", start) else -1
        if end >= 0:
            return end
        declaration = _DECLARATION.match(self._html, start)
        if declaration is not None:
            return declaration.end()
        self.page.add_text("<")
        return start + 1

    def _read_tag(self, tag: re.Match[str]) -> int:
        slash, name, rest = tag[1], tag[2].lower(), tag[3]
        if slash:
            self.page.end(name)
            return tag.end()
        self.page.begin(name)
        if rest.endswith("/"):
            self.page.end(name)
        elif name in RAW:
            end = RAW[name].search(self._html, tag.end())
            return len(self._html) if end is None else end.start()
        return tag.end()

    def _comment_end(self, start: int) -> int:
        """The position after a comment; -1 if it never ends, and then no later one does."""
        end = self._html.find("-->", start + 2) if self._has_comment_ends else -1
        self._has_comment_ends = end >= 0
        return end + len("-->") if end >= 0 else -1


class _Page:
    """Collects the text of a page in paragraphs."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._skipped = ""  # the outermost open element whose content is left out
        self._num_pre = 0  # open <pre> elements
        self._starts_paragraph = False  # the next text begins a paragraph ...
        self._marker = ""  # ... with this
        self._title: list[str] = []
        self._is_in_title = False
        self._has_h1 = False

    def begin(self, name: str) -> None:
        self._is_in_title |= name == "title" and self._skipped == "head"  # an <svg> may have one too
        self._has_h1 |= name == "h1" and not self._skipped
        if name in SKIPPED:
            self._skipped = self._skipped or name
        if name in BLOCKS:
            self._starts_paragraph = True
            self._marker = MARKERS.get(name, self._marker)
        self._num_pre += name == "pre"

    def end(self, name: str) -> None:
        if name == self._skipped:
            self._skipped = ""
        if name in ("title", "head"):
            self._is_in_title = False
        if name in BLOCKS:
            self._starts_paragraph, self._marker = True, ""
        self._num_pre -= name == "pre" and self._num_pre > 0

    def add_text(self, data: str) -> None:
        if self._is_in_title:
            self._title.append(data)
        if self._skipped:
            return
        text = data if self._num_pre else re.sub(r"\s+", " ", data)
        if self._starts_paragraph:
            text = text.lstrip("\n") if self._num_pre else text.lstrip()
        elif not self._num_pre and self._parts and self._parts[-1][-1].isspace():
            text = text.lstrip()
        if text and self._starts_paragraph:
            self._parts += ("\n\n", self._marker) if self._marker else ("\n\n",)
            self._starts_paragraph, self._marker = False, ""
        if text:
            self._parts.append(text)

    def text(self) -> str:
        joined = re.sub(r"(?<![ \t])[ \t]+\n", "\n", "".join(self._parts))
        text = re.sub(r"\n{3,}", "\n\n", joined).strip()
        title = "" if self._has_h1 else " ".join("".join(self._title).split())
        return (f"# {title}\n\n{text}" if title else text) + "\n"
