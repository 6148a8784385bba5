"""One authenticated request on its way through the server. Whatever it takes it gives back when the response is out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from kvarn.cancellation import require_wanted, work_until
from kvarn.errors import AuthError
from kvarn.server.api.field_names import NO_FIELDS, given_fields
from kvarn.server.api.schema import BYTES_PER_TOKEN, COUNTED_BYTES_PER_TOKEN, Body
from kvarn.server.api.validation import parse
from kvarn.server.http.disconnect import Deadline, client_gone
from kvarn.server.http.json_body import Payload, json_response, parse_body, read_body, read_bytes, write_json
from kvarn.server.http.pipeline import GIVEN_FIELDS, LOG_FIELDS, PRINCIPAL, RECEIVED_AT, REQUEST_ID

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from kvarn.server.access.keys import Principal
    from kvarn.server.access.reservation import Reservation
    from kvarn.server.models.model_pool import ModelPool
    from kvarn.server.models.served_model import ServedModel
    from kvarn.server.process.lifecycle import Lifecycle
    from kvarn.server.process.settings import ServerConfig
    from kvarn.server.process.worker_threads import WorkerThreads

B = TypeVar("B", bound=Body)
T = TypeVar("T")
THREAD_BYTES = 128 << 10  # a body of this size is checked in a thread
WARNING = "x-kvarn-warning"  # of a response: what was asked for, and is not as asked


class RequestContext:
    """Who sent the request, until when it may run, and what it holds: models in use, a reservation, a generation."""

    def __init__(
        self,
        http: Request,
        config: ServerConfig,
        lifecycle: Lifecycle,
        *,
        threads: WorkerThreads,
        body_thread: WorkerThreads,
    ) -> None:
        self.id: str = http.scope[REQUEST_ID]
        self.principal: Principal = http.scope[PRINCIPAL]
        self.received_at: float = http.scope[RECEIVED_AT]
        self.deadline = Deadline(self.received_at, config.request_timeout_s)
        self.receive = http.receive
        self.ends_at_stop = lifecycle.ends_at_stop
        self.log_fields: dict[str, Any] = http.scope[LOG_FIELDS]  # of the access log
        self.prefix_marks: tuple[tuple[int, int], ...] = ()  # texts of the prompt, as a router names them
        self.headers: dict[str, str] = {}  # of the response: what is left of each limit
        self.given = NO_FIELDS  # names in the body, one of which an error may speak of
        self.held = AsyncExitStack()  # closed when the response is out
        self._ended: threading.Event | None = None  # made when it is asked for: most requests need no thread
        self._is_over = False
        self._http = http
        self._config = config
        self._threads = threads
        self._body_thread = body_thread
        self._num_body_bytes = 0
        self._reservation: Reservation | None = None

    async def __aenter__(self) -> RequestContext:
        return self

    async def __aexit__(self, *_: object) -> None:
        """FastAPI comes here after the last byte, also when the client has disconnected."""
        self._is_over = True
        if self._ended is not None:
            self._ended.set()
        await self.held.aclose()

    @property
    def ended(self) -> threading.Event:
        """Set when nobody waits for it any more: what threads do for it may stop."""
        if self._ended is None:
            self._ended = threading.Event()
            if self._is_over:
                self._ended.set()
        return self._ended

    def require_admin(self, words: str) -> None:
        """A key with admin = true; where there are no keys, somebody on this machine. words: what is done by those."""
        if not self.principal.is_admin and not (self._config.is_open and self._config.takes_local):
            raise AuthError(f"{words} by keys with admin = true", reason="forbidden")

    @property
    def reservation(self) -> Reservation:
        """What a request that counts has taken of its key's limits."""
        assert self._reservation is not None, "this route is not Charged"
        return self._reservation

    def charge(self, reservation: Reservation) -> None:
        """Count from now on as a request of the key."""
        self._reservation = reservation
        self.held.callback(reservation.settle)
        self.headers.update(reservation.headers)

    async def reserve(self, num_tokens: int, *, num_answers: int = 1, open_ended: Sequence[int] = ()) -> None:
        """Take all that the request may take, or be refused; can be called again for more.

        open_ended: the most tokens of each answer without max_tokens, which takes as many as are to be expected.
        """
        await self.reservation.grow(num_tokens, num_answers=num_answers, open_ended=open_ended)
        self.headers.update(self.reservation.headers)

    async def expect(self, num_bytes: int, bytes_per_token: int = BYTES_PER_TOKEN) -> None:
        """Take what texts of so many bytes cost at least, before they are read: that takes time too."""
        if self._reservation is not None:
            await self._reservation.expect(num_bytes // bytes_per_token, num_bytes // COUNTED_BYTES_PER_TOKEN)
            self.headers.update(self._reservation.headers)

    def use(self, num_tokens: int) -> None:
        """Count what the request has taken instead of what it might have; the headers tell what that leaves."""
        self.reservation.use(num_tokens)
        self.headers.update(self.reservation.headers)

    def withdraw_unused(self) -> None:
        """The request was refused: unless something was computed for it, it counts for nothing."""
        if self._reservation is not None and self._reservation.is_in_vain:
            self._reservation.withdraw()

    async def body(self, model: type[B]) -> B:
        """The body, read within the server's limits and checked."""
        with self.ends_at_stop():
            data = await read_body(self._http, self._config)
        self._num_body_bytes = len(data)
        await self.expect(len(data), model.BYTES_PER_TOKEN)
        return await self.on_body(lambda: self._parsed(model, data))

    async def raw_body(self) -> bytes:
        """The bytes of a body that is no JSON, within the server's limits."""
        with self.ends_at_stop():
            return await read_bytes(self._http, self._config.max_body_bytes)

    async def on_body(self, work: Callable[[], T]) -> T:
        """Work whose time depends on the size of the body: at once if that is small, else in the thread for large ones.

        That thread takes one at a time, paid ones first and keys in turns: Python runs one thread at a time, so that
        more of them would not be faster and would delay every stream.
        """
        if self._num_body_bytes < THREAD_BYTES:
            return work()
        return await self.while_awaited(self._body_thread.run(self.principal.claim, work))

    def _parsed(self, model: type[B], data: bytes) -> B:
        fields = parse_body(data, self._config.max_json_depth, model.MAX_VALUES)
        ignored: list[str] = []
        body = parse(model, fields, is_lenient=self._config.unknown_fields == "ignore", ignored=ignored)
        if ignored:
            self.warn(f"ignored: {', '.join(dict.fromkeys(ignored))}")
        self.given = self._http.scope[GIVEN_FIELDS] = given_fields(body)
        return body

    def warn(self, words: str) -> None:
        """Tell in a header of the response what was not done as asked; only with words of ours."""
        self.headers[WARNING] = "; ".join(filter(None, (self.headers.get(WARNING), words)))

    async def while_awaited(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work; cancelled with ClientGone, DeadlineExceeded or ShuttingDown when nobody waits for it."""
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(client_gone(self.receive))
        try:
            with self.ends_at_stop():
                left_s = max(self.deadline.left_s, 0.0)
                await asyncio.wait({task, gone}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                raise gone.result()
            raise self.deadline.error()
        finally:
            gone.cancel()
            task.cancel()  # without effect on one that is done

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run work in one of the threads that keys share, for as long as the client waits for it."""
        return await self.while_awaited(self._threads.run(self.principal.claim, self.wanted(work)))

    def wanted(self, work: Callable[[], T]) -> Callable[[], T]:
        """Work for a thread, which ends in the middle of a long text when nobody waits for it any more."""
        return work_until(self.ended, work)

    def while_wanted(self, parts: Iterable[T]) -> Iterator[T]:
        """The parts of some work in a thread, up to the moment when nobody waits for it any more."""
        for part in parts:
            require_wanted()
            yield part

    async def use_model(
        self, models: ModelPool, name: str, lora_factors: Mapping[int, float] | None = None
    ) -> ServedModel:
        """A loaded model, which stays loaded until the response is out; ModelNotFound for unknown names.

        lora_factors: of adapters by their ids, in place of the one that the name may stand for.
        """
        entering = self.held.enter_async_context(models.use(name))
        model = await (entering if models.is_loaded(name) else self.while_awaited(entering))
        return model if lora_factors is None else await models.adapters.mixed(models, model, lora_factors)

    def reply(self, payload: Payload) -> Response:
        """A JSON response with the headers of the request's limits."""
        return self.reply_written(write_json(payload))

    def reply_written(self, content: bytes) -> Response:
        """The same for a payload that is JSON already."""
        self._use_nothing_more()
        return json_response(content, self.headers)

    async def reply_from_thread(self, write: Callable[[], Payload]) -> Response:
        """The same for a payload that takes long to write, such as one with thousands of logprobs."""
        return self.reply_written(await self.in_thread(lambda: write_json(write(), in_pieces=True)))

    def _use_nothing_more(self) -> None:
        """Where no tokens are computed, those that were expected are free again."""
        if self._reservation is not None and self._reservation.is_in_vain:
            self.use(0)
