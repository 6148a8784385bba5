"""HTML to text that keeps its structure: headings as Markdown's, blocks as paragraphs; no scripts, no styles.

Takes time in proportion to the length, whatever strangers write: the standard library's parser looks for the end of
every unfinished tag in all that follows.
"""

from __future__ import annotations

import re
from html import unescape

SILENT = frozenset({"script", "style", "template", "noscript", "svg", "head"})
RAW = {name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE) for name in ("script", "style")}  # where each one ends
BLOCKS = frozenset(
    {"address", "article", "aside", "blockquote", "body", "br", "dd", "div", "dl", "dt", "fieldset", "figcaption"}
    | {"figure", "footer", "form", "header", "hr", "li", "main", "nav", "ol", "p", "pre", "section", "table", "td"}
    | {"th", "tr", "ul", "h1", "h2", "h3", "h4", "h5", "h6"}
)
MARKERS = {"li": "- ", **{f"h{level}": "#" * level + " " for level in range(1, 7)}}

_MARKUP = re.compile(r"<(?=[a-zA-Z!?/])")
# Quoted values may hold < and >. A try that fails ends at a < outside of quotes, and no two tries are in the same state
# (outside, in "", in '') at one place: so at most three of them read any character.
_TAG = re.compile(r"""<(/?)([a-zA-Z][^\s/<>"']*)((?:[^<>"']++|"[^"]*+"|'[^']*+')*+)>""")
_BROKEN_TAG = re.compile(r"<(/?)([a-zA-Z][^\s/<>\"']*)([^<>]*+)>")  # its quotes do not fit
_DECLARATION = re.compile(r"<[!?/][^<>]*+>")
_HUGE_NUMBER = re.compile(r"&#[0-9]{8,};?")  # no character has it, and long ones take long to be read


def html_to_text(html: str) -> str:
    """The readable text of a page, however broken its markup is."""
    reader = _HtmlReader(html)
    reader.read()
    return reader.page.text()


class _HtmlReader:
    """Cuts a page into tags and what stands between them."""

    def __init__(self, html: str) -> None:
        self.page = _Page()
        self._html = html
        self._has_comment_ends = True

    def read(self) -> None:
        at = 0
        while found := _MARKUP.search(self._html, at):
            self._say(at, found.start())
            at = self._pass(found.start())
        self._say(at, len(self._html))

    def _say(self, start: int, end: int) -> None:
        if start < end:
            self.page.say(unescape(_HUGE_NUMBER.sub("\ufffd", self._html[start:end])))

    def _pass(self, start: int) -> int:
        """Where the markup at a < ends; a < that begins none is text."""
        tag = _TAG.match(self._html, start) or _BROKEN_TAG.match(self._html, start)
        if tag is not None:
            return self._take(tag)
        end = self._comment_end(start) if self._html.startswith("<!--", start) else -1
        if end >= 0:
            return end
        declaration = _DECLARATION.match(self._html, start)
        if declaration is not None:
            return declaration.end()
        self.page.say("<")
        return start + 1

    def _take(self, tag: re.Match[str]) -> int:
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
        """Behind its last character; -1 if it never ends, and then none that begins later does."""
        end = self._html.find("-->", start + 2) if self._has_comment_ends else -1
        self._has_comment_ends = end >= 0
        return end + len("-->") if end >= 0 else -1


class _Page:
    """Text as it comes, in paragraphs."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._silent = ""  # the outermost element whose content nobody reads
        self._num_pre = 0
        self._is_broken = False  # what comes next begins a paragraph ...
        self._marker = ""  # ... with this

    def begin(self, name: str) -> None:
        # <title> stands in <head>: it is the one thing there that people read, and <h1> says it again.
        if name in SILENT:
            self._silent = self._silent or name
        if name in BLOCKS:
            self._is_broken = True
            self._marker = MARKERS.get(name, self._marker)
        self._num_pre += name == "pre"

    def end(self, name: str) -> None:
        if name == self._silent:
            self._silent = ""
        if name in BLOCKS:
            self._is_broken, self._marker = True, ""
        self._num_pre -= name == "pre" and self._num_pre > 0

    def say(self, data: str) -> None:
        if self._silent:
            return
        text = data if self._num_pre else re.sub(r"\s+", " ", data)
        if self._is_broken:
            text = text.lstrip("\n") if self._num_pre else text.lstrip()
        elif not self._num_pre and self._parts and self._parts[-1][-1].isspace():
            text = text.lstrip()
        if text and self._is_broken:
            self._parts += ("\n\n", self._marker) if self._marker else ("\n\n",)
            self._is_broken, self._marker = False, ""
        if text:
            self._parts.append(text)

    def text(self) -> str:
        joined = re.sub(r"(?<![ \t])[ \t]+\n", "\n", "".join(self._parts))
        return re.sub(r"\n{3,}", "\n\n", joined).strip() + "\n"
