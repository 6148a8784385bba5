"""PDF to text, page by page (pypdf). A file that cannot be read is one sentence, whatever the parser made of it."""

from __future__ import annotations

import io
import logging

from kvarn.errors import DocumentError
from kvarn.retrieval.extras import require

MAX_PAGES = 20_000


def pdf_to_text(data: bytes, source: str) -> str:
    """The text of all pages, with blank lines between them."""
    pypdf = require("pypdf")
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # its complaints come as our errors
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError("is encrypted; save it without a password first", source=source)
        num_pages = len(reader.pages)
        if num_pages > MAX_PAGES:
            raise DocumentError(f"has {num_pages:,} pages, at most {MAX_PAGES:,} are read; split it", source=source)
        pages = [page.extract_text() for page in reader.pages]
    except DocumentError:
        raise
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # the parser raises anything on a broken file
        reason = " ".join(str(error).split())[:120]
        raise DocumentError(f"is a broken PDF ({type(error).__name__}: {reason}); repair it", source=source) from None
    text = "\n\n".join(pages)
    if not text.strip():
        raise DocumentError("is a PDF without text, perhaps scanned; run character recognition first", source=source)
    return text.encode("utf-8", "replace").decode()
