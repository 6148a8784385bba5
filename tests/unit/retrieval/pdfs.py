"""PDFs made by hand: good ones and hostile ones."""

from __future__ import annotations

import io
import zlib


def make_pdf(text: str, num_pages: int = 1) -> bytes:
    """A PDF with the same text on every page."""
    return pdf_of(f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode() if text else b"", num_pages=num_pages)


def bomb(num_bytes: int) -> bytes:
    """A page whose content is small in the file and large when it is unpacked."""
    packer = zlib.compressobj(9)
    parts = [packer.compress(b"(a) Tj " * 100_000) for _ in range(num_bytes // 700_000)]
    return pdf_of(b"".join(parts) + packer.flush(), "/Filter /FlateDecode")


def pdf_of(stream: bytes, filters: str = "", num_pages: int = 1) -> bytes:
    """A PDF whose pages all show one content stream."""
    kids = b" ".join([b"3 0 R"] * num_pages)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, num_pages),
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 200] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(stream), filters.encode(), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out = io.BytesIO(b"%PDF-1.4\n")
    out.seek(0, io.SEEK_END)
    places = []
    for number, body in enumerate(objects, 1):
        places.append(out.tell())
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, body))
    start = out.tell()
    out.write(b"xref\n0 6\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % place for place in places))
    out.write(b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % start)
    return out.getvalue()
