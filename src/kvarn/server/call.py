"""One authenticated request on its way through the server. Whatever it takes it gives back when the response is out."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request
from starlette.responses import Response

from kvarn.errors import CapacityError, RateLimited
from kvarn.server.http.disconnect import while_awaited
from kvarn.server.http.json_body import read_json

if TYPE_CHECKING:
    from kvarn.server.access.keys import Principal
    from kvarn.server.access.limits import Reservation
    from kvarn.server.chat.generation import Generation
    from kvarn.server.models.model_pool import ServedModel
    from kvarn.server.state import ServerState


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Overloaded(CapacityError):
    """No room now, as one caller is told: several may wait for the same, and each has limits of its own."""

    def __init__(self, error: CapacityError, headers: Mapping[str, str]) -> None:
        super().__init__(str(error), retry_after_s=error.retry_after_s)
        self.headers = headers


class Call:
    """What a route needs to know about its caller, and what the caller holds: models in use and a generation."""

    def __init__(self, http: Request) -> None:
        self.http = http
        self.received_at: float = http.scope["kvarn.received_at"]
        self.state: ServerState = http.app.state.kvarn
        self.principal: Principal = http.scope["kvarn.principal"]
        self.id: str = http.scope.get("kvarn.request_id") or new_request_id()
        self.headers: dict[str, str] = {}  # of the response: what is left of each limit
        self.generation: Generation | None = None  # the one that runs, once there is one
        self._reservation: Reservation | None = None
        self._held = AsyncExitStack()

    @property
    def reservation(self) -> Reservation:
        """What a call that counts has taken of its key's limits."""
        assert self._reservation is not None, "this route is not Charged"
        return self._reservation

    def enter(self) -> None:
        """Count as a request of the key, or be refused."""
        with self._telling_refusals():
            self._reservation = self.state.limits.enter(self.principal)
        self.headers.update(self.reservation.headers)

    def reserve(self, num_tokens: int, *, num_answers: int = 1) -> None:
        """Take all that the request may take, or be refused; can be called again for more."""
        with self._telling_refusals():
            self.reservation.grow(num_tokens, num_answers=num_answers)
        self.headers.update(self.reservation.headers)

    async def json(self) -> dict[str, Any]:
        """The body, read and checked within the server's limits."""
        with self.state.lifecycle.ends_at_stop():
            return await read_json(self.http, self.state.config)

    async def use_model(self, name: str) -> ServedModel:
        """A loaded model, which stays loaded until the response is out; ModelNotFound for unknown names."""
        entering = self._held.enter_async_context(self.state.shelf.use(name))
        return await (entering if self.state.shelf.is_loaded(name) else while_awaited(self, entering))

    def reply(self, payload: Mapping[str, Any]) -> Response:
        """A JSON response with the caller's headers."""
        return Response(written(payload), headers=self.headers, media_type="application/json")

    async def reply_beside(self, write: Callable[[], Mapping[str, Any]]) -> Response:
        """The same for an answer that takes long to write, such as one with thousands of logprobs."""
        content = await while_awaited(self, asyncio.to_thread(lambda: written(write(), in_pieces=True)))
        return Response(content, headers=self.headers, media_type="application/json")

    def refused(self, error: CapacityError) -> CapacityError:
        """The refusal with what is left of the caller's limits; one before anything was computed counts for nothing."""
        if self.generation is not None:
            self.generation.close()  # tells how much it took
        if self._reservation is not None and not self._reservation.num_tokens:
            self._reservation.withdraw()
        headers = self.state.limits.headers(self.principal)
        if isinstance(error, RateLimited):
            error.headers = headers
        return Overloaded(error, headers) if type(error) is CapacityError else error

    async def close(self) -> None:
        """End what still runs and give everything back."""
        if self.generation is not None:
            self.generation.close()
            self.generation = None
        if self._reservation is not None:
            self._reservation.settle(0)  # unless somebody has said how much it was
        await self._held.aclose()

    @contextmanager
    def _telling_refusals(self) -> Iterator[None]:
        try:
            yield
        except RateLimited as error:
            self.state.metrics.request_refused(self.principal.tier.name, error.reason)
            raise


def written(payload: Mapping[str, Any], *, in_pieces: bool = False) -> bytes:
    """JSON for any payload: half of a surrogate pair as its escape; null for a number that JSON does not have.

    in_pieces: the fast encoder would keep every other thread waiting until the last byte.
    """
    encode = _encode_in_pieces if in_pieces else _ENCODER.encode
    try:
        text = encode(payload)
    except ValueError:
        text = encode(_with_finite_numbers(payload))
    return text.encode("utf-8", "backslashreplace")  # Python writes such a half as JSON does


def _encode_in_pieces(payload: Any) -> str:
    return "".join(_ENCODER.iterencode(payload))


def _with_finite_numbers(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _with_finite_numbers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_finite_numbers(one) for one in value]
    return value


def new_request_id() -> str:
    """An id nobody can guess: who knows it may look at the request, if it is the same key's."""
    return secrets.token_hex(16)


async def _called(http: Request) -> AsyncIterator[Call]:
    call = Call(http)
    try:
        yield call
    except CapacityError as error:
        raise call.refused(error) from error
    finally:  # FastAPI comes here after the last byte, also when the client went away
        await call.close()


async def _charged(http: Request) -> AsyncIterator[Call]:
    """Before the body is read or a model loaded: whoever comes too often shall not cost the others even that."""
    call = Call(http)
    try:
        call.enter()
        yield call
    except CapacityError as error:
        raise call.refused(error) from error
    finally:
        await call.close()


Called = Annotated[Call, Depends(_called)]  # looks at something
Charged = Annotated[Call, Depends(_charged)]  # has something computed: counts as a request of the key, from the start
