"""Stop strings across token borders: text that might begin one is held back until it is decided."""

from __future__ import annotations


class StopMatcher:
    """Feed text in pieces; what comes out never contains a stop string, however the text was cut."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Text now certain to be wanted. After a match nothing more comes out."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        # The match that ends first wins (then the one that starts first): the same as feeding single characters.
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self.found = min(matches)
            self._held = ""
            return text[:start]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Text held back, once nothing more will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of text that is a proper prefix of stop."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
