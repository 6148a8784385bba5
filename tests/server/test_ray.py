"""The server on Ray Serve: two nodes, the plain server's bytes, and ends that reach the engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvarn.server.access.keyfile import draw_key, write_keys
from tests.chat_model import write_chat_model
from tests.server.on_ray import ENVIRONMENT, START_TIMEOUT_S, RayServer, ray_nodes, until
from tests.server.process import ROOT, ServerProcess
from tests.server.routed import CHAT, REPLICA, body, free_port

pytest.importorskip("ray.serve", reason='Ray is not installed; `make .venv/.ray`, or pip install "kvarn[ray]"')

CONTEXT = 32_768  # so many tokens take a while even this model
COMPLETIONS = "/v1/completions"
LONG = {"model": "tiny", "prompt": "once", "stream": True, "max_tokens": 30_000, "ignore_eos": True, "seed": 3}
SETTLE_S = 60.0  # for what takes a moment on a quiet machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_chat_model(folder / "tiny.gguf", **{"llama.context_length": CONTEXT})


@pytest.fixture(scope="module")
def nodes() -> Iterator[str]:
    """The address of a cluster of two nodes with one CPU each."""
    with ray_nodes(2) as (address, _):
        yield address


@pytest.fixture(scope="module")
def key(folder: Path) -> dict[str, str]:
    """The headers of a caller."""
    drawn, entry = draw_key("alice", "enterprise")
    write_keys(folder / "keys.toml", [entry])
    return {"authorization": f"Bearer {drawn}"}


@pytest.fixture(scope="module")
def pair(nodes: str, folder: Path, model: Path, key: dict[str, str]) -> Iterator[RayServer]:
    """Two replicas of a CPU each: one on each node."""
    options = ("--model", f"tiny={model}", "--keys", str(folder / "keys.toml"), "--min-replicas", "2")
    with RayServer(nodes, *options, "--drain-delay", "0.2", "--drain-timeout", "60", folder=folder) as server:
        until(lambda: server.num_usable() == 2, START_TIMEOUT_S)
        yield server


def test_answers_are_those_of_the_plain_server(pair: RayServer, folder: Path, model: Path, key: dict[str, str]) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        (CHAT, body("Tell me something.", seed=7, temperature=0.9, max_tokens=40)),
        (CHAT, body("Tell me something.", temperature=0.0, max_tokens=40, stream=True)),
        (COMPLETIONS, LONG | {"max_tokens": 200, "stream": False}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}),
        (CHAT, body("Hi", nonsense=1)),
        (CHAT, body("Hi") | {"model": "nobody"}),
        ("/v1/nowhere", {}),
    ]
    with ServerProcess("--model", f"tiny={model}", "--threads", "1", keys=folder / "keys.toml") as plain:
        for path, asked in requests:
            told = {"temperature": 0.0} | asked if path == "/v1/messages" else asked
            with plain.client(headers=key) as one, pair.client(headers=key) as other:
                answers = [client.post(path, json=told) for client in (one, other)]
            assert answers[0].status_code == answers[1].status_code
            assert _content(answers[0]) == _content(answers[1]), path
        for url in (plain.url, pair.url):
            assert httpx.post(url + CHAT, json={}, trust_env=False).status_code == 401


def test_conversations_return_to_their_replica_and_both_are_used(pair: RayServer, key: dict[str, str]) -> None:
    seen = set()
    with pair.client(headers=key) as client:
        for number in range(4):
            messages = [{"role": "user", "content": f"{number} " + "a long beginning " * 20}]
            homes, cached = set(), 0
            for turn in range(3):
                answer = client.post(CHAT, json={"model": "tiny", "messages": messages, "max_tokens": 4})
                homes.add(answer.headers[REPLICA])
                cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                text = answer.json()["choices"][0]["message"]["content"] or "-"
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"and {turn}?"}]
                time.sleep(0.3)  # what a replica holds is told a moment later
            assert len(homes) == 1, "a conversation went elsewhere"
            assert cached > 200
            seen |= homes
    assert seen == {"0", "1"}


def test_a_client_that_leaves_ends_its_request_at_the_engine(pair: RayServer, key: dict[str, str]) -> None:
    with pair.client(headers=key) as client, client.stream("POST", COMPLETIONS, json=LONG) as stream:
        next(stream.iter_lines())
        request_id = stream.headers["x-request-id"]
    until(lambda: _engine_line(pair, request_id) is not None, SETTLE_S)
    line = _engine_line(pair, request_id)
    assert line is not None
    assert "finish_reason" not in line
    assert line["completion_tokens"] < LONG["max_tokens"]


def test_a_request_is_cancelled_by_its_id(pair: RayServer, key: dict[str, str]) -> None:
    with pair.client(headers=key) as client, client.stream("POST", COMPLETIONS, json=LONG) as stream:
        lines = stream.iter_lines()
        next(lines)
        with pair.client(headers=key) as other:
            told = other.delete(f"/v1/requests/{stream.headers['x-request-id']}")
        assert told.status_code == 200, told.text
        rest = [line for line in lines if line.startswith("data: {")]
    assert json.loads(rest[-1].removeprefix("data: "))["choices"][0]["finish_reason"] != "length"


def test_streams_come_in_batches_of_tokens(pair: RayServer, key: dict[str, str]) -> None:
    asked = LONG | {"max_tokens": 2_000}
    with pair.client(headers=key) as client, client.stream("POST", COMPLETIONS, json=asked) as stream:
        pieces = [piece.count(b"data: {") for piece in stream.iter_raw()]
    assert sum(pieces) > 10
    assert pieces[0] >= 1
    with pair.client(headers=key) as client:
        whole = client.post(COMPLETIONS, json=asked | {"stream": False}).json()
    assert whole["usage"]["completion_tokens"] == 2_000


def test_the_limits_of_sockets_are_kept(pair: RayServer, key: dict[str, str]) -> None:
    with pair.client(headers=key) as client:
        assert client.get("/v1/models", headers={f"x-{n}": "1" for n in range(200)}).status_code == 431
        assert client.post(CHAT, content=b"[" * (9 << 20)).status_code == 413
        assert client.get("/v1/replica/events").status_code == 404


def test_each_replica_tells_its_own_metrics(pair: RayServer, key: dict[str, str]) -> None:
    with pair.client(headers=key) as client:
        client.post(CHAT, json=body("Hi", max_tokens=2))
        assert "kvarn_router_requests_total" in client.get("/metrics").text
        told = [client.get(f"/metrics/tiny/{number}") for number in range(2)]
        missing = client.get("/metrics/tiny/9")
    assert [one.status_code for one in told] == [200, 200], told[0].text
    assert all("kvarn_num_requests_waiting" in one.text for one in told)
    assert missing.status_code == 404
    assert "tiny/1" in missing.json()["error"]["message"]


def test_a_replica_that_is_killed_is_one_error_and_is_replaced(pair: RayServer, key: dict[str, str]) -> None:
    before = _engine_pids(pair)
    with pair.client(headers=key) as client, client.stream("POST", COMPLETIONS, json=LONG) as stream:
        lines = stream.iter_lines()
        next(lines)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "replica_lost"
    until(lambda: pair.num_usable() == 2, START_TIMEOUT_S)
    with pair.client(headers=key) as client:
        assert client.post(CHAT, json=body("Hi", max_tokens=2)).status_code == 200


def test_a_signal_lets_what_runs_end(pair: RayServer, key: dict[str, str]) -> None:
    """The last test of this deployment."""
    asked = LONG | {"max_tokens": 6_000}
    with pair.client(headers=key) as client, client.stream("POST", COMPLETIONS, json=asked) as stream:
        lines = stream.iter_lines()
        next(lines)
        pair.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert pair.process.wait(START_TIMEOUT_S) == 0


@pytest.mark.long
def test_replicas_follow_a_step_of_load(
    nodes: str, folder: Path, model: Path, record: Callable[[str, dict[str, Any]], object]
) -> None:
    scaling = ("--max-replicas", "2", "--target-tokens", "150", "--upscale-delay", "1", "--downscale-delay", "4")
    with RayServer(nodes, "--model", f"tiny={model}", *scaling, "--drain-delay", "0.2", folder=folder) as server:
        assert server.num_usable() == 1
        statuses: list[int] = []
        is_over, is_quiet = threading.Event(), threading.Event()
        asking = [threading.Thread(target=_ask_until, args=(server, is_over, statuses)) for _ in range(8)]
        single = threading.Thread(target=_ask_until, args=(server, is_quiet, statuses))
        began = time.monotonic()
        for one in (*asking, single):
            one.start()
        until(lambda: server.num_usable() == 2, START_TIMEOUT_S)
        up_s = time.monotonic() - began
        with server.client() as client:
            seen = {client.post(CHAT, json=body(f"{n}", max_tokens=1)).headers[REPLICA] for n in range(12)}
        assert len(seen) == 2
        is_over.set()
        for one in asking:
            one.join()
        began = time.monotonic()
        until(lambda: server.num_usable() == 1, START_TIMEOUT_S)
        down_s = time.monotonic() - began
        is_quiet.set()
        single.join()
        assert set(statuses) == {200}, statuses
        record("ray-autoscaling", {"up_s": round(up_s, 1), "down_s": round(down_s, 1), "requests": len(statuses)})


@pytest.mark.long
def test_a_node_that_is_lost_costs_what_ran_there(folder: Path, model: Path) -> None:
    """The ingress and one replica are on the first node; the other replica on one that comes later, and is lost."""
    with ray_nodes(1) as (address, tell):
        options = ("--model", f"tiny={model}", "--min-replicas", "2", "--drain-delay", "0.2")
        starting = RayServer(address, *options, folder=folder)

        def add_node() -> None:
            until(lambda: '"message": "ready", "address"' in starting.log, START_TIMEOUT_S)
            tell("add")

        adding = threading.Thread(target=add_node)
        (folder / "deploy.log").unlink(missing_ok=True)
        (folder / "deploy.log").touch()
        adding.start()
        begun: list[str] = []
        with starting as server, server.client() as client, ThreadPoolExecutor(4) as threads:
            adding.join()
            until(lambda: server.num_usable() == 2, START_TIMEOUT_S)
            reading = [threads.submit(_read_stream, client, begun) for _ in range(4)]
            until(lambda: len(begun) == 4, SETTLE_S)
            assert set(begun) == {"0", "1"}
            tell("kill")
            until(lambda: server.num_usable() == 1, SETTLE_S)
            answer = client.post(CHAT, json=body("Hi", max_tokens=2))
            assert answer.status_code == 200, answer.text
            ends = [one.result() for one in reading]
        lost = {replica for replica, text in ends if '"code":"replica_lost"' in text}
        assert len(lost) == 1
        assert lost != {answer.headers[REPLICA]}
        for replica, text in ends:
            assert text.count("replica_lost") == (replica in lost)
            assert text.rstrip().endswith("data: [DONE]")


def _read_stream(client: httpx.Client, begun: list[str]) -> tuple[str, str]:
    """Who answers, told when it begins, and all of the answer."""
    with client.stream("POST", COMPLETIONS, json=LONG) as stream:
        begun.append(stream.headers[REPLICA])
        return stream.headers[REPLICA], stream.read().decode()


@pytest.mark.long
def test_several_models_have_replicas_of_their_own(nodes: str, folder: Path, model: Path) -> None:
    second = write_chat_model(folder / "second.gguf")
    models = ("--model", f"tiny={model}", "--model", f"second={second}")
    with (
        RayServer(nodes, *models, "--drain-delay", "0", "--drain-timeout", "0.5", folder=folder) as server,
        server.client() as client,
    ):
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["tiny", "second"]
        assert client.get("/v1/models/second").json()["max_model_len"] == 2048
        for name in ("tiny", "second"):
            assert client.post(CHAT, json=body("Hi", max_tokens=3) | {"model": name}).json()["model"] == name
        unknown = client.post(CHAT, json=body("Hi") | {"model": "nobody"})
        assert unknown.status_code == 404
        assert "second" in unknown.json()["error"]["message"]
        with client.stream("POST", COMPLETIONS, json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)  # the deadline of the drain passes
            rest = [line for line in lines if line.startswith("data: ")]
        assert "error" in json.loads(rest[-2].removeprefix("data: "))
        assert server.process.wait(START_TIMEOUT_S) == 0


@pytest.mark.long
def test_the_example_and_ray_s_own_tools_work(model: Path, tmp_path: Path) -> None:
    code = (ROOT / "examples" / "21_ray.py").read_text(encoding="utf-8").replace('"smollm2"', f'"smollm2={model}"', 1)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("at replica") == 6, done.stdout
    settings = (ROOT / "deploy" / "ray" / "serve.yaml").read_text(encoding="utf-8")
    (tmp_path / "serve.yaml").write_text(
        settings.replace("[smollm2]", f"[tiny={model}]").replace("port: 8000", f"port: {(port := free_port())}")
    )
    with ray_nodes(1) as (address, _), (tmp_path / "log").open("wb") as log:
        served = subprocess.Popen(
            [sys.executable, "-m", "ray.serve.scripts", "run", str(tmp_path / "serve.yaml"), "--address", address],
            stdout=log,
            stderr=log,
            env=os.environ | ENVIRONMENT,
        )
        try:
            until(lambda: _is_ready(f"http://127.0.0.1:{port}"), START_TIMEOUT_S, 0.5)
        finally:
            print((tmp_path / "log").read_text(encoding="utf-8")[-3000:])
            served.terminate()
            served.wait(60.0)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/health", trust_env=False, timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def _ask_until(server: RayServer, is_over: threading.Event, statuses: list[int]) -> None:
    with server.client() as client:
        while not is_over.is_set():
            answer = client.post(COMPLETIONS, json=LONG | {"stream": False, "max_tokens": 500})
            statuses.append(answer.status_code)


def _content(answer: httpx.Response) -> list[Any]:
    """All that is the same in two answers to one request."""
    texts = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith(("data: {", "{"))]
    contents = [json.loads(re.sub(r'"(chatcmpl|cmpl|msg)[-_][0-9a-f]+"', '""', text)) for text in texts]
    for content in contents:
        content.pop("created", None)
        content.pop("request_id", None)
        content.pop("usage", None)  # the plain server has another cache
        for choice in content.get("choices", ()):
            choice.pop("index", None)
    return _joined(contents)


def _joined(contents: list[Any]) -> list[Any]:
    """Deltas of a stream as one text: where events are cut is a matter of time."""
    deltas = [one["choices"][0]["delta"].get("content", "") for one in contents if "delta" in str(one.get("choices"))]
    return ["".join(deltas)] if deltas else contents


def _engine_line(server: RayServer, request_id: str) -> dict[str, Any] | None:
    """What the engine's side logged of a request, once it has ended."""
    for line in server.log.splitlines():
        start = line.find("{")
        if start >= 0 and request_id in line and "engine-" in line[:start] and '"path"' in line:
            found: dict[str, Any] = json.loads(line[start:])
            return found
    return None


def _engine_pids(server: RayServer) -> set[int]:
    return {int(pid) for pid in re.findall(r"engine-0-tiny pid=(\d+)", server.log)}
