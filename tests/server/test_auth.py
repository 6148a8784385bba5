"""Who gets in: every route of the router x every way of not having a key, over a real socket."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from kvarn.server.access.auth import CLUSTER_PATHS, METRICS_PATH, PUBLIC_PATHS
from kvarn.server.access.keyfile import draw_key, write_keys
from kvarn.server.app import make_app
from kvarn.server.page.assets import ROOT
from kvarn.server.process.serve import make_state
from kvarn.server.process.settings import ServerConfig
from tests.server.keyed import KeyedServer, chat_body

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("unchanged_keyed")]

REFUSED = {"no key": 401, "bad key": 401, "revoked": 401, "expired": 401, "wrong tier": 403, "key in the URL": 401}


def an_app(**settings: object) -> FastAPI:
    """The application as it is served, without models."""

    async def make() -> FastAPI:
        return make_app(make_state(ServerConfig(**settings)))  # type: ignore[arg-type]

    return asyncio.run(make())


def routes_of(routes: object) -> Iterator[tuple[str, str]]:
    """(method, path) of every route, also of included routers."""
    for route in routes:  # type: ignore[attr-defined]
        if hasattr(route, "original_router"):
            yield from routes_of(route.original_router.routes)
        else:
            for method in sorted(route.methods):
                yield method, re.sub(r"\{[^}]*\}", "x", route.path)


ROUTES = sorted(set(routes_of(an_app().routes)))
OPEN = {*PUBLIC_PATHS, *CLUSTER_PATHS, METRICS_PATH, ROOT}  # tests/page looks at what is below the page
FORBIDDEN = {f"/api/{name}" for name in ("copy", "create", "delete", "push")}  # to everybody: the operator's
FORBIDDEN |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/stored_models"}  # but to keys of admins
FORBIDDEN |= {f"/v1/models/{verb}" for verb in ("pull", "cancel_pull", "load", "unload")}  # likewise
CLOSED = [(method, path) for method, path in ROUTES if path not in OPEN]


@pytest.fixture(scope="module")
def gold(keyed: KeyedServer) -> Iterator[str]:
    """A valid key of a tier that this server does not have, added while it runs."""
    key = keyed.add("gold", "gold")
    time.sleep(1.0)
    yield key
    keyed.remove("gold")


def headers_for(keyed: KeyedServer, case: str, gold: str) -> dict[str, str]:
    key = {
        "bad key": "sk-kvarn-" + "A" * 43,
        "revoked": keyed.keys["revoked"],
        "expired": keyed.keys["expired"],
        "wrong tier": gold,
    }.get(case)
    return {} if key is None else {"authorization": f"Bearer {key}"}


def test_the_router_has_the_routes_this_test_is_about() -> None:
    paths = {path for _, path in ROUTES}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/x", "/tokenize", "/health"} <= paths
    assert paths >= PUBLIC_PATHS
    assert len(CLOSED) >= 12


@pytest.mark.parametrize("case", REFUSED)
def test_no_route_opens_without_a_valid_key(keyed: KeyedServer, gold: str, case: str) -> None:
    wrong = []
    query = {"api_key": keyed.keys["alice"]} if case == "key in the URL" else {}
    with keyed.process.client(headers=headers_for(keyed, case, gold)) as client:
        for method, path in [*CLOSED, ("GET", "/no/such/route"), ("GET", "/health/"), ("POST", "/Health")]:
            response = client.request(method, path, params=query)
            if response.status_code != REFUSED[case] or (method != "HEAD" and not _is_error(response, path)):
                wrong.append((method, path, response.status_code, response.text[:200]))
    assert not wrong


@pytest.mark.parametrize("name", ["key", "token", "api_key", "API_KEY", "access_token", "api%5Fkey", "x-api-key"])
def test_a_key_in_the_url_is_refused_even_beside_a_valid_one(keyed: KeyedServer, name: str) -> None:
    with keyed.client("alice") as client:
        response = client.get(f"/v1/models?{name}={keyed.keys['alice']}")
    assert response.status_code == 401
    assert "revoke" in response.json()["error"]["message"]


def test_a_valid_key_opens_every_route(keyed: KeyedServer) -> None:
    with keyed.client("alice") as client:
        # /v1/live goes on for a minute: tests/page reads it with a key.
        asked = [(method, path) for method, path in CLOSED if path not in FORBIDDEN | {"/v1/live"}]
        answers = [client.request(method, path, json={}).status_code for method, path in asked]
    assert not {401, 403} & set(answers)
    assert 200 in answers


def test_the_public_paths_are_public_and_nothing_else(keyed: KeyedServer) -> None:
    with keyed.client(None) as client:
        assert {path: client.get(path).status_code for path in PUBLIC_PATHS} == dict.fromkeys(PUBLIC_PATHS, 200)
        for path in ("/health/x", "/health//live", "//health", "/health/../v1/models", "/health%2f..%2fv1/models"):
            assert client.get(keyed.url + path).status_code in (400, 401, 404), path
    assert len(PUBLIC_PATHS) <= 5


def test_no_key_of_a_client_opens_what_routers_hear(keyed: KeyedServer) -> None:
    for name in (None, "alice", "boss"):
        with keyed.client(name) as client:
            for path in CLUSTER_PATHS:
                refused = client.get(path, headers={"x-kvarn-cluster": "00" * 16 + ":" + "00" * 16})
                assert refused.status_code == 403
                assert "belongs to no cluster" in refused.json()["error"]["message"]


def test_metrics_are_free_on_this_machine_and_need_a_seeing_tier_through_a_proxy(keyed: KeyedServer) -> None:
    proxied = {"x-forwarded-for": "203.0.113.9"}
    with keyed.client(None) as client:
        assert client.get("/metrics").status_code == 200
        assert client.get("/metrics", headers=proxied).status_code == 401
    with keyed.client("alice") as client:
        assert client.get("/metrics", headers=proxied).status_code == 403
    with keyed.client("boss") as client:
        assert client.get("/metrics", headers=proxied).status_code == 200


def test_a_route_that_somebody_adds_is_closed(tmp_path: Path) -> None:
    key, entry = draw_key("alice", "pro")
    write_keys(tmp_path / "keys.toml", [entry])
    app = an_app(keys=tmp_path / "keys.toml")

    @app.get("/debug/everything")
    def everything() -> str:
        return "secret"

    async def ask(**headers: str) -> httpx.Response:
        app.state.kvarn.lifecycle.phase = "ready"
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get("/debug/everything", headers=headers)

    assert asyncio.run(ask()).status_code == 401
    assert asyncio.run(ask(authorization=f"Bearer {key}")).json() == "secret"


def test_the_anthropic_header_opens_too(keyed: KeyedServer) -> None:
    with keyed.client(None) as client:
        assert client.get("/v1/models", headers={"x-api-key": keyed.keys["alice"]}).status_code == 200


def test_refusals_of_messages_have_the_anthropic_shape(keyed: KeyedServer) -> None:
    with keyed.client(None) as client:
        body = client.post("/v1/messages", json={}).json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "authentication_error"


def test_a_401_says_how_to_authenticate_and_a_403_does_not(keyed: KeyedServer, gold: str) -> None:
    with keyed.client(None) as client:
        assert client.get("/v1/models").headers["www-authenticate"] == "Bearer"
        refused = client.get("/v1/models", headers={"authorization": f"Bearer {gold}"})
    assert "www-authenticate" not in refused.headers


RAW = {
    "no scheme": b"authorization: KEY",
    "tab": b"authorization: Bearer\tKEY",
    "twice": b"authorization: Bearer KEY\r\nauthorization: Bearer KEY",
    "two kinds": b"authorization: Bearer KEY\r\nx-api-key: KEYx",
    "comma": b"authorization: Bearer KEY,Bearer KEY",
    "latin": b"authorization: Bearer KEY\xe9",
    "utf-8": b"authorization: Bearer K\xc3\xa9EY",
    "other header": b"proxy-authorization: Bearer KEY",
    "cookie": b"cookie: authorization=KEY",
}


@pytest.mark.parametrize("case", RAW)
def test_nothing_but_exactly_the_key_opens(keyed: KeyedServer, case: str) -> None:
    line = RAW[case].replace(b"KEY", keyed.keys["alice"].encode())
    assert _ask_raw(keyed, line) == 401


@pytest.mark.parametrize(
    "line", [b"authorization: Bearer KEY\0", b"authorization: Bea\0rer KEY", b"author\0ization: KEY"]
)
def test_a_nul_in_a_header_is_no_key(keyed: KeyedServer, line: bytes) -> None:
    assert _ask_raw(keyed, line.replace(b"KEY", keyed.keys["alice"].encode())) in (400, 401, None)


@pytest.mark.parametrize("line", [b"Authorization: bearer KEY", b"AUTHORIZATION:   BEARER    KEY   ", b"X-Api-Key:KEY"])
def test_case_and_space_around_do_not_matter(keyed: KeyedServer, line: bytes) -> None:
    assert _ask_raw(keyed, line.replace(b"KEY", keyed.keys["alice"].encode())) == 200


@pytest.mark.parametrize("length", [b"content-length: 1000000000", b"transfer-encoding: chunked"])
def test_a_refusal_does_not_wait_for_the_body(keyed: KeyedServer, length: bytes, patience: float) -> None:
    """F5: the headers of a 1 GB upload with a bad key are answered at once, and nothing of it is read."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", keyed.process.port), timeout=30) as connection:
        began = time.monotonic()
        connection.sendall(head + b"authorization: Bearer sk-kvarn-wrong\r\n" + length + b"\r\n\r\n")
        answer = _read_all(connection)
        took_s = time.monotonic() - began
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in answer.lower()
    assert took_s < 0.5 * patience


