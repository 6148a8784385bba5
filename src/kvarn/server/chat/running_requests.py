"""The requests that run now, by id: so that they can be looked at, cancelled, and ended when the server must stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarn.server.failures import UnknownRequest

if TYPE_CHECKING:
    from kvarn.server.access.keys import Principal
    from kvarn.server.chat.generation import Generation

PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")  # of ids in answers; what follows is the request's id


class RunningRequests:
    """For one thread: the event loop's."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], Generation] = {}  # by key and id

    def __len__(self) -> int:
        return len(self._running)

    def add(self, generation: Generation) -> None:
        """Take a generation in; of two with the same id the later one is found."""
        self._running[_key(generation)] = generation

    def remove(self, generation: Generation) -> None:
        if self._running.get(_key(generation)) is generation:
            del self._running[_key(generation)]

    def find(self, principal: Principal, request_id: str) -> Generation:
        """The running generation with this id, if it is the caller's own."""
        for prefix in PREFIXES:
            request_id = request_id.removeprefix(prefix)
        generation = self._running.get((principal.key_id, request_id))
        if generation is None:
            raise UnknownRequest("no request with this id is running; it may have ended")
        return generation

    def fail_all(self, error: Exception) -> int:
        """End everything that runs with an error: streams tell it in their last event. Returns how many there were."""
        running = list(self._running.values())
        for generation in running:
            generation.fail(error)
        return len(running)


def _key(generation: Generation) -> tuple[str, str]:
    return generation.call.principal.key_id, generation.call.id
