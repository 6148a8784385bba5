"""A server whose engine has a process of its own: the same answers, and neither process outlives the other."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chat_model import write_chat_model
from tests.children import child_ids
from tests.server.asking import CHAT, TEXT, chat_body, chunks, joined, text_body
from tests.server.edge_client import until
from tests.server.process import SMOLLM2, ServerProcess, model_path
from tests.server.scraping import read, scrape
from tests.server.sse import events

HOST = "kvarn.engine.process.host"
OWN = {"KVARN_SERVER_ENGINE_OWN_PROCESS": "true"}
LONG = {"max_tokens": 400, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat_body(max_tokens=24)),
    (CHAT, chat_body(max_tokens=12, n=2, temperature=0.9, seed=7, logprobs=True, top_logprobs=2)),
    (CHAT, chat_body(max_tokens=40, stop=[",", "."])),
    (CHAT, chat_body(max_tokens=24, response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}})),
    (CHAT, chat_body("Add 3.", max_tokens=24, tools=[TOOL])),
    (CHAT, chat_body("Add 3.", max_tokens=24, tools=[TOOL], tool_choice="required")),
    (TEXT, text_body(["One, two", "A b c"], max_tokens=9, echo=True, logprobs=1)),
    (TEXT, text_body([400, 500, 600], max_tokens=9, guided_regex="[0-9]{2}-[a-z]+")),
    (TEXT, text_body(max_tokens=3000)),
    (CHAT, chat_body(temperature=-1)),
]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    env = OWN | {"KVARN_HOME": str(tmp_path_factory.mktemp("home")), "KVARN_SERVER_DRAIN_DELAY_S": "0"}
    model = ("--model", model_path(SMOLLM2), "--context", "2048")
    with ServerProcess(*model, env=env, module="tests.server.faulty") as process:
        yield process


@pytest.mark.parametrize("asked", ASKED, ids=range(len(ASKED)))
def test_answers_and_refusals_are_those_of_an_engine_in_the_servers_process(
    server: ServerProcess, own: ServerProcess, asked: tuple[str, dict[str, Any]]
) -> None:
    path, body = asked
    with server.client() as one, own.client() as other:
        assert _told(one.post(path, json=body)) == _told(other.post(path, json=body))


def test_many_streams_at_once_bring_each_the_text_it_has_alone(own: ServerProcess) -> None:
    bodies = [chat_body(f"Count to {number}.", max_tokens=30) for number in range(12)]
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        with own.client() as http:
            found[number] = joined(chunks(http, CHAT, bodies[number]))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with own.client() as http:
        alone = [http.post(CHAT, json=body).json()["choices"][0]["message"]["content"] for body in bodies]
    assert [found[number] for number in range(len(bodies))] == alone


def test_a_client_that_leaves_ends_its_request(own: ServerProcess) -> None:
    with own.client() as http:
        http.post("/fault/slow", params={"seconds": 0.02})
        with http.stream("POST", TEXT, json=text_body(stream=True, **LONG)) as response:
            next(events(response))
            assert _state(http)["running"] == 1
        until(lambda: _state(http)["running"] == 0)
        http.post("/fault/slow", params={"seconds": 0})
        assert _state(http)["blocks_used"] == 0
    assert read(scrape(own), "kvarn_memory_budget_bytes", model_name=SMOLLM2, part="kv") > 0


def test_a_running_request_tells_how_far_it_is_and_can_be_ended(own: ServerProcess) -> None:
    with own.client() as http:
        http.post("/fault/slow", params={"seconds": 0.02})
        with http.stream("POST", TEXT, json=text_body(stream=True, **LONG)) as response:
            told = events(response)
            where = f"/v1/requests/{next(told)['id']}"
            until(lambda: http.get(where).json()["completion_tokens"] > 3)
            state = http.get(where).json()
            assert (state["phase"], state["prompt_tokens_computed"]) == ("decode", state["prompt_tokens"])
            assert http.delete(where).status_code == 200
            *_, last, _ = told
            assert last["choices"][0]["finish_reason"] == "cancelled"
        http.post("/fault/slow", params={"seconds": 0})


def test_a_failing_pass_fails_its_request_alone(own: ServerProcess) -> None:
    with own.client() as http:
        http.post("/fault/raise", params={"count": 2})
        assert http.post(TEXT, json=text_body()).status_code == 500
        assert http.post(TEXT, json=text_body()).status_code == 200


def test_a_signal_drains_and_both_processes_end(own: ServerProcess) -> None:
    (engine,) = child_ids(HOST, own.pid)
    with (
        own.client() as http,
        http.stream("POST", TEXT, json=text_body(stream=True, **LONG | {"max_tokens": 60})) as one,
    ):
        told = events(one)
        next(told)
        own.process.send_signal(signal.SIGTERM)
        *_, last, done = told
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    assert own.process.wait(60) == 0
    until(lambda: not Path(f"/proc/{engine}").exists())


def test_a_killed_engine_is_told_takes_readiness_away_and_ends_the_server(tmp_path: Path, patience: float) -> None:
    path = write_chat_model(tmp_path / "tiny")
    faulty = ServerProcess("--model", path, env=OWN, module="tests.server.faulty", is_patient=False)
    with faulty as server, server.client() as http:
        (engine,) = child_ids(HOST, server.pid)
        http.post("/fault/slow?seconds=0.02")  # or the answer may have ended before its first token is read here
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 1900, "stream": True, "ignore_eos": True}
        with http.stream("POST", TEXT, json=body) as response:
            told = events(response)
            next(told)
            os.kill(engine, signal.SIGKILL)
            rest = list(told)
        assert rest[-2]["error"]["code"] == "internal_error"
        until(lambda: _is_not_ready(http))
        assert server.process.wait(15 * patience) == 1
        assert f"the engine's process {engine} was killed by SIGKILL" in server.log


def test_a_killed_or_stuck_server_leaves_no_engine(tmp_path: Path, patience: float) -> None:
    path = write_chat_model(tmp_path / "tiny")
    with ServerProcess("--model", path, env=OWN, module="tests.server.faulty", is_patient=False) as server:
        (engine,) = child_ids(HOST, server.pid)
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{engine}").exists())
    with ServerProcess("--model", path, env=OWN, module="tests.server.faulty", is_patient=False) as server:
        (engine,) = child_ids(HOST, server.pid)
        with server.client() as http:
            http.post("/fault/python-loop")
        assert server.process.wait(20 * patience) == 1
        until(lambda: not Path(f"/proc/{engine}").exists())


def test_several_models_cannot_have_such_engines(tmp_path: Path) -> None:
    paths = [write_chat_model(tmp_path / name) for name in ("one", "two")]
    models = [part for path in paths for part in ("--model", path)]
    with ServerProcess(*models, env=OWN, waits=False) as server:
        assert server.process.wait(60) == 2
        assert "own_process is true and there are 2 models" in server.log


def _told(response: httpx.Response) -> tuple[int, object]:
    """Status and body, without what differs from request to request."""
    text = response.text
    body = response.json()
    for name in ("id", "created"):
        body.pop(name, None)
    body.get("usage", {}).pop("prompt_tokens_details", None)  # what others asked before it
    for choice in body.get("choices", ()):
        for call in choice.get("message", {}).get("tool_calls") or ():
            call.pop("id")
    return response.status_code, json.dumps(body) if body else text


def _state(http: httpx.Client) -> dict[str, int]:
    state: dict[str, int] = http.get("/fault/state").json()
    return state


def _is_not_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/health/ready").status_code == 503
    except httpx.TransportError:
        return True
