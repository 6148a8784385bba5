"""Cut a long text where no rule of pretokenize.py sees a word on both sides.

The tokenizers package keeps every other thread waiting while it cuts a text into words: two seconds for a megabyte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

PIECE_CHARACTERS = 16384  # some 40 ms
MAX_RUN = 65536  # characters without a place to cut: nobody's prose, and cut anyway

# Before a space between something and a Latin letter, and after a single line break before a letter.
_PLACE = re.compile(r"(?<=\S) (?=[A-Za-z])|(?<=\S\n)(?=[^\W\d_])")


def pieces(text: str, size: int = PIECE_CHARACTERS, max_run: int = MAX_RUN) -> Iterator[str]:
    """The text in pieces of about size characters; their words are the words of the text."""
    start = 0
    while len(text) - start > size:
        found = _PLACE.search(text, start + size, start + max_run)
        cut = start + max_run if found is None else found.start()
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]
