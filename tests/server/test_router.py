"""A router before real servers: prefixes, streams that pass through, replicas that go, differ or come again."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvarn.server.access.keyfile import draw_key, write_keys
from tests.chat_model import write_chat_model
from tests.server.routed import (
    CHAT,
    REPLICA,
    Cluster,
    RouterProcess,
    body,
    cluster,
    cluster_files,
    converse,
    free_port,
    replica,
)

SETTLE_S = 0.2  # ten times as long as a replica takes to tell what it holds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def keys(folder: Path) -> dict[str, dict[str, str]]:
    """Headers of two tenants."""
    drawn = {name: draw_key(name, "enterprise") for name in ("alice", "bert")}
    write_keys(folder / "keys.toml", [entry for _, entry in drawn.values()])
    return {name: {"authorization": f"Bearer {key}"} for name, (key, _) in drawn.items()}


@pytest.fixture(scope="module")
def pair(folder: Path, keys: dict[str, dict[str, str]]) -> Iterator[Cluster]:
    with cluster(folder, 2, keys=folder / "keys.toml") as both:
        yield both


def test_conversations_find_what_they_computed(
    pair: Cluster, folder: Path, keys: dict[str, dict[str, str]], record: Callable[[str, dict[str, Any]], object]
) -> None:
    urls, alice, figures = [one.url for one in pair.replicas], keys["alice"], dict[str, Any]()
    with pair.replicas[0].client(headers=alice) as client:
        figures["one engine"], figures["prompt tokens"] = converse(client, 8, 6, "alone")
    with pair.router.client(headers=alice) as client:
        figures["prefix"], _ = converse(client, 8, 6, "prefix")
    for policy in ("round_robin", "least_loaded"):
        with RouterProcess(folder / "cluster.key", urls, "--policy", policy) as router:
            router.until_usable(2)
            with router.client(headers=alice) as client:
                figures[policy], _ = converse(client, 8, 6, policy)
    record("router-conversations", figures)
    assert figures["prefix"] >= 0.95 * figures["one engine"], figures
    assert figures["prefix"] > figures["round_robin"], figures


def test_an_answer_is_the_same_through_a_router(pair: Cluster, keys: dict[str, dict[str, str]]) -> None:
    asked = body("Tell me something.", seed=7, temperature=0.9, max_tokens=12)
    with pair.router.client(headers=keys["alice"]) as routed, pair.replicas[0].client(headers=keys["alice"]) as direct:
        texts = [client.post(CHAT, json=asked).json()["choices"] for client in (routed, direct, routed)]
        streams = [_text(client, asked) for client in (routed, direct)]
    assert texts[0] == texts[1] == texts[2]
    assert streams[0] == streams[1] == texts[0][0]["message"]["content"]


def _text(client: httpx.Client, asked: dict[str, Any]) -> str:
    with client.stream("POST", CHAT, json=asked | {"stream": True}) as response:
        data = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for one in data for choice in json.loads(one)["choices"])


def test_refusals_of_a_replica_pass_through(pair: Cluster, keys: dict[str, dict[str, str]]) -> None:
    with pair.router.client(headers=keys["alice"]) as client:
        refused = client.post(CHAT, json=body("hi", model="other"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        broken = client.post(CHAT, content=b"{", headers={"content-type": "application/json"})
        assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_body")
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert client.get("/v1/replica/events").status_code == 404
        assert client.get("/health/other").status_code == 404
        assert "via" not in refused.headers


def test_a_client_that_leaves_ends_the_request_at_the_replica(pair: Cluster, keys: dict[str, dict[str, str]]) -> None:
    asked = body("Go on.", max_tokens=1500, n=5, stream=True, ignore_eos=True)
    with pair.router.client(headers=keys["alice"]) as client, client.stream("POST", CHAT, json=asked) as stream:
        number = int(stream.headers[REPLICA])
        assert stream.status_code == 200, stream.read()
        request_id = stream.headers["x-request-id"]
        lines = stream.iter_lines()
        next(lines)
        found = client.get(f"/v1/requests/chatcmpl-{request_id}")
        assert found.status_code == 200, found.text
    with pair.replicas[number].client(headers=keys["alice"]) as client:
        until = time.monotonic() + 20
        while client.get(f"/v1/requests/{request_id}").status_code == 200:
            assert time.monotonic() < until


def test_another_tenant_finds_nothing(pair: Cluster, keys: dict[str, dict[str, str]]) -> None:
    with pair.router.client() as client:

        def ask(name: str) -> tuple[str, int]:
            answer = client.post(CHAT, json=body("A secret. " * 40), headers=keys[name])
            time.sleep(SETTLE_S)
            return answer.headers[REPLICA], answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        home, _ = ask("alice")
        assert ask("alice") == (home, 400)
        before = pair.router.metric("kvarn_router_prefix_tokens_total")
        assert ask("bert")[1] == 0
        assert pair.router.metric("kvarn_router_prefix_tokens_total") == before
        assert client.post(CHAT, json=body("hi")).status_code == 401


DIALECTS: dict[str, tuple[str, dict[str, Any], Callable[[bytes], bool]]] = {
    "openai": (CHAT, {}, lambda end: end.endswith(b"data: [DONE]\n\n") and b'"code":"replica_lost"' in end),
    "completions": (
        "/v1/completions",
        {"messages": None, "prompt": "Once"},
        lambda end: end.endswith(b"data: [DONE]\n\n") and b'"code":"replica_lost"' in end,
    ),
    "anthropic": ("/v1/messages", {}, lambda end: b'event: error\ndata: {"type":"error"' in end),
    "responses": (
        "/v1/responses",
        {"messages": None, "input": "Once", "max_tokens": None, "max_output_tokens": 1500, "ignore_eos": None},
        lambda end: b'event: error\ndata: {"type": "error", "code": "replica_lost"' in end,
    ),
    "ollama": (
        "/api/chat",
        {"max_tokens": None, "temperature": None, "ignore_eos": None, "options": {"num_predict": 1500}},
        lambda end: json.loads(end.splitlines()[-1]).keys() == {"error"},
    ),
}


def test_a_replica_that_is_killed_ends_its_streams_with_one_error(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as both, both.router.client() as client:
        _kill_in_mid_stream(both, client, "openai")
        assert both.router.metric("kvarn_router_streams_lost_total") == 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["completions", "anthropic", "responses", "ollama"])
def test_streams_of_every_dialect_end_with_its_own_error(tmp_path: Path, name: str) -> None:
    with cluster(tmp_path, 1) as one, one.router.client() as client:
        _kill_in_mid_stream(one, client, name)


def _kill_in_mid_stream(trio: Cluster, client: httpx.Client, name: str) -> None:
    path, fields, is_right = DIALECTS[name]
    asked = body("Go on, please. " * 20, max_tokens=1500, stream=True, ignore_eos=True) | fields
    if name == "anthropic":
        del asked["ignore_eos"]
    asked = {field: value for field, value in asked.items() if value is not None}
    with client.stream("POST", path, json=asked) as stream:
        assert stream.status_code == 200, stream.read()
        number, parts = int(stream.headers[REPLICA]), stream.iter_raw()
        read = next(parts)
        trio.replicas[number].process.send_signal(signal.SIGKILL)
        read += b"".join(parts)
    assert is_right(read), read[-600:]
    assert read.count(b"replica that answered is gone") == 1
    if len(trio.replicas) > 1:
        again = client.post(CHAT, json=body("Go on, please. " * 20))  # the next turn
        assert again.status_code == 200
        assert again.headers[REPLICA] != str(number)


def test_a_rolling_restart_fails_no_request(tmp_path: Path, size: Callable[[int, int], int]) -> None:
    model, key = cluster_files(tmp_path)
    ports = [free_port() for _ in range(2)]
    args = ("--drain-delay", "1", "--drain-timeout", "20")
    servers = [replica(model, key, "--port", str(port), *args) for port in ports]
    for one in servers:
        one.start()
    statuses: list[int | str] = []
    is_over = threading.Event()
    try:
        with RouterProcess(key, [f"http://127.0.0.1:{port}" for port in ports]) as router:
            router.until_usable(2)
            askers = [threading.Thread(target=_ask_until, args=(router, statuses, is_over)) for _ in range(4)]
            for asker in askers:
                asker.start()
            for number in list(range(2)) * size(1, 3):
                assert servers[number].stop() == 0
                servers[number] = replica(model, key, "--port", str(ports[number]), *args)
                servers[number].start()
                router.until_usable(2)
            is_over.set()
            for asker in askers:
                asker.join()
    finally:
        is_over.set()
        for one in servers:
            one.__exit__(None, None, None)
    assert len(statuses) > 20
    assert set(statuses) == {200}, statuses


def _ask_until(router: RouterProcess, statuses: list[int | str], is_over: threading.Event) -> None:
    """Statuses, and the ends of streams that are not whole."""
    with router.client() as client:
        for number in range(100_000):
            if is_over.is_set():
                return
            try:
                asked = body(f"Question {number}. " * 8, max_tokens=16, stream=number % 2 == 0)
                answer = client.post(CHAT, json=asked)
                is_whole = number % 2 or (answer.text.rstrip().endswith("[DONE]") and '"error"' not in answer.text)
                statuses.append(answer.status_code if is_whole else answer.text[-300:])
            except httpx.HTTPError:
                statuses.append(0)


def test_replicas_that_differ_are_refused_with_the_difference(
    pair: Cluster, folder: Path, keys: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    other = write_chat_model(tmp_path / "other.gguf", **{"general.name": "another"})
    key, second_key, alice = folder / "cluster.key", tmp_path / "second.key", keys["alice"]
    second_key.write_text("6" * 64, encoding="utf-8")
    with replica(other, key) as differs, RouterProcess(key, [pair.replicas[0].url, differs.url]) as router:
        assert " 1 of 2 replicas" in router.line
        with router.client(headers=alice) as client:
            assert {client.post(CHAT, json=body("hi")).headers[REPLICA] for _ in range(3)} == {"0"}
        assert "it differs from" in router.log
        assert "digest of tiny" in router.log
    with RouterProcess(second_key, [pair.replicas[0].url]) as router:
        assert " 0 of 1 replicas" in router.line
        assert "no proof of this server's cluster key" in router.log


def test_a_router_without_replicas_says_so_in_the_dialect(tmp_path: Path) -> None:
    _, key = cluster_files(tmp_path)
    with RouterProcess(key, [f"http://127.0.0.1:{free_port()}"], "--drain-delay", "0") as router:
        with router.client() as client:
            refused = client.post(CHAT, json=body("hi"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
            assert refused.headers["retry-after"] == "1"
            other = client.post("/v1/messages", json=body("hi"))
            assert other.json()["error"]["type"] == "overloaded_error"
            assert client.get("/health").status_code == 503
            assert client.get("/health/live").status_code == 200
        router.process.send_signal(signal.SIGTERM)
        assert router.process.wait(20) == 0
