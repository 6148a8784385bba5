"""What a step gave, gathered on the engine's thread into one message for the client's side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvarn.engine.engine import Engine
from kvarn.engine.process.messages import RequestProgress, StepDone
from kvarn.request import Request
from kvarn.types import TokenEvent


@dataclass(slots=True)
class _Followed:
    """A request that runs or waits, and how much of it was told."""

    request: Request
    num_told: int
    told: RequestProgress | None = None
    is_begun: bool = False  # its first token was told


class StepReport:
    """Follows all live requests. add() and end_step() are for the engine's thread, forget() for any."""

    def __init__(self, engine: Engine, send: Callable[[StepDone], None]) -> None:
        self._engine = engine
        self._send = send
        self._followed: dict[int, _Followed] = {}  # by the request's number
        self._events: list[tuple[int, TokenEvent]] = []
        self._forgotten: deque[int] = deque()

    def follow(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._followed[request.number] = _Followed(request, len(request.prompt_ids))

    def forget(self, requests: Iterable[Request]) -> None:
        """Requests that have failed: nothing more is told of them."""
        self._forgotten.extend(request.number for request in requests)

    def add(self, number: int, event: TokenEvent) -> None:
        """An event of the submission with this number."""
        self._events.append((number, event))

    def end_step(self) -> None:
        """Tell everything since the last step."""
        while self._forgotten:
            self._followed.pop(self._forgotten.popleft(), None)
        numbers: list[int] = []
        token_ids: list[int] = []
        progress: list[RequestProgress] = []
        ended: list[int] = []
        for number, one in self._followed.items():
            ids = one.request.token_ids
            num_new = len(ids) - one.num_told
            if num_new == 1:
                numbers.append(number)
                token_ids.append(ids[-1])
                one.num_told += 1
            elif num_new:
                numbers += [number] * num_new
                token_ids += ids[one.num_told :]
                one.num_told += num_new
            if not one.is_begun and (changed := _progress(one)) is not None:
                progress.append(changed)
            if one.request.finish_reason is not None:
                ended.append(number)
        for number in ended:
            del self._followed[number]
        events, self._events = self._events, []
        self._send(StepDone(numbers, token_ids, progress, events, self._engine.scheduler.num_waiting))


def _progress(one: _Followed) -> RequestProgress | None:
    """How far a request is whose first token was not told yet, if that is news."""
    request = one.request
    now = RequestProgress(
        request.number,
        request.started_at,
        request.num_cached,
        request.num_computed,
        request.first_token_at,
        request.num_first,
    )
    one.is_begun = request.first_token_at is not None
    if now == one.told:
        return None
    one.told = now
    return now
