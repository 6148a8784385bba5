"""The engine's thread from idling to its end: sleeping, draining, closing, being forgotten."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from kvarn.engine.client import EngineClient
from kvarn.engine.engine import Engine
from kvarn.engine.handle import RequestHandle
from kvarn.errors import CapacityError, RequestError
from tests.submitting import submit_to
from tests.unit.engine.fake import make_engine
from tests.unit.engine.stepping import ENDLESS, GREEDY, Gate, batch_sizes, eventually, slowly


def test_an_idle_engine_waits_for_company_without_spinning() -> None:
    engine = make_engine(max_wait_ms=200)
    client = EngineClient(engine)
    before = time.process_time()
    first = submit_to(client, [1], GREEDY.replace(max_tokens=1))
    second = submit_to(client, [2], GREEDY.replace(max_tokens=1))
    first.result(10), second.result(10)
    assert batch_sizes(engine) == [2]
    assert time.process_time() - before < 0.1
    client.close()


def test_an_idle_runner_sleeps(client: EngineClient) -> None:
    submit_to(client, [1], GREEDY).result(10)
    time.sleep(0.05)
    before = time.process_time(), client.heartbeat
    time.sleep(0.3)
    assert time.process_time() - before[0] < 0.05
    assert client.heartbeat == before[1]
    assert not client.is_stuck(0.1)


def test_idle_memory_goes_back_to_the_system(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    monkeypatch.setattr("kvarn.engine.idle_memory.COMPACT_AFTER_S", 0.05)
    monkeypatch.setattr("kvarn.engine.idle_memory.FORGET_AFTER_S", 0.1)
    monkeypatch.setattr(engine.backend, "return_kv", lambda block_ids, _group: returned.extend(block_ids))
    client = EngineClient(engine)
    handle = submit_to(client, [1] * 50, GREEDY)
    handle.result(10)
    num_blocks = engine.kv.blocks_for(50 + 14)
    assert eventually(lambda: len(set(returned)) >= num_blocks)
    assert len(returned) == len(set(returned))
    client.close()


def test_draining_finishes_what_runs_and_refuses_what_comes(client: EngineClient, engine: Engine) -> None:
    gate = Gate(engine)
    handles = [submit_to(client, [1], GREEDY)]
    assert gate.entered.wait(10)
    drained: list[bool] = []
    draining = threading.Thread(target=lambda: drained.append(client.drain(20)))
    draining.start()
    gate.opened.set()
    draining.join(20)
    assert drained == [True]
    assert len(handles[0].result(0).token_ids) == 15
    with pytest.raises(CapacityError) as refused:
        submit_to(client, [1], GREEDY)
    assert refused.value.retry_after_s > 0


def test_draining_may_time_out(client: EngineClient, engine: Engine) -> None:
    engine.backend.rule = slowly  # type: ignore[attr-defined]
    submit_to(client, [1], GREEDY)
    assert not client.drain(0.01)


def test_a_closed_runner_refuses_and_releases_once(engine: Engine) -> None:
    released: list[int] = []
    client = EngineClient(engine, release=lambda: released.append(1))
    handle = submit_to(client, [1], ENDLESS)
    client.close()
    client.close()
    assert released == [1]
    with pytest.raises(RequestError, match="closed"):
        handle.result(1)
    with pytest.raises(RequestError, match="closed"):
        list(handle)
    for ask in (lambda: submit_to(client, [1], GREEDY), lambda: client.compute(lambda _: 1).result(), client.drain):
        with pytest.raises(RequestError, match="closed"):
            ask()
    assert engine.kv.num_free == engine.kv.num_blocks


def test_a_callback_may_close(engine: Engine) -> None:
    released = threading.Event()
    client = EngineClient(engine, release=released.set)
    handle = submit_to(client, [1], ENDLESS, on_event=lambda _: client.close())
    assert released.wait(10)
    with pytest.raises(RequestError, match="closed"):
        handle.result(1)


def test_a_runner_nobody_refers_to_ends_its_thread(engine: Engine) -> None:
    released = threading.Event()
    client = EngineClient(engine, release=released.set)
    submit_to(client, [1], GREEDY).result(10)
    there = weakref.ref(client)
    del client
    gc.collect()
    assert there() is None
    assert released.wait(10)


def test_the_engine_of_a_dropped_client_is_freed_without_the_garbage_collector() -> None:
    released = threading.Event()
    client = EngineClient(make_engine(), release=released.set)
    submit_to(client, [1], GREEDY).result(10)
    engine = weakref.ref(client.call(lambda engine: engine).result())
    gc.collect()
    gc.disable()
    try:
        del client
        assert released.wait(10)
        assert eventually(lambda: engine() is None)
    finally:
        gc.enable()


def test_a_handle_keeps_its_engine_alive(engine: Engine) -> None:
    handle: RequestHandle = submit_to(EngineClient(engine), [1], GREEDY)
    gc.collect()
    assert len(handle.result(10).token_ids) == 15


def test_a_process_that_forgets_to_close_still_ends() -> None:
    code = (
        "from kvarn.engine.client import EngineClient\n"
        "from kvarn.types import SamplingParams\n"
        "from tests.submitting import submit_to\n"
        "from tests.unit.engine.fake import make_engine\n"
        "client = EngineClient(make_engine())\n"
        "handle = submit_to(client, [1], SamplingParams(max_tokens=190, ignore_eos=True))\n"
        "print(next(handle).index)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
