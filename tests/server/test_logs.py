"""Logs: one JSON object per line, enough to follow a request, and nothing of what was said."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvarn.observe.logs import JsonFormatter, RequestLine, with_fields
from tests.server.process import SMOLLM2, ServerProcess, model_path

SECRET = "xyzzy-plugh-canary"  # stands for everything a client says


def _logged(message: str, *args: object, **extra: Any) -> dict[str, Any]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("kvarn.test")
    logger.addHandler(handler)
    logger.error(message, *args, **extra)
    (line,) = stream.getvalue().splitlines()
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def test_a_line_is_one_json_object_whatever_the_message_holds() -> None:
    line = _logged('two\nlines, "quotes" and %s', "\x1b[31m\ud800")
    assert line["message"] == 'two\nlines, "quotes" and \x1b[31m\ud800'
    assert (line["level"], line["logger"]) == ("error", "kvarn.test")
    assert line["time"].endswith("Z")


def test_fields_stand_beside_the_message() -> None:
    assert _logged("draining", extra=with_fields(delay_s=5.0))["delay_s"] == 5.0


def test_an_exception_is_part_of_its_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        line = _logged("it failed", exc_info=True)
    assert line["error"] == "ValueError"
    assert "test_logs.py" in line["trace"]


def test_a_wrong_format_string_does_not_cost_the_line() -> None:
    assert _logged("%d tokens", "many")["message"] == "%d tokens"


def test_a_request_line_has_no_place_for_texts_or_keys() -> None:
    assert set(RequestLine.__slots__) == {
        *("request_id", "method", "path", "status", "duration_s", "first_byte_s", "client"),
        *("model", "key", "tier", "prompt_tokens", "completion_tokens", "cached_tokens", "finish_reason"),
        *("error_code", "error_field"),
    }


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, str]]:
    """A server with one key, and that key."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    command = [sys.executable, "-m", "kvarn.cli.main", "keys", "new", "alice", "--keys", str(file)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    key = made.stdout.split()[-1]
    config = 'log_level = "debug"\n'
    with ServerProcess("--model", model_path(SMOLLM2), "--context", "512", config=config, keys=file) as process:
        yield process, key


def _lines(server: ServerProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log.splitlines()]


def _line_of(server: ServerProcess, request_id: str, timeout_s: float) -> dict[str, Any]:
    """The one line of a request; it is written after the last byte, so it may take a moment."""
    ends_at = time.monotonic() + timeout_s
    while True:
        found = [one for one in _lines(server) if one.get("request_id") == request_id]
        if found or time.monotonic() > ends_at:
            (line,) = found
            return line
        time.sleep(0.02)


@pytest.mark.model
def test_a_request_leaves_one_line_with_id_times_tokens_and_key_name(
    keyed: tuple[ServerProcess, str], patience: float
) -> None:
    server, key = keyed
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": SMOLLM2, "prompt": SECRET, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    with server.client(headers=headers) as http:
        whole = http.post("/v1/completions", json=body)
        streamed = http.post("/v1/completions", json={**body, "stream": True})
    assert (whole.status_code, streamed.status_code) == (200, 200)
    for answer in (whole, streamed):
        line = _line_of(server, answer.headers["x-request-id"], 2.0 * patience)
        assert line["logger"] == "kvarn.access"
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
        assert (line["key"], line["tier"], line["model"]) == ("alice", "free", SMOLLM2)
        assert line["prompt_tokens"] == whole.json()["usage"]["prompt_tokens"]
        assert line["completion_tokens"] == 3
        assert line["finish_reason"] == "length"
        assert 0 < line["first_byte_s"] <= line["duration_s"]


