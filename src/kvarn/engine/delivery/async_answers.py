"""From the engine's thread to the readers in an event loop: answers as they come, or whole.

    engine's thread    appends to request.token_ids; closes request.text before the token that ends the answer
    event loop         when a drain (event_loop_bridge) asks, every answer takes the tokens that are there, as text,
                       unless it is closed: the rest comes with its last event

Knows events; knows nothing of scheduling or HTTP, nor when drains are due.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

from kvarn.decoding.decoder import failed_commit
from kvarn.engine.delivery.event_loop_bridge import EventLoopBridge
from kvarn.engine.handle import OutputCollector
from kvarn.engine.stream import AnswerText
from kvarn.engine.submission import Submission
from kvarn.request import Request
from kvarn.types import Completion, TokenEvent

IndexedEvent = tuple[int, TokenEvent]  # which of the submissions it belongs to
OnArrival = Callable[[int, TokenEvent], bool]  # called in the event loop; False: the event is not kept for readers
Submit = Callable[[Sequence[Submission], Sequence[OutputCollector]], "Future[None]"]


class PolledText:
    """How far one request has been read."""

    __slots__ = ("_decoder", "_num_characters", "_num_read", "_request")

    def __init__(self, request: Request) -> None:
        answer: AnswerText = request.text
        assert answer.reader is not None
        self._request = request
        self._decoder = answer.reader
        self._num_read = len(request.prompt_ids)
        self._num_characters = 0

    def poll(self) -> TokenEvent | None:
        """All that was said since the last time, as one event."""
        request = self._request
        ids = request.token_ids[self._num_read :]
        if not ids or request.text.is_closed:  # asked after the ids were taken: none of them is a stop token then
            return None
        self._num_read += len(ids)
        text = self._decoder.push_all(ids)
        self._num_characters += len(text)
        index = self._num_read - len(request.prompt_ids) - 1
        return TokenEvent(text, ids[-1], index, None, None, None, request.id, request.choice, None, len(ids) - 1)

    def last(self, event: TokenEvent) -> TokenEvent:
        """The last event, which has the whole text, with what is left of it."""
        num_left = len(self._request.token_ids) - self._num_read - (event.token_id is not None)
        return replace(event, text=event.text[self._num_characters :], num_more=max(num_left, 0))


class AsyncAnswers:
    """The answers to submissions sent together, read in one event loop as their events arrive."""

    def __init__(
        self,
        bridge: EventLoopBridge,
        submit: Submit,
        number: int,
        on_arrival: OnArrival | None,
        *,
        polls_tokens: bool = False,
    ) -> None:
        """polls_tokens: an event may tell of several tokens, where the event loop is behind."""
        self.error: BaseException | None = None
        self.num_open = number
        self.collectors: list[OutputCollector] = []
        self._submit = submit
        self._on_arrival = on_arrival
        self._ready: deque[IndexedEvent] = deque()
        self._arrival = asyncio.Event()  # wakes every reader
        self._bridge = bridge
        self._polls_tokens = polls_tokens
        self._texts: dict[str, PolledText] = {}  # by request id
        for index in range(number):
            on_event = None if on_arrival is drop_event else partial(_post_event, bridge, self._add, index)
            collector = OutputCollector(on_event, keeps_events=False, polls_tokens=polls_tokens)
            collector.done.add_done_callback(partial(_post_end, bridge, self._end))
            self.collectors.append(collector)

    async def submit(self, submissions: Sequence[Submission]) -> None:
        """Queue the submissions all together, or raise why none of them is accepted."""
        if self._polls_tokens:
            self._bridge.polling[self] = None
        accepted = self._submit(submissions, self.collectors)
        if not accepted.done():
            told = asyncio.get_running_loop().create_future()
            accepted.add_done_callback(partial(_post_accepted, self._bridge, told))
            try:
                await told
            except asyncio.CancelledError:
                accepted.cancel()
                raise
        accepted.result()

    def __aiter__(self) -> AsyncIterator[IndexedEvent]:
        return self

    async def __anext__(self) -> IndexedEvent:
        await self._arrived()
        return self._ready.popleft()

    async def batches(self) -> AsyncIterator[list[IndexedEvent]]:
        """Events as they arrive, all that are ready at once together."""
        while True:
            try:
                await self._arrived()
            except StopAsyncIteration:
                return
            batch = list(self._ready)
            self._ready.clear()
            yield batch

    async def results(self) -> list[Completion]:
        """Wait for all results, one for each submission."""
        async for _ in self:
            pass
        return [collector.done.result() for collector in self.collectors]

    @property
    def num_unread(self) -> int:
        return len(self._ready)

    def cancel(self) -> None:
        """Ask for the end: what was said so far is the result. Safe on any thread."""
        for collector in self.collectors:
            collector.cancel()

    def release(self) -> None:
        """Cancel what still runs and let go of it: a cycle would keep it in memory until the garbage collector runs."""
        self.cancel()
        self._bridge.polling.pop(self, None)
        self.collectors = []
        self._on_arrival = drop_event

    def fail(self, error: BaseException | None) -> None:
        """End with an error, once the events that are ready have been read."""
        if self.error is None and self.num_open:
            self.error = error
        self.cancel()
        self._arrival.set()

    async def _arrived(self) -> None:
        """Wait until an event is ready; raise the error, or StopAsyncIteration when all is over."""
        if asyncio.get_running_loop() is not self._bridge.loop():
            raise RuntimeError("the answers of one event loop are read in a different event loop")
        while not self._ready:
            if self.error is not None:
                raise self.error
            if self.num_open == 0:
                raise StopAsyncIteration
            self._arrival.clear()
            await self._arrival.wait()

    def poll(self) -> None:
        """Look for new tokens of all answers. Called in the event loop after a step."""
        for index, collector in enumerate(self.collectors):
            for request in collector.requests:
                if request.is_polled and not request.text.is_closed:
                    self._poll(index, request)

    def _poll(self, index: int, request: Request) -> None:
        try:
            event = self._text_of(request).poll()
        except BaseException as error:  # the answers of others are polled through the same bridge
            self.fail(failed_commit(request, "the text of this answer could not be read", error).error)
            return
        if event is not None:
            self._keep(index, event)

    def _text_of(self, request: Request) -> PolledText:
        if request.id not in self._texts:
            self._texts[request.id] = PolledText(request)
        return self._texts[request.id]

    def _add(self, index: int, event: TokenEvent) -> None:
        requests = self.collectors[index].requests if self.collectors else ()
        if event.finish_reason is not None and requests and requests[event.choice].is_polled:
            event = self._text_of(requests[event.choice]).last(event)
        self._keep(index, event)

    def _keep(self, index: int, event: TokenEvent) -> None:
        try:
            is_kept = self._on_arrival is None or self._on_arrival(index, event)
        except Exception as error:  # the events of other answers come through the same bridge
            self.fail(error)
            return
        if is_kept:
            last = self._ready[-1] if self._ready and self._joins_events else None
            if last is None or last[0] != index or not _joined(last[1], event):
                self._ready.append((index, event))
            self._arrival.set()

    @property
    def _joins_events(self) -> bool:
        """Whether an event that was not read yet may tell of a later token too."""
        return self._polls_tokens and (self._bridge.is_behind or bool(self._texts))

    def _end(self, error: BaseException | None) -> None:
        """One of the collectors is settled."""
        self.num_open = max(self.num_open - 1, 0)
        if self.num_open == 0:
            self._bridge.polling.pop(self, None)
        if error is not None:
            self.error = self.error or error
            self.cancel()
        self._arrival.set()


def _joined(event: TokenEvent, later: TokenEvent) -> bool:
    """Make one event of two, if both are text and nothing else."""
    has_more = event.canvas or later.canvas or event.logprob or later.logprob or event.finish_reason
    if has_more or later.finish_reason or event.choice != later.choice or event.token_id is None:
        return False
    event.text += later.text
    event.num_more += 1 + later.num_more
    event.token_id, event.index = later.token_id, later.index
    return True


def drop_event(_: int, __: TokenEvent) -> bool:
    """An OnArrival of readers that want the results alone."""
    return False


def _post_event(bridge: EventLoopBridge, add: Callable[[int, TokenEvent], None], index: int, event: TokenEvent) -> None:
    post = bridge.post if event.finish_reason is None else bridge.post_end
    post(add, index, event)


def _post_accepted(bridge: EventLoopBridge, told: asyncio.Future[None], accepted: Future[None]) -> None:
    with suppress(RuntimeError):  # the event loop is closed: nobody waits
        bridge.post(_tell, bridge, told, accepted)


def _tell(bridge: EventLoopBridge, told: asyncio.Future[None], accepted: Future[None]) -> None:
    if not accepted.cancelled() and accepted.exception() is None:
        bridge.add_arrival()
    if not told.done():  # else whoever waited was cancelled
        told.set_result(None)


def _post_end(bridge: EventLoopBridge, end: Callable[[BaseException | None], None], done: Future[Completion]) -> None:
    with suppress(RuntimeError):  # the event loop is closed: no reader is left
        bridge.post_end(end, done.exception())
