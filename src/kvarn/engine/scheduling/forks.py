"""Choices 1 .. n - 1 of one prompt, until choice 0 has computed it for them. They hold no blocks."""

from __future__ import annotations

from collections.abc import Iterator

from kvarn.request import Request


class ForkGroups:
    """Followers by the request whose prompt they wait for."""

    def __init__(self) -> None:
        self._followers: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._followers.values()))

    def __iter__(self) -> Iterator[Request]:
        return (request for followers in self._followers.values() for request in followers)

    def add(self, leader: Request, follower: Request) -> None:
        follower.fork_of = leader
        self._followers.setdefault(leader.id, []).append(follower)

    def take(self, leader: Request) -> list[Request]:
        """Remove and return all followers of a request."""
        return self._followers.pop(leader.id, [])

    def discard(self, follower: Request) -> bool:
        """Remove one follower; whether it was here."""
        leader = follower.fork_of
        followers = [] if leader is None else self._followers.get(leader.id, [])
        if leader is None or follower not in followers:
            return False
        followers.remove(follower)
        if not followers:
            del self._followers[leader.id]
        return True
