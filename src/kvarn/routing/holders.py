"""Who has what only some replicas have: adapters by name, what was stored by the tag of who stored it."""

from __future__ import annotations

from collections.abc import Iterable


class Holders:
    """Sets of replicas, as bits, by what they hold."""

    def __init__(self) -> None:
        self._held: dict[int, frozenset[str]] = {}  # by replica
        self._holders: dict[str, int] = {}

    def of(self, what: str) -> int:
        """The replicas that hold it; 0: nobody."""
        return self._holders.get(what, 0)

    def are_same(self, replicas: int) -> bool:
        """Whether each of these holds the same."""
        return all(not one & replicas or not replicas & ~one for one in self._holders.values())

    def set(self, replica: int, held: Iterable[str]) -> None:
        """All that one replica holds."""
        before, now = self._held.get(replica, frozenset()), frozenset(held)
        self._held[replica] = now
        for one in before - now:
            self._holders[one] &= ~(1 << replica)
            if not self._holders[one]:
                del self._holders[one]
        for one in now - before:
            self._holders[one] = self._holders.get(one, 0) | 1 << replica

    def add(self, replica: int, what: str) -> None:
        """One thing more."""
        self.set(replica, {*self._held.get(replica, ()), what})
