"""PDF to text, page by page (pypdf). A file that cannot be read is a DocumentError, whatever the parser raises."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvarn.errors import DocumentError
from kvarn.retrieval.extras import require
from kvarn.retrieval.types import MAX_DOCUMENT_CHARS

PAGE_BREAK = "\n\n\f"


@dataclass(frozen=True, slots=True)
class PdfLimits:
    """Limits beyond which a file is refused."""

    max_pages: int = 20_000
    max_chars: int = MAX_DOCUMENT_CHARS


def pdf_to_text(data: bytes, source: str, limits: PdfLimits | None = None) -> str:
    """The text of all pages, with a blank line and a form feed between them: by that chunks know their page."""
    pypdf = require("pypdf")
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # its warnings become our errors
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError("is encrypted; save it without a password first", source=source)
        pages = list(_pages(reader, source, limits or PdfLimits()))
    except DocumentError:
        raise
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # the parser raises anything on a broken file
        reason = " ".join(str(error).split())[:120]
        raise DocumentError(f"is a broken PDF ({type(error).__name__}: {reason}); repair it", source=source) from None
    text = PAGE_BREAK.join(pages)
    if not text.strip():
        raise DocumentError("is a PDF without text, perhaps scanned; run character recognition first", source=source)
    return text.encode("utf-8", "replace").decode()


def _pages(reader: Any, source: str, limits: PdfLimits) -> Iterator[str]:
    num_pages = len(reader.pages)
    if num_pages > limits.max_pages:
        raise DocumentError(f"has {num_pages:,} pages, at most {limits.max_pages:,} are read; split it", source=source)
    num_chars = 0
    for page in reader.pages:
        text = page.extract_text()
        num_chars += len(text)
        if num_chars > limits.max_chars:
            raise DocumentError(f"has more than {limits.max_chars:,} characters; split it", source=source)
        yield text.replace("\f", " ")
