"""Where an answer ends by its lines, as editors ask for: at one that is indented too little, or when time is up.

Pure: reads text as it comes and says how much of it is kept. Knows no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LineLimits:
    """0 turns a limit off."""

    min_indent: int = 0  # spaces and tabs before the text of every line but the first; an empty line has none
    max_ms: int = 0  # then the answer ends with its line


class LineReader:
    """Reads one answer."""

    def __init__(self, limits: LineLimits) -> None:
        self._limits = limits
        self._indent: int | None = None  # of a line whose text has not begun; None: in the first line, or in a text
        self.is_over = False

    def take(self, text: str, elapsed_ms: float) -> str:
        """How much of the next text is kept; elapsed_ms: since the answer's first token."""
        if self.is_over:
            return ""
        kept = self._indented(text) if self._limits.min_indent else text
        if 0 < self._limits.max_ms < elapsed_ms and "\n" in kept:
            self.is_over = True
            return kept[: kept.index("\n") + 1]  # several tokens may come at once
        return kept

    def _indented(self, text: str) -> str:
        for at, character in enumerate(text):
            if self._indent is not None:
                if character in " \t":
                    self._indent += 1
                    continue
                if self._indent < self._limits.min_indent:
                    self.is_over = True
                    return text[:at]
                self._indent = None
            if character == "\n":
                self._indent = 0
        return text
