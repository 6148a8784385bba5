"""SIGTERM under load: the rules of a graceful end, at two lengths, against real processes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.server.process import SMOLLM2, ServerProcess, model_path
from tests.server.sse import DONE, events

pytestmark = pytest.mark.model

PASS_S = 0.03  # added to every pass of the model, so that a long answer is long on any machine
LONG_TOKENS, SHORT_TOKENS = 900, 6
NUM_CLIENTS = 4
CLOCK_S = 0.05  # between two processes' views of one moment


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request of a client, as it saw it; times in seconds after SIGTERM."""

    sent_s: float
    ended_s: float
    status: int
    headers: httpx.Headers
    last: tuple[Any, ...]  # the body, or the last two events

    @property
    def is_whole(self) -> bool:
        """Whether an answer arrived from the first to the last token."""
        if self.status != 200:
            return False
        body = self.last[0]
        return body["choices"][0]["finish_reason"] in ("length", "stop") and self.last[-1] in (DONE, body)


class Load:
    """Clients that ask again and again until they are refused."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.signalled_at = float("inf")

    def ask(self, max_tokens: int, *, streams: bool, http: httpx.Client | None = None) -> Outcome:
        body = {
            "model": SMOLLM2,
            "prompt": "Once upon a time",
            "max_tokens": max_tokens,
            "stream": streams,
            "ignore_eos": True,
        }
        client = http or self._server.client()
        sent_at = time.monotonic()
        try:
            with client.stream("POST", "/v1/completions", json=body) as response:
                if streams and response.status_code == 200:
                    last = tuple(list(events(response))[-2:])
                else:
                    response.read()
                    last = (response.json(),)
            sent_s, ended_s = sent_at - self.signalled_at, time.monotonic() - self.signalled_at
            return Outcome(sent_s, ended_s, response.status_code, response.headers, last)
        finally:
            if http is None:
                client.close()

    def keep_asking(self, streams: bool) -> list[Outcome]:
        outcomes: list[Outcome] = []
        with self._server.client() as http:
            while not outcomes or outcomes[-1].status == 200:
                outcomes.append(self.ask(SHORT_TOKENS, streams=streams, http=http))
        return outcomes


def _until(is_true: Callable[[], bool], timeout_s: float) -> bool:
    ends_at = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.02)
    return True


def _slow_server(delay_s: float, timeout_s: float) -> ServerProcess:
    drain = ("--drain-delay", str(delay_s), "--drain-timeout", str(timeout_s))
    return ServerProcess("--model", model_path(SMOLLM2), "--context", "1024", *drain, module="tests.server.faulty")


@pytest.mark.parametrize(("delay_s", "timeout_s"), [(2.5, 1.5), (4.0, 3.0)])
def test_sigterm_under_load_loses_no_accepted_request(delay_s: float, timeout_s: float, patience: float) -> None:
    with _slow_server(delay_s, timeout_s) as server, ThreadPoolExecutor(16) as threads, server.client() as probe:
        assert probe.post(f"/fault/slow?seconds={PASS_S}").status_code == 200
        load = Load(server)
        endless = [threads.submit(load.ask, LONG_TOKENS, streams=streams) for streams in (True, False)]
        short = [threads.submit(load.keep_asking, streams=bool(n % 2)) for n in range(NUM_CLIENTS)]
        assert _until(lambda: probe.get("/fault/state").json()["running"] >= 3, 30 * patience)
        time.sleep(0.5)

        load.signalled_at = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert _until(lambda: probe.get("/health/ready").status_code == 503, 1.0 * patience)
        assert probe.get("/health/live").status_code == 200
        assert probe.get("/health/ready").json()["phase"] == "draining"

        time.sleep(max(0.0, load.signalled_at + 1.0 - time.monotonic()))
        later = load.ask(SHORT_TOKENS, streams=True)
        assert later.is_whole, "a request one second after SIGTERM is answered"

        time.sleep(max(0.0, load.signalled_at + delay_s + 0.2 - time.monotonic()))
        refused = load.ask(SHORT_TOKENS, streams=True)
        probed = probe.get("/health/live")
        code = server.process.wait(60 * patience)
        exited_s = time.monotonic() - load.signalled_at
        outcomes = [outcome for client in short for outcome in client.result()]

    assert code == 0
    _check_refusal(refused, delay_s)
    assert probed.status_code == 200
    assert probed.headers["connection"] == "close"
    for outcome in outcomes:
        if outcome.status == 200:
            assert outcome.is_whole, outcome
        else:
            _check_refusal(outcome, delay_s)
    assert sum(outcome.is_whole for outcome in outcomes if outcome.sent_s > 0) >= NUM_CLIENTS
    _check_deadline(endless, delay_s + timeout_s, patience)
    assert delay_s + timeout_s - CLOCK_S <= exited_s < delay_s + timeout_s + 2.0 * patience


def _check_refusal(outcome: Outcome, delay_s: float) -> None:
    assert outcome.status == 503
    assert outcome.ended_s >= delay_s - CLOCK_S, "the delay is not over yet"
    assert outcome.headers["retry-after"] == "1"
    assert outcome.headers["connection"] == "close"
    assert outcome.last[0]["error"]["code"] == "shutting_down"


def _check_deadline(endless: list[Future[Outcome]], deadline_s: float, patience: float) -> None:
    """What cannot finish is told so at the deadline, neither sooner nor much later."""
    stream, whole = (future.result() for future in endless)
    assert stream.status == 200
    error, end = stream.last
    assert error["error"]["code"] == "shutting_down"
    assert end == DONE
    assert whole.status == 503
    assert whole.last[0]["error"]["code"] == "shutting_down"
    assert whole.headers["retry-after"] == "1"
    for outcome in (stream, whole):
        assert deadline_s - CLOCK_S <= outcome.ended_s < deadline_s + 1.0 * patience


def test_an_idle_server_ends_after_the_delay_and_a_busy_one_when_the_last_answer_is_out(patience: float) -> None:
    delay_s = 0.5
    with _slow_server(delay_s, 60.0) as server, ThreadPoolExecutor(2) as threads:
        load = Load(server)
        with server.client() as http:
            http.post(f"/fault/slow?seconds={PASS_S}")
        running = threads.submit(load.ask, 60, streams=False)
        time.sleep(0.5)
        load.signalled_at = time.monotonic()
        code = server.stop(signal.SIGINT, 30 * patience)
        exited_s = time.monotonic() - load.signalled_at
        outcome = running.result()
    assert code == 0
    assert outcome.is_whole
    assert outcome.headers.get("connection") == "close"
    assert exited_s >= delay_s - CLOCK_S
    assert outcome.ended_s <= exited_s < outcome.ended_s + 2.0 * patience


def test_a_second_signal_ends_the_process_at_once(patience: float) -> None:
    with _slow_server(60.0, 60.0) as server, server.client() as probe:
        threading.Thread(target=_ask_in_vain, args=(server,), daemon=True).start()
        assert _until(lambda: probe.get("/fault/state").json()["running"] == 1, 30 * patience)
        server.process.send_signal(signal.SIGTERM)
        assert _until(lambda: probe.get("/health/ready").status_code == 503, 2.0 * patience)
        began = time.monotonic()
        code = server.stop(signal.SIGTERM, 30 * patience)
    assert code == 128 + signal.SIGTERM
    assert time.monotonic() - began < 1.0 * patience


def _ask_in_vain(server: ServerProcess) -> None:
    with pytest.raises(httpx.HTTPError):
        Load(server).ask(LONG_TOKENS, streams=False)
