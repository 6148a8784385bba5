"""TLS as clients see it: real certificates of openssl, and curl, httpx and OpenAI's client before a real server."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.chat_model import write_chat_model
from tests.forked import told_by_kvarn
from tests.server.certificates import Pair, make_certificate, needs_openssl
from tests.server.edge_client import until
from tests.server.process import ServerProcess
from tests.server.scraping import read, scrape

pytestmark = needs_openssl
MODEL = "tiny.gguf"
CONFIG = "header_timeout_s = 2\nwrite_timeout_s = 1\nmax_body_bytes = 100000\nmax_buffered_bytes = 65536\n"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model") / MODEL)


@pytest.fixture(scope="module")
def secure(model: Path, pair: Pair) -> Iterator[ServerProcess]:
    with ServerProcess("--model", model, *pair.flags, config=CONFIG) as process:
        yield process


def trusting(pair: Pair) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(pair.cert))


def test_httpx_and_curl_speak_tls_with_the_server(secure: ServerProcess, pair: Pair) -> None:
    assert secure.address == f"https://127.0.0.1:{secure.port}"
    with secure.client(verify=trusting(pair)) as http:
        assert http.get("/v1/models").json()["data"][0]["id"] == MODEL
    with secure.client() as stranger, pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
        stranger.get("/v1/models")
    if shutil.which("curl"):
        words = ["curl", "-sS", "--noproxy", "*", "--cacert", str(pair.cert), f"https://localhost:{secure.port}/health"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(done.stdout)["status"] == "ok"


def test_openais_client_streams_over_tls(secure: ServerProcess, pair: Pair) -> None:
    http = httpx.Client(verify=trusting(pair), trust_env=False)
    client = openai.OpenAI(base_url=f"{secure.url}/v1", api_key="none", http_client=http)
    messages = [{"role": "user", "content": "hi"}]
    stream = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, stream=True)  # type: ignore[call-overload]
    *_, last = stream
    assert last.choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize(("version", "is_spoken"), [("-tls1_1", False), ("-tls1_2", True), ("-tls1_3", True)])
def test_nothing_older_than_tls_1_2_is_spoken(secure: ServerProcess, version: str, is_spoken: bool) -> None:
    words = ["openssl", "s_client", "-connect", f"127.0.0.1:{secure.port}", version, "-cipher", "ALL:@SECLEVEL=0"]
    done = subprocess.run(words, input="", capture_output=True, text=True, timeout=60, check=False)
    assert ("Cipher is (NONE)" not in done.stdout) is is_spoken, done.stdout + done.stderr


def test_who_speaks_plain_http_is_cut_off_and_others_go_on(secure: ServerProcess, pair: Pair) -> None:
    with socket.create_connection(("127.0.0.1", secure.port), 10) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert not plain.recv(4096).startswith(b"HTTP/")
    with secure.client(verify=trusting(pair)) as http:
        assert http.get("/health").status_code == 200


def test_a_refusal_arrives_while_the_client_still_sends(secure: ServerProcess, pair: Pair) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with _connected(secure, pair) as client:
        client.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        answer = b""
        for _ in range(40):
            client.sendall(b"2000\r\n" + b" " * 0x2000 + b"\r\n")
        while part := client.recv(65536):
            answer += part
            if b'"body_too_large"' in answer:
                break
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_handshakes_that_never_end_keep_nobody_out(secure: ServerProcess, pair: Pair) -> None:
    """Connections of two hosts that say nothing: those of each beyond 256 are closed, and a third host is served."""
    silent = []
    try:
        for number in range(600):
            one = socket.socket()
            one.bind((f"127.0.0.{2 + number % 2}", 0))
            one.connect(("127.0.0.1", secure.port))
            silent.append(one)
        with secure.client(verify=trusting(pair)) as http:
            assert http.get("/health/live").status_code == 200
        until(lambda: sum(map(_is_closed, silent)) >= 600 - 2 * 256)
        until(lambda: all(map(_is_closed, silent)))  # after header_timeout_s
    finally:
        for one in silent:
            one.close()


def test_a_client_that_does_not_read_is_dropped(secure: ServerProcess, pair: Pair) -> None:
    def num_dropped() -> float:
        return read(scrape(secure, verify=trusting(pair)), "kvarn_http_connections_dropped_total")

    before = num_dropped()
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.connect(("127.0.0.1", secure.port))
    with trusting(pair).wrap_socket(plain, server_hostname="localhost") as client:
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 16)
        until(lambda: num_dropped() == before + 1)


def test_sighup_takes_a_new_certificate_and_keeps_the_old_one_if_that_is_broken(model: Path, tmp_path: Path) -> None:
    pair = make_certificate(tmp_path, "live")
    with ServerProcess("--model", model, *pair.flags) as server:
        first = _offered(server)
        stays = _connected(server, pair)
        new = make_certificate(tmp_path, "new")
        new.cert.replace(pair.cert)
        server.process.send_signal(signal.SIGHUP)  # the certificate is new, its key is not: refused as a pair
        until(lambda: "was not read again" in server.log)
        assert _offered(server) == first
        new.key.replace(pair.key)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: _offered(server) != first)
        stays.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert stays.recv(4096).startswith(b"HTTP/1.1 200")
        stays.close()
        assert server.stop() == 0


@pytest.mark.parametrize("case", ["no key", "missing", "not PEM", "a password", "another's key"])
def test_files_that_cannot_be_used_are_told_in_one_sentence(tmp_path: Path, model: Path, case: str) -> None:
    pair = make_certificate(tmp_path, password="secret" if case == "a password" else None)
    flags: tuple[str, ...] = pair.flags
    if case == "no key":
        flags = flags[:2]
    elif case == "missing":
        pair.key.unlink()
    elif case == "not PEM":
        pair.cert.write_text("hello")
    elif case == "another's key":
        flags = (*flags[:3], str(make_certificate(tmp_path, "other").key))
    done = told_by_kvarn("serve", "--port", "0", "--model", str(model), *flags)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvarn: tls_")


def test_the_end_does_not_wait_for_clients_that_say_no_goodbye(model: Path, pair: Pair, patience: float) -> None:
    with ServerProcess("--model", model, *pair.flags, "--drain-delay", "0") as server, _connected(server, pair):
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 10 * patience


def _connected(server: ServerProcess, pair: Pair) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", server.port), 30)
    return trusting(pair).wrap_socket(plain, server_hostname="localhost")


def _offered(server: ServerProcess) -> str:
    return ssl.get_server_certificate(("127.0.0.1", server.port), timeout=30)


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
