"""Word documents and EPUBs made by hand: good ones and hostile ones."""

from __future__ import annotations

import io
import zipfile

WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
STYLES = (
    f'<w:styles {WORD}><w:style w:type="paragraph" w:styleId="berschrift1"><w:name w:val="heading 1"/></w:style>'
    '<w:style w:type="paragraph" w:styleId="berschrift2"><w:name w:val="heading 2"/></w:style></w:styles>'
)
CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
)


def make_zip(members: dict[str, bytes | str], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip file with these members."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def make_docx(body: str) -> bytes:
    """A Word document with this XML in its body."""
    document = f"<w:document {WORD}><w:body>{body}</w:body></w:document>"
    return make_zip({"word/document.xml": document, "word/styles.xml": STYLES})


def paragraph(text: str, properties: str = "") -> str:
    return f"<w:p><w:pPr>{properties}</w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>"


def make_epub(pages: dict[str, str], extra: dict[str, bytes | str] | None = None) -> bytes:
    """A book whose spine has these pages in this order; their files are named in another one."""
    items = "".join(
        f'<item id="i{n}" href="{name}" media-type="application/xhtml+xml"/>' for n, name in enumerate(sorted(pages))
    )
    numbers = {name: n for n, name in enumerate(sorted(pages))}
    spine = "".join(f'<itemref idref="i{numbers[name]}"/>' for name in pages)
    package = (
        '<!DOCTYPE package PUBLIC "+//ISBN 0-9673008-1-9//DTD OEB 1.2 Package//EN" "oebpkg12.dtd">'
        f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>'
    )
    members: dict[str, bytes | str] = {"META-INF/container.xml": CONTAINER, "OEBPS/book.opf": package}
    members |= {f"OEBPS/{name.replace('%20', ' ')}": text for name, text in pages.items()}
    return make_zip(members | (extra or {}))


def entity_bomb() -> bytes:
    """A billion characters in a Word document of a few hundred bytes."""
    entities = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
    text = f'<!DOCTYPE w:document [<!ENTITY e0 "lollollol">{entities}]>'
    body = f"{text}<w:document {WORD}><w:body><w:p><w:r><w:t>&e9;</w:t></w:r></w:p></w:body></w:document>"
    return make_zip({"word/document.xml": body})


def zip_bomb(num_bytes: int) -> bytes:
    """A Word document whose body is small in the file and large when it is unpacked."""
    return make_zip({"word/document.xml": b"<w>" + b" " * num_bytes})
