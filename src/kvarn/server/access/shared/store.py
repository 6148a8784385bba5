"""Redis, as far as limits need it: two scripts, each in one round trip, and never longer than a deadline.

The only module that imports redis. Knows bytes and numbers; what they mean is known to account.py and replicas.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from importlib import resources
from typing import Any, Literal

from kvarn.errors import ConfigError

TIMEOUT_S = 0.2  # a healthy Redis answers in less than a millisecond
MAX_CONNECTIONS = 32
SCHEMES = ("redis://", "rediss://", "unix://")
Failure = Literal["unreachable", "timeout", "error", "emptied"]


class StoreAway(Exception):
    """Redis did not answer as it should."""

    def __init__(self, reason: Failure, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RedisStore:
    """One Redis. A call that takes longer than the deadline is given up, and may still be carried out later."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        try:
            from redis.asyncio import BlockingConnectionPool, Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError:
            raise ConfigError(f"{shown_url(url)} needs redis-py; install kvarn[redis]") from None
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                timeout=timeout_s,
                socket_timeout=5 * timeout_s,  # of calls that were given up
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),  # by default redis-py tries for seconds
            )
        except ValueError as error:
            raise ConfigError(f"{shown_url(url)} is no address of a Redis: {error}") from None
        self._timeout_s = timeout_s
        self._client: Any = Redis(connection_pool=pool)
        self._given_up: set[asyncio.Future[Any]] = set()
        self._take, self._beat = (self._client.register_script(_script(name)) for name in ("take", "beat"))

    async def take(self, keys: Sequence[str], arguments: Sequence[str | int]) -> list[Any]:
        """The reply of take.lua, or StoreAway."""
        return await self._within(self._take(keys, arguments))

    async def beat(self, key: str, arguments: Sequence[str | int]) -> list[Any]:
        """The reply of beat.lua, or StoreAway."""
        return await self._within(self._beat([key], arguments))

    async def close(self) -> None:
        """Close the connections."""
        with suppress(Exception):
            await asyncio.wait_for(self._client.aclose(), self._timeout_s)

    async def _within(self, call: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        from redis.exceptions import ConnectionError as Unreachable
        from redis.exceptions import RedisError
        from redis.exceptions import TimeoutError as TooLate

        task = asyncio.ensure_future(call)
        self._given_up.add(task)  # until it has ended, whoever waits
        task.add_done_callback(self._forget)
        done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        if not done:  # of a loop that stood still the answer may be there, unread
            for _ in range(3):
                await asyncio.sleep(0)
        if not task.done():
            raise StoreAway("timeout", f"no answer within {self._timeout_s:g} s")
        try:
            return task.result()
        except (TooLate, TimeoutError) as error:
            raise StoreAway("timeout", f"{type(error).__name__}") from error
        except (Unreachable, OSError) as error:
            raise StoreAway("unreachable", f"{type(error).__name__}: {error}") from error
        except RedisError as error:
            raise StoreAway("error", f"{type(error).__name__}: {error}") from error

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._given_up.discard(task)
        if not task.cancelled():
            task.exception()  # told already


def shown_url(url: str) -> str:
    """The address without the password."""
    scheme, found, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    return f"{scheme}{found}{credentials.partition(':')[0] + ':…' if at else ''}{at}{host}"


def _script(name: str) -> str:
    return resources.files(__package__).joinpath(f"{name}.lua").read_text(encoding="utf-8")
