"""The sending side of a connection: what is held, and when it goes out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvarn.server.http.traffic import Traffic
from kvarn.server.http.transport import HEAD_WAIT_S, CountingTransport


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[CountingTransport, socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        inner, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        yield CountingTransport(inner, inner.close, Traffic()), theirs
        inner.abort()


def run(part: str) -> None:
    async def played() -> None:
        async with connected() as (sender, theirs):
            sender.hold_head()
            sender.write(b"head ")
            with pytest.raises(BlockingIOError):
                theirs.recv(100)
            assert sender.num_unsent == 5
            assert sender.num_taken == 0
            await PARTS[part](sender, theirs)

    asyncio.run(played())


async def event_follows(sender: CountingTransport, theirs: socket.socket) -> None:
    sender.write(b"event")
    assert theirs.recv(100) == b"head event"
    sender.write(b"next")
    assert theirs.recv(100) == b"next", "only the head is held"


async def nothing_follows(sender: CountingTransport, theirs: socket.socket) -> None:
    await asyncio.sleep(0)
    theirs.setblocking(True)
    assert await asyncio.wait_for(asyncio.to_thread(theirs.recv, 100), 100 * HEAD_WAIT_S) == b"head "
    assert sender.num_unsent == 0


async def it_is_closed(sender: CountingTransport, theirs: socket.socket) -> None:
    sender.close_now()
    assert theirs.recv(100) == b"head "


async def it_is_half_closed(sender: CountingTransport, theirs: socket.socket) -> None:
    sender.half_close()
    assert theirs.recv(100) == b"head "
    assert theirs.recv(100) == b"", "and the end"


PARTS = {one.__name__: one for one in (event_follows, nothing_follows, it_is_closed, it_is_half_closed)}


@pytest.mark.parametrize("part", PARTS)
def test_the_head_of_a_stream_goes_out_with_its_first_event_or_by_itself_when(part: str) -> None:
    run(part)
