"""Books (.epub) to text: the pages of the spine in order, each read as HTML."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from kvarn.retrieval.ingest.readers.archive import Archive, parse_xml
from kvarn.retrieval.ingest.readers.html import html_to_text
from kvarn.retrieval.types import MAX_DOCUMENT_CHARS

CONTAINER, ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
PAGES = frozenset({"application/xhtml+xml", "text/html", "text/x-oeb1-document"})


def epub_to_text(data: bytes, source: str, max_chars: int = MAX_DOCUMENT_CHARS) -> str:
    """The text of all pages, with blank lines between them."""
    archive = Archive(data, source, "EPUB")
    pages, num_chars, read = [], 0, set()
    protected = _protected(archive)
    for name in _spine(archive):
        if name in protected:
            raise archive.error("is protected against copying; give a file without that")
        if name in read or name not in archive:
            continue
        read.add(name)
        text = html_to_text(_decoded(archive.read(name))).strip()
        num_chars += len(text)
        if num_chars > max_chars:
            raise archive.error(f"has more than {max_chars:,} characters; split it")
        pages.append(text)
    return "\n\n".join(filter(None, pages)) + "\n"


def _spine(archive: Archive) -> Iterator[str]:
    """The names of the pages in reading order."""
    container = _Elements("rootfile")
    parse_xml(archive, CONTAINER, container)
    package = next((one["full-path"] for one in container.found if "full-path" in one), "")
    elements = _Elements("item", "itemref")
    parse_xml(archive, package, elements)
    names = {
        one["id"]: posixpath.normpath(posixpath.join(posixpath.dirname(package), unquote(one["href"])))
        for one in elements.found
        if "href" in one and "id" in one and one.get("media-type") in PAGES
    }
    yield from (names[one["idref"]] for one in elements.found if one.get("idref") in names)


def _protected(archive: Archive) -> set[str]:
    """The names of encrypted members; of many books only the fonts are."""
    if ENCRYPTION not in archive:
        return set()
    references = _Elements("CipherReference")
    parse_xml(archive, ENCRYPTION, references)
    return {unquote(one.get("URI", "")) for one in references.found}


def _decoded(page: bytes) -> str:
    is_utf16 = page.startswith((b"\xff\xfe", b"\xfe\xff"))
    return page.decode("utf-16" if is_utf16 else "utf-8-sig", "replace").replace("\r\n", "\n")


class _Elements:
    """Collects the attributes of some elements."""

    def __init__(self, *names: str) -> None:
        self.found: list[Mapping[str, str]] = []
        self._names = names

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        if name in self._names:
            self.found.append(attributes)

    def end(self, name: str) -> None:
        """The attributes were taken at its start."""

    def text(self, data: str) -> None:
        """Only attributes are of interest."""
