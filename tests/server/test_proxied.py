"""Behind a reverse proxy on the same machine: a path prefix, and nothing that only this machine may see."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.chat_model import write_chat_model
from tests.server.keyed import KeyedServer, tiny_keyed
from tests.server.process import ServerProcess

MODEL = "tiny.gguf"
HEADERS = (
    "X-Forwarded-For",
    "Forwarded",
    "X-Real-IP",
    "Via",
    "X-Forwarded-Proto",
    "X-Forwarded-Host",
    "True-Client-IP",
)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServer]:
    """With keys, under a prefix."""
    with tiny_keyed(tmp_path_factory.mktemp("closed"), "--root-path", "/llm/kvarn") as server:
        yield server


def test_paths_are_found_with_the_prefix_and_without_it(closed: KeyedServer) -> None:
    with closed.client("boss") as http:
        for prefix in ("", "/llm/kvarn"):
            assert http.get(f"{prefix}/v1/models").status_code == 200
            assert http.get(f"{prefix}/health/live").status_code == 200
        for path in ("/llm/v1/models", "/llm/kvarnx/v1/models", "/llm/kvarn/llm/kvarn/v1/models"):
            assert http.get(path).status_code == 404, path
        document = http.get("/llm/kvarn/openapi.json").json()
    assert document["servers"] == [{"url": "/llm/kvarn"}]
    client = openai.OpenAI(base_url=f"{closed.url}/llm/kvarn/v1", api_key=closed.keys["boss"])
    assert client.completions.create(model=MODEL, prompt="ab", max_tokens=2).choices[0].finish_reason == "length"


def test_the_prefix_opens_nothing(closed: KeyedServer) -> None:
    with closed.client(None) as http:
        assert http.get("/llm/kvarn/health/live").status_code == 200
        closed_paths = ("/v1/models", "/metrics", "/llm/kvarn/health", "/../v1/models", "/health/../v1/models")
        assert {path: http.get(f"/llm/kvarn{path}").status_code for path in closed_paths} == {
            **dict.fromkeys(closed_paths, 401),
            "/../v1/models": 401,  # httpx resolves the dots itself
        }


def test_health_names_no_model_to_strangers(closed: KeyedServer) -> None:
    paths = ("/health", "/health/live", "/health/ready", "/health/startup")
    with closed.client(None) as http:
        told = [http.get(path) for path in paths]
        wrong = http.get("/health/startup", headers={"authorization": "Bearer wrong"})
    assert {one.status_code for one in (*told, wrong)} == {200}
    assert not [one.text for one in (*told, wrong) if MODEL in one.text]
    assert [step["name"] for step in told[-1].json()["steps"]] == ["find", "load"]
    with closed.client("boss") as http:
        steps = http.get("/health/startup").json()["steps"]
    assert [step["name"] for step in steps] == [f"find {MODEL}", f"load {MODEL}"]


def test_metrics_are_closed_where_the_prefix_speaks_of_a_proxy(closed: KeyedServer) -> None:
    with closed.client(None) as stranger, closed.client("boss") as boss:
        assert stranger.get("/metrics").status_code == 401
        assert boss.get("/metrics").status_code == 200


@pytest.mark.parametrize("flags", [("--behind-proxy",), ()])
def test_metrics_are_closed_to_what_a_proxy_passes_on(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with tiny_keyed(tmp_path, *flags) as server, server.client(None) as http:
        assert http.get("/metrics").status_code == (401 if flags else 200)
        assert {name: http.get("/metrics", headers={name: "203.0.113.9"}).status_code for name in HEADERS} == (
            dict.fromkeys(HEADERS, 401)
        )
        assert _status_of_http_1_0(server.process, "/metrics") == 401  # nginx's default, without any header
        assert _status_of_http_1_0(server.process, "/health") == 200


def test_a_server_without_keys_shows_its_names_to_everybody(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / MODEL)
    with ServerProcess("--model", model, "--behind-proxy") as server, server.client() as http:
        assert MODEL in http.get("/health/startup").text
        assert http.get("/metrics").status_code == 200


def _status_of_http_1_0(server: ServerProcess, path: str) -> int:
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        connection.sendall(
            f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n\r\n".encode()
        )
        return int(connection.recv(65536).split()[1])
