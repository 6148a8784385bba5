"""Waiting requests in order: a binary heap that knows where each request lies. Knows keys, not what they mean.

push, pop, rekey and remove are O(log n); peek and membership are O(1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvarn.request import Request

Key = tuple[float, ...]
KeyOf = Callable[[Request], Key]  # smallest first


class RequestQueue:
    """Each request once, the one with the smallest key on top; equal keys leave in order of submission."""

    def __init__(self, key_of: KeyOf) -> None:
        self._key_of = key_of
        self._heap: list[tuple[Key, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, request: Request) -> bool:
        return request.queue_position is not None

    def __iter__(self) -> Iterator[Request]:
        """All requests, in no particular order."""
        return (request for _, _, request in self._heap)

    def push(self, request: Request) -> None:
        assert request.queue_position is None, f"request {request.id} waits already"
        self._heap.append(self._entry(request))
        self._rise(len(self._heap) - 1)

    def peek(self) -> Request | None:
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        request = self._heap[0][2]
        self.remove(request)
        return request

    def rekey(self, request: Request) -> None:
        """Put a request where its key, which has changed, says."""
        position = request.queue_position
        assert position is not None, f"request {request.id} does not wait"
        self._heap[position] = self._entry(request)
        self._settle(position)

    def remove(self, request: Request) -> None:
        position, request.queue_position = request.queue_position, None
        assert position is not None, f"request {request.id} does not wait"
        last = self._heap.pop()
        if position < len(self._heap):
            self._place(position, last)
            self._settle(position)

    def check(self) -> None:
        """Assert the heap's order and the positions; for tests."""
        for position, entry in enumerate(self._heap):
            assert entry[2].queue_position == position
            assert position == 0 or self._heap[(position - 1) // 2][:2] < entry[:2]

    def _entry(self, request: Request) -> tuple[Key, int, Request]:
        return self._key_of(request), request.number, request

    def _settle(self, position: int) -> None:
        self._sink(self._rise(position))

    def _rise(self, position: int) -> int:
        entry = self._heap[position]
        while position > 0:
            parent = (position - 1) // 2
            if not entry[:2] < self._heap[parent][:2]:
                break
            self._place(position, self._heap[parent])
            position = parent
        self._place(position, entry)
        return position

    def _sink(self, position: int) -> None:
        entry = self._heap[position]
        while (child := self._smaller_child(position)) is not None:
            if not self._heap[child][:2] < entry[:2]:
                break
            self._place(position, self._heap[child])
            position = child
        self._place(position, entry)

    def _smaller_child(self, position: int) -> int | None:
        left, right = 2 * position + 1, 2 * position + 2
        if left >= len(self._heap):
            return None
        if right < len(self._heap) and self._heap[right][:2] < self._heap[left][:2]:
            return right
        return left

    def _place(self, position: int, entry: tuple[Key, int, Request]) -> None:
        self._heap[position] = entry
        entry[2].queue_position = position
