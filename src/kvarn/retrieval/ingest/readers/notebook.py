"""Jupyter notebooks (.ipynb) to Markdown: texts as they are, code in fences; outputs are left out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvarn.errors import DocumentError
from kvarn.retrieval.types import MAX_DOCUMENT_CHARS

FENCE = "```"
MAX_LEVEL = 6


def notebook_to_text(data: bytes, source: str, max_chars: int = MAX_DOCUMENT_CHARS) -> str:
    """The cells of a notebook in order."""
    try:
        notebook = json.loads(data.decode("utf-8-sig"))
        cells = list(_cells(notebook))
    except (ValueError, ArithmeticError, RecursionError, TypeError, AttributeError, LookupError) as error:
        reason = " ".join(str(error).split())[:120]
        message = f"is a broken notebook ({type(error).__name__}: {reason}); save it anew"
        raise DocumentError(message, source=source) from None
    if sum(map(len, cells)) > max_chars:
        raise DocumentError(f"has more than {max_chars:,} characters; split it", source=source)
    text = "\n\n".join(cells) + "\n"
    return text.encode("utf-8", "replace").decode()  # JSON may hold lone surrogates


def _cells(notebook: Mapping[str, Any]) -> Iterator[str]:
    worksheets = notebook.get("worksheets") or ()  # format 3
    listed = notebook["cells"] if "cells" in notebook else [cell for one in worksheets for cell in one["cells"]]
    for cell in listed:
        kind, given = cell["cell_type"], cell.get("source", cell.get("input", ""))
        text = (given if isinstance(given, str) else "".join(given)).strip("\n")
        if not text.strip():
            continue
        if kind == "heading":
            yield "#" * min(int(cell.get("level", 1)), MAX_LEVEL) + " " + text
        else:
            yield f"{FENCE}\n{text}\n{FENCE}" if kind == "code" else text