@pytest.mark.model
def test_a_refused_request_leaves_its_code_and_field(keyed: tuple[ServerProcess, str], patience: float) -> None:
    server, key = keyed
    good = {"model": SMOLLM2, "prompt": "hi", "max_tokens": 1}
    cases: dict[str, tuple[dict[str, Any], int, str | None]] = {
        "invalid_value": ({**good, "temperature": -3}, 400, "temperature"),
        "unknown_field": ({**good, SECRET: 3}, 400, None),
        "missing_field": ({"model": SMOLLM2}, 400, "prompt"),
        "context_length_exceeded": ({**good, "max_tokens": 10**6}, 400, "max_tokens"),
        "model_not_found": ({**good, "model": SECRET}, 404, "model"),
    }
    with server.client(headers={"authorization": f"Bearer {key}"}) as http:
        answers = {code: http.post("/v1/completions", json=body) for code, (body, _, _) in cases.items()}
        nowhere, nobody = http.get("/nowhere"), http.get("/v1/models", headers={"authorization": "Bearer x"})
        fine = http.post("/v1/completions", json=good)
    for code, (_, status, field) in cases.items():
        line = _line_of(server, answers[code].headers["x-request-id"], 2.0 * patience)
        assert (line["status"], line["error_code"], line.get("error_field")) == (status, code, field)
        assert answers[code].json()["error"]["code"] == code
    for answer, code in ((nowhere, "not_found"), (nobody, "invalid_api_key")):
        assert _line_of(server, answer.headers["x-request-id"], 2.0 * patience)["error_code"] == code
    assert "error_code" not in _line_of(server, fine.headers["x-request-id"], 2.0 * patience)
    failed = [line for line in _lines(server) if line["logger"] == "kvarn.access" and line["status"] >= 400]
    assert all(line["error_code"] for line in failed)


@pytest.mark.model
def test_nothing_a_client_says_reaches_the_log(keyed: tuple[ServerProcess, str]) -> None:
    server, key = keyed
    with server.client(headers={"authorization": f"Bearer {key}"}) as http:
        statuses = [
            http.post("/v1/completions", json={"model": SMOLLM2, "prompt": SECRET, "max_tokens": 2}).status_code,
            http.post(
                "/v1/chat/completions",
                json={"model": SMOLLM2, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 2},
            ).status_code,
            http.post("/v1/completions", json={"model": SMOLLM2, "prompt": {"a": SECRET}}).status_code,
            http.post("/v1/completions", json={"model": SMOLLM2, "prompt": "x", "stop": [SECRET] * 99}).status_code,
            http.post("/v1/completions", json={SECRET: 1, "model": SMOLLM2, "prompt": "x"}).status_code,
            http.post("/v1/completions", content=f'{{"prompt": "{SECRET}"'.encode()).status_code,
            http.post("/v1/completions", content=SECRET.encode(), headers={"content-type": "text/plain"}).status_code,
            http.post("/v1/completions", json={"model": SMOLLM2, "prompt": SECRET * 5000}).status_code,
            http.get(f"/v1/models?key={SECRET}").status_code,
        ]
        wrong = http.get("/v1/models", headers={"authorization": f"Bearer {SECRET}"}).status_code
        query = http.get(f"/v1/models?api_key={key}").status_code
    assert statuses[:2] == [200, 200]
    assert all(400 <= status < 500 for status in statuses[2:8])
    assert wrong == 401
    assert 400 <= query < 500
    assert len(_lines(server)) >= len(statuses), "every line is JSON, and requests leave lines"
    for secret in (SECRET, key, key[8:]):
        assert secret not in server.log


@pytest.mark.model
def test_health_checks_leave_no_lines(keyed: tuple[ServerProcess, str]) -> None:
    server, _ = keyed
    with server.client() as http:
        assert http.get("/health/live").status_code == 200
    assert not [line for line in _lines(server) if line.get("path", "").startswith("/health")]


@pytest.mark.model
def test_log_stays_quiet_below_its_level(tmp_path: Path) -> None:
    with ServerProcess("--model", model_path(SMOLLM2), "--context", "512", config='log_level = "error"\n') as server:
        with server.client() as http:
            assert http.get("/v1/models").status_code == 200
        assert server.log == ""