def test_a_new_key_works_and_a_revoked_one_stops_without_a_restart(keyed: KeyedServer) -> None:
    key = keyed.add("newcomer", "pro")
    with keyed.process.client(headers={"authorization": f"Bearer {key}"}) as client:
        assert _eventually(client, 200)
        keyed.remove("newcomer")
        assert _eventually(client, 401)


def test_keys_are_neither_logged_nor_told(keyed: KeyedServer) -> None:
    wrong = "sk-kvarn-canary-that-nobody-has"
    told = []
    for key in (keyed.keys["alice"], wrong):
        with keyed.process.client(headers={"authorization": f"Bearer {key}"}) as client:
            told += [client.get("/v1/models").text, client.get("/nothing").text]
            told += [client.get(f"/v1/models?api_key={key}").text]
            told += [client.post("/v1/chat/completions", json=chat_body("hi", max_tokens=1)).text]
    with keyed.client(None) as client:
        told.append(client.get("/metrics").text)
    for secret in (*keyed.keys.values(), wrong):
        assert secret not in keyed.process.log
        assert secret not in "".join(told)
    assert '"alice"' in keyed.process.log  # by name it is logged


def _is_error(response: httpx.Response, path: str) -> bool:
    error = response.json().get("error", {})
    if path.startswith("/api/"):
        return isinstance(error, str) and bool(error)
    if path.startswith("/v1/messages"):
        return {"type", "message"} <= error.keys()
    return {"message", "type", "param", "code"} == error.keys() and bool(error["message"])


def _eventually(client: httpx.Client, status: int) -> bool:
    """Within two seconds; one is promised."""
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        if client.get("/v1/models").status_code == status:
            return True
        time.sleep(0.1)
    return False


def _ask_raw(keyed: KeyedServer, line: bytes) -> int | None:
    """The status of GET /v1/models with one more header line; None: the connection was closed without a word."""
    request = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n" + line + b"\r\n\r\n"
    with socket.create_connection(("127.0.0.1", keyed.process.port), timeout=30) as connection:
        connection.sendall(request)
        answer = _read_all(connection)
    if not answer:
        return None
    status = int(answer.split(b" ", 2)[1])
    if status != 200:
        json.loads(answer.partition(b"\r\n\r\n")[2])
    return status


def _read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)
