"""What runs between Ray and the server, tried without Ray: settings, calls, exchanges, seats, scaling."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from kvarn.errors import ConfigError
from kvarn.routing.cluster_key import ClusterKey
from kvarn.routing.fleet import Fleet
from kvarn.server.process.settings import ServerConfig
from kvarn.server.ray.autoscaling import LoadPolicy
from kvarn.server.ray.calls import CallHead, ReplicaCall
from kvarn.server.ray.exchange import RayExchange, ReplicaGone
from kvarn.server.ray.membership import MembershipWatch, ReplicaSeats
from kvarn.server.ray.settings import RayConfig, ScaleConfig, make_ray_config
from kvarn.server.router import feeds
from kvarn.server.router.exchange import UpstreamFailed, UpstreamRequest, read_all
from tests.server.process import ROOT

REQUEST = UpstreamRequest("POST", b"/a%20b?c=d", [(b"x", b"y")], b"body", ("10.0.0.9", 4))


# Settings


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"uds": "/tmp/a"}, "uds is set"),
        ({"root_path": "/a"}, "root_path is set"),
        ({"batch_dir": "/tmp/a"}, "kvarn batch"),
        ({"lora_dir": "/tmp/a"}, "lora_dir is set"),
        ({"min_replicas": 2}, "max_replicas is 1 and min_replicas 2"),
        ({"max_replicas": 0}, "max_replicas is 0"),
        ({"ingresses": 2, "port": 0}, "port is 0 with 2 ingresses"),
        ({"target_waiting": 0}, "target_waiting is 0"),
        ({"policy": "random"}, "policy is 'random'"),
        ({"max_replica": 2}, "is max_replicas meant?"),
        ({"engine": {"cluster_key": "/tmp/key"}}, "give --cluster-key"),
        ({"cluster_key": "/nowhere/key"}, None),
    ],
)
def test_wrong_settings_are_refused_by_name(values: dict[str, Any], words: str | None) -> None:
    if words is None:
        with pytest.raises(ConfigError, match="cannot be read"):
            make_ray_config(values).secret()
        return
    with pytest.raises(ConfigError) as caught:
        make_ray_config(values)
    assert words in str(caught.value)


def test_each_model_has_its_own_settings_and_adapters_belong_to_the_first() -> None:
    config = RayConfig(ServerConfig(models=("a=x.gguf", "b=y.gguf"), loras=("sql=/l",)), ScaleConfig())
    (first, one), (second, two) = config.models
    assert (first, one.models, one.loras) == ("a", ("a=x.gguf",), ("sql=/l",))
    assert (second, two.models, two.loras) == ("b", ("b=y.gguf",), ())


def test_a_secret_is_drawn_or_read(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("5" * 64 + "\n", encoding="utf-8")
    assert RayConfig(cluster_key=tmp_path / "key").secret() == b"5" * 64
    drawn = RayConfig()
    assert len(drawn.secret()) == 64
    assert drawn.secret() != drawn.secret()


def test_without_ray_the_command_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['ray'] = None; sys.argv = ['kvarn', 'deploy', 'ray'];"
        "from kvarn.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert 'pip install "kvarn[ray]"' in done.stderr
    assert "Traceback" not in done.stderr


# Calls


async def _answered(app: Callable[[Scope, Receive, Send], Any]) -> list[CallHead | bytes]:
    return [part async for part in ReplicaCall(REQUEST).answer(app)]


def test_a_call_brings_the_application_what_a_socket_would() -> None:
    seen: dict[str, Any] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update(scope, body=(await receive())["body"])
        await send({"type": "http.response.start", "status": 201, "headers": [(b"A", b"b")]})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    assert asyncio.run(_answered(app)) == [CallHead(201, [(b"a", b"b")])]
    assert (seen["path"], seen["raw_path"], seen["query_string"]) == ("/a b", b"/a%20b", b"c=d")
    assert (seen["body"], seen["client"]) == (b"body", ("10.0.0.9", 4))
    assert (b"x", b"y") in seen["headers"]


def test_pieces_that_come_fast_are_joined_and_the_first_comes_alone() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(200):
            await send({"type": "http.response.body", "body": b"%d," % number, "more_body": True})
            await asyncio.sleep(0)

    head, first, *rest = asyncio.run(_answered(app))
    assert isinstance(head, CallHead)
    assert isinstance(first, bytes)
    assert first.startswith(b"0,")
    assert b"".join([first, *rest]) == b"".join(b"%d," % number for number in range(200))  # type: ignore[list-item]
    assert len(rest) < 20


def test_a_call_that_is_given_up_is_a_client_that_left() -> None:
    told: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        told.append((await receive())["type"])

    async def run() -> None:
        parts = ReplicaCall(REQUEST).answer(app)
        await anext(parts)
        await anext(parts)
        await parts.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert told == ["http.disconnect"]


def test_what_an_application_raises_breaks_the_answer_off() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(_answered(app))


# Exchanges and seats


class Handle:
    """A deployment handle whose replica sends these parts, or raises them."""

    def __init__(self, *parts: CallHead | bytes | Exception, waits: bool = False) -> None:
        self.answer = SimpleNamespace(remote=self._remote)
        self.asked: list[str] = []
        self.num_cancelled = 0
        self._parts, self._waits = parts, waits

    def _remote(self, request: UpstreamRequest, *, replica: str) -> Any:
        self.asked.append(replica)
        return _Response(self)

    async def parts(self) -> AsyncIterator[CallHead | bytes]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            yield part
        if self._waits:
            await asyncio.Event().wait()


class _Response:
    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __aiter__(self) -> AsyncIterator[CallHead | bytes]:
        return self._handle.parts()

    def cancel(self) -> None:
        self._handle.num_cancelled += 1


HEAD = CallHead(200, [(b"a", b"b")])


def test_an_exchange_reads_head_and_body() -> None:
    async def run() -> tuple[int, bytes]:
        exchange = RayExchange(Handle(HEAD, b"one ", b"two"), "r")
        await exchange.begin(REQUEST)
        return exchange.status, await read_all(exchange, 100)

    assert asyncio.run(run()) == (200, b"one two")


@pytest.mark.parametrize(("error", "is_unreached"), [(ReplicaGone("r"), True), (OSError(), False)])
def test_an_exchange_tells_whether_anything_was_sent(error: Exception, is_unreached: bool) -> None:
    async def run() -> None:
        await RayExchange(Handle(error), "r").begin(REQUEST)

    with pytest.raises(UpstreamFailed) as caught:
        asyncio.run(run())
    assert caught.value.is_unreached is is_unreached


def test_an_exchange_that_is_aborted_cancels_its_call_and_wakes_its_reader() -> None:
    handle = Handle(HEAD, waits=True)

    async def run() -> None:
        exchange = RayExchange(handle, "r")
        await exchange.begin(REQUEST)
        asyncio.get_running_loop().call_later(0.01, exchange.abort, "enough")
        with pytest.raises(UpstreamFailed, match="enough"):
            await exchange.read()
        exchange.abort("again")

    asyncio.run(asyncio.wait_for(run(), 10.0))
    assert handle.num_cancelled == 1


def test_replicas_have_seats_and_feeds_end_with_them() -> None:
    handle = Handle(HEAD, waits=True)

    async def run() -> None:
        seats = ReplicaSeats(handle, 3)
        waiting = asyncio.create_task(seats.seats[0].take(is_new=True))
        with pytest.raises(UpstreamFailed):
            await seats.seats[0].take()
        seats.update(["a", "b"])
        feed, _ = await waiting
        await feed.begin(REQUEST)
        answer, _ = await seats.seats[0].take()
        await answer.begin(REQUEST)
        seats.update(["b", "c", "d", "e"])  # a has left, and there is no seat for e
        assert [seat.replica for seat in seats.seats] == ["c", "b", "d"]
        with pytest.raises(UpstreamFailed):
            await feed.read()
        assert handle.num_cancelled == 1  # the answer that runs goes on
        answer.abort()

    asyncio.run(run())
    assert handle.asked == ["a", "a"]


def test_what_a_silent_replica_has_not_begun_is_given_up() -> None:
    async def run() -> None:
        seats = ReplicaSeats(Handle(waits=True), 1)
        seats.update(["a"])
        exchange, _ = await seats.seats[0].take()
        asyncio.get_running_loop().call_later(0.01, seats.seats[0].give_up_unanswered)
        with pytest.raises(UpstreamFailed, match="silent"):
            await exchange.begin(REQUEST)

    asyncio.run(asyncio.wait_for(run(), 10.0))


def test_answers_of_who_had_the_seat_before_are_not_given_up_with_it() -> None:
    handle = Handle(HEAD, waits=True)

    async def run() -> None:
        seats = ReplicaSeats(handle, 1)
        seats.update(["a"])
        earlier, _ = await seats.seats[0].take()  # which is still to begin when a leaves
        seats.update(["b"])
        seats.seats[0].give_up_unanswered()  # b is silent
        await earlier.begin(REQUEST)
        assert earlier.status == 200
        earlier.abort()

    asyncio.run(asyncio.wait_for(run(), 10.0))
    assert handle.asked == ["a"]


def test_one_feed_that_ends_gives_nothing_up_and_two_silences_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "SILENT_S", 1.0)
    monkeypatch.setattr(feeds, "RETRY_S", 0.05)
    given_up: list[int] = []

    async def run() -> None:
        seats = ReplicaSeats(Handle(waits=True), 1)
        listening = feeds.ReplicaFeeds(Fleet(["a"]), seats.seats, ClusterKey(b"k" * 32), given_up.append)
        listening.start()
        seats.update(["a"])
        await asyncio.sleep(0)
        seats.update(["b"])  # the feed of a breaks off
        await listening.first_tries[0].wait()
        assert given_up == []
        async with asyncio.timeout(20.0):
            while not given_up:
                await asyncio.sleep(0.01)
        listening.close()

    asyncio.run(run())
    assert given_up == [0]


def test_a_watch_tells_its_loop_and_does_not_travel() -> None:
    async def run() -> list[tuple[str, ...]]:
        told: list[Any] = []
        watch = MembershipWatch(asyncio.get_running_loop(), told.append)
        assert pickle.loads(pickle.dumps(watch)) is None
        await asyncio.to_thread(watch, ["a"])
        await asyncio.sleep(0)
        return told

    assert asyncio.run(run()) == [("a",)]


# Scaling


@pytest.mark.parametrize(
    ("waiting", "tokens", "wanted"),
    [((0, 0), (0, 0), 0.0), ((8, 4), (0, 0), 3.0), ((0, 0), (3000, 1000), 4.0), ((8, 8), (1000, 0), 4.0)],
)
def test_the_busier_of_queue_and_tokens_decides(waiting: Any, tokens: Any, wanted: float) -> None:
    told = {"waiting": dict(enumerate(waiting)), "tokens": dict(enumerate(tokens))}
    context = SimpleNamespace(aggregated_metrics=told, target_num_replicas=7)
    assert LoadPolicy(4.0, 1000.0)(context) == (wanted, {})


def test_silence_changes_nothing() -> None:
    assert LoadPolicy(4.0, 1000.0)(SimpleNamespace(aggregated_metrics={}, target_num_replicas=7)) == (7, {})
