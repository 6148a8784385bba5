"""HTML to text that keeps its structure: headings as Markdown's, blocks as paragraphs; no scripts, no styles."""

from __future__ import annotations

import re
from html.parser import HTMLParser

SILENT = frozenset({"script", "style", "template", "noscript", "svg", "head"})
BLOCKS = frozenset(
    {"address", "article", "aside", "blockquote", "body", "br", "dd", "div", "dl", "dt", "fieldset", "figcaption"}
    | {"figure", "footer", "form", "header", "hr", "li", "main", "nav", "ol", "p", "pre", "section", "table", "td"}
    | {"th", "tr", "ul", "h1", "h2", "h3", "h4", "h5", "h6"}
)
_HEADING = re.compile(r"h([1-6])")


def html_to_text(html: str) -> str:
    """The readable text of a page, however broken its markup is."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader.text()


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._silent: list[str] = []
        self._num_pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        if tag in SILENT:
            self._silent.append(tag)
        heading = _HEADING.fullmatch(tag)
        if tag in BLOCKS:
            self._parts.append("\n\n")
        if heading:
            self._parts.append("#" * int(heading.group(1)) + " ")
        elif tag == "li":
            self._parts.append("- ")
        self._num_pre += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag in self._silent:
            del self._silent[self._silent.index(tag) :]
        if tag in BLOCKS:
            self._parts.append("\n\n")
        self._num_pre -= tag == "pre" and self._num_pre > 0

    def handle_data(self, data: str) -> None:
        # <title> stands in <head>: it is the one thing there that people read, and <h1> says it again.
        if not self._silent:
            self._parts.append(data if self._num_pre else re.sub(r"\s+", " ", data))

    def text(self) -> str:
        joined = "".join(self._parts)
        joined = re.sub(r"[ \t]*\n[ \t]*(?=\n)", "\n", joined)
        return re.sub(r"\n{3,}", "\n\n", re.sub(r"(#{1,6} |- )\n+", r"\1", joined)).strip() + "\n"
