"""A router that knows only what it sent where, as others do: a tree of texts, and a switch when loads drift apart.

Written for comparison with the rules that SGLang's gateway documents: the longest match if it is half of the prompt,
else the replica that was sent least; the shortest queue for everybody while one replica is far ahead of another.
"""

from __future__ import annotations

from collections import OrderedDict

from kvarn.routing.text_prefix import TextPrefix

MIN_SHARE = 0.5  # of a prompt that must match
MAX_DIFFERENCE, MAX_RATIO = 64, 1.5  # between the most and the least requests under way


class HistoryRouter:
    """The last replica of each text; the oldest texts are forgotten."""

    def __init__(self, num_replicas: int, max_texts: int) -> None:
        self._max_texts = max_texts
        self._texts: OrderedDict[int, int] = OrderedDict()
        self._open = [0] * num_replicas
        self._sent = [0] * num_replicas  # bytes

    def choose(self, prefix: TextPrefix) -> int:
        least, most = min(self._open), max(self._open)
        chosen = self._open.index(least)
        if most - least <= MAX_DIFFERENCE or most <= MAX_RATIO * least:
            chosen = self._matching(prefix)
        self._open[chosen] += 1
        self._sent[chosen] += prefix.num_bytes
        self._remember(prefix, chosen)
        return chosen

    def end(self, replica: int) -> None:
        self._open[replica] -= 1

    def _matching(self, prefix: TextPrefix) -> int:
        for place in range(len(prefix.texts) - 1, -1, -1):
            found = self._texts.get(prefix.texts[place])
            if found is not None:
                is_long = prefix.ends[place] >= MIN_SHARE * prefix.num_bytes
                return found if is_long else self._sent.index(min(self._sent))
        return self._sent.index(min(self._sent))

    def _remember(self, prefix: TextPrefix, replica: int) -> None:
        for text in prefix.texts:
            self._texts[text] = replica
            self._texts.move_to_end(text)
        while len(self._texts) > self._max_texts:
            self._texts.popitem(last=False)
