"""Models of a running server: pulled, loaded and unloaded by admins, with what goes wrong told in numbers."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvarn.server.access.keyfile import draw_key, write_keys
from tests.chat_model import write_chat_model
from tests.page.live_stream import frames
from tests.server.asking import TEXT, answer
from tests.server.edge_client import until
from tests.server.process import ServerProcess
from tests.unit.hub.servers import Site, add_repository, serving
from tests.unit.hub.wheels import random_bytes

PULL, CANCEL, LOAD, UNLOAD = (f"/v1/models/{word}" for word in ("pull", "cancel_pull", "load", "unload"))
STORED = "/v1/stored_models"
TINY, BIG, HUGE, GONE = "hf:org/tiny", "hf:org/big", "hf:org/huge", "hf:org/gone"
SMALL_FILES = ("bash", "-c", 'ulimit -f 2048; exec "$@"', "_")  # 2 MiB a file: writing more fails as on a full disk
BODY = {"prompt": "The mill", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A hub with a model that can be served, one that takes time, and one that claims to be huge."""
    model = write_chat_model(tmp_path_factory.mktemp("hub") / "tiny.gguf").read_bytes()
    with serving(Site()) as running:
        add_repository(running, "org/tiny", {"tiny.gguf": model})
        add_repository(running, "org/big", {"big.gguf": random_bytes(8 << 20)})
        add_repository(running, "org/lines", {"lines.gguf": random_bytes(8 << 20)})
        add_repository(running, "org/huge", {"huge.gguf": random_bytes(2000)})
        for path, body in running.files.items():
            if path.startswith("/api/models/org/huge"):
                running.files[path] = body.replace(b'"size": 2000', b'"size": 90000000000000')
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("admin")


@pytest.fixture(scope="module")
def keys(folder: Path) -> dict[str, str]:
    drawn = {name: draw_key(name, "enterprise", is_admin=name == "root") for name in ("root", "user")}
    write_keys(folder / "keys.toml", [entry for _, entry in drawn.values()])
    return {name: key for name, (key, _) in drawn.items()}


@pytest.fixture(scope="module")
def server(folder: Path, keys: dict[str, str], site: Site) -> Iterator[ServerProcess]:
    first = write_chat_model(folder / "first")
    env = {"HF_ENDPOINT": site.url, "KVARN_HOME": str(folder / "home"), "NO_PROXY": "127.0.0.1", "KVARN_OFFLINE": "0"}
    options = ("--model", first, "--context", "512")
    with ServerProcess(
        *options, config="memory_bytes = 1000000000", keys=folder / "keys.toml", env=env, module="tests.server.faulty"
    ) as process:
        yield process


@pytest.fixture
def admin(server: ServerProcess, keys: dict[str, str]) -> Iterator[httpx.Client]:
    with server.client(headers={"authorization": f"Bearer {keys['root']}"}) as client:
        yield client


def refused(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["message"]


def pull(client: httpx.Client, name: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a pull, whole."""
    with client.stream("POST", PULL, json={"model": name, **fields}) as response:
        assert response.status_code == 200, response.read()
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def ids(client: httpx.Client) -> list[str]:
    return [model["id"] for model in client.get("/v1/models").json()["data"]]


def test_only_admins_change_models(server: ServerProcess, keys: dict[str, str]) -> None:
    with server.client() as nobody:
        assert nobody.post(PULL, json={"model": TINY}).status_code == 401
    with server.client(headers={"authorization": f"Bearer {keys['user']}"}) as user:
        assert user.get(STORED).status_code == 403
        for path in (PULL, CANCEL, LOAD, UNLOAD):
            status, code, message = refused(user.post(path, json={"model": TINY}))
            assert (status, code) == (403, "forbidden")
            assert "admin = true" in message


def test_a_model_is_planned_pulled_loaded_asked_and_unloaded(admin: httpx.Client) -> None:
    plan = admin.post(PULL, json={"model": TINY, "dry_run": True}).json()
    assert (plan["status"], plan["plan"]["fits"]) == ("planned", True)
    assert plan["plan"]["memory_budget_bytes"] == 10**9
    assert 0 < plan["plan"]["download_bytes"] < plan["plan"]["memory_needed_bytes"]
    assert refused(admin.post(LOAD, json={"model": TINY}))[:2] == (404, "model_not_found")
    told = pull(admin, TINY)
    assert told[-1]["status"] == "success"
    assert told[-1]["plan"] == plan["plan"] | {"disk_free_bytes": told[-1]["plan"]["disk_free_bytes"]}
    assert [one["status"] for one in pull(admin, TINY)] == ["success"]  # it is there
    row = next(one for one in admin.get(STORED).json()["data"] if one["name"] == TINY)
    assert (row["id"], row["is_loaded"]) == (None, False)
    dry = admin.post(LOAD, json={"model": TINY, "id": "mine", "dry_run": True}).json()
    assert (dry["id"], dry["is_loaded"], dry["unloads"]) == ("mine", False, [])
    assert ids(admin) == ["first"]
    loaded = admin.post(LOAD, json={"model": TINY, "id": "mine"}).json()
    assert (loaded["is_loaded"], loaded["needed_bytes"]) == (True, dry["needed_bytes"])
    assert ids(admin) == ["first", "mine"]
    texts = {name: answer(admin, TEXT, {"model": name, **BODY})["choices"][0]["text"] for name in ("first", "mine")}
    assert texts["first"] == texts["mine"]  # the same file
    assert [model["id"] for model in next(iter(frames(admin)))["models"]] == ["first", "mine"]
    assert 'model_name="mine"' in admin.get("/metrics").text
    assert admin.post(LOAD, json={"model": TINY}).json()["id"] == "mine"  # one file is loaded once
    assert admin.post(UNLOAD, json={"model": "mine"}).json()["is_loaded"] is False
    assert ids(admin) == ["first"]
    assert refused(admin.post(UNLOAD, json={"model": "mine"}))[:2] == (404, "model_not_found")


def test_names_that_are_no_sources_are_refused(admin: httpx.Client) -> None:
    for name in ("/etc/passwd", "../x.gguf", "first", "nothing", "hf:x", "pypi:"):
        assert refused(admin.post(PULL, json={"model": name}))[:2] == (404, "model_not_found"), name
    status, code, message = refused(admin.post(PULL, json={"model": GONE}))
    assert (status, code) == (404, "model_not_found")
    assert "no repository 'org/gone'" in message
    assert refused(admin.post(PULL, json={"model": TINY, "dryrun": True}))[1] == "unknown_field"
    assert refused(admin.post(LOAD, json={"model": "/etc/passwd"}))[:2] == (404, "model_not_found")
    assert refused(admin.post(CANCEL, json={"model": BIG}))[:2] == (404, "model_not_found")


def test_what_does_not_fit_is_refused_with_the_numbers(admin: httpx.Client) -> None:
    for _ in range(10):  # the second request comes at once: it is none that follows the first one's pull
        status, code, message = refused(admin.post(PULL, json={"model": HUGE}))
        assert (status, code) == (409, "not_servable")
        assert "needs about 99.0 TB of memory, this server has 1.0 GB" in message
        status, code, message = refused(admin.post(PULL, json={"model": HUGE, "force": True}))
        assert (status, code) == (502, "pull_failed")
        assert "needs 90.0 TB of disk" in message
    assert not admin.post(PULL, json={"model": HUGE, "dry_run": True}).json()["plan"]["fits"]


def test_two_pulls_of_one_model_are_one_and_a_cancelled_one_is_continued(
    admin: httpx.Client, site: Site, folder: Path
) -> None:
    site.seconds_per_chunk = 0.02  # 2.5 s in all
    with ThreadPoolExecutor(2) as threads:
        followers = [threads.submit(pull, admin, BIG) for _ in range(2)]
        until(lambda: any(one["done_bytes"] > 1 << 20 for one in admin.get(STORED).json()["pulls"]))
        assert admin.post(CANCEL, json={"model": BIG}).json()["status"] == "downloading"
        ends = [follower.result() for follower in followers]
    assert [end[-1]["status"] for end in ends] == ["cancelled"] * 2
    assert len({one["done_bytes"] for one in ends[0]}) > 2
    site.seconds_per_chunk = 0.0
    path = next(path for path in site.files if path.endswith("big.gguf"))
    assert len(site.asked(path)) == 1
    assert pull(admin, BIG)[-1]["status"] == "success"
    assert site.asked(path)[1]["Range"].startswith("bytes=")
    assert refused(admin.post(LOAD, json={"model": BIG}))[:2] == (409, "not_servable")  # random bytes are no model
    assert ids(admin) == ["first"]


def test_a_model_in_use_is_drained_or_refused(admin: httpx.Client) -> None:
    assert refused(admin.post(UNLOAD, json={"model": "nothing"}))[:2] == (404, "model_not_found")
    admin.post("/fault/slow?seconds=0.02")
    streamed: list[str] = []
    with admin.stream("POST", TEXT, json={"model": "first", **BODY, "max_tokens": 100, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        status, code, message = refused(admin.post(UNLOAD, json={"model": "first"}))
        assert (status, code) == (409, "model_in_use")
        assert "in use, requests: 1" in message
        draining = threading.Thread(
            target=lambda: streamed.append(admin.post(UNLOAD, json={"model": "first", "drain": True}).text)
        )
        draining.start()
        until(lambda: refused(admin.post(UNLOAD, json={"model": "first"}))[2].count("being unloaded") == 1)
        assert refused(admin.post(TEXT, json={"model": "first", **BODY}))[:2] == (429, "overloaded")
        admin.post("/fault/slow?seconds=0")
        assert '"finish_reason":"length"' in "".join(lines)  # it ends as it would have
    draining.join()
    assert json.loads(streamed[0])["is_loaded"] is False
    assert next(one for one in admin.get("/v1/models").json()["data"])["is_loaded"] is False
    answer(admin, TEXT, {"model": "first", **BODY})  # loads it again
    assert next(one for one in admin.get("/v1/models").json()["data"])["is_loaded"] is True


def test_a_full_disk_and_a_restart_in_the_middle(folder: Path, site: Site, tmp_path: Path) -> None:
    first = write_chat_model(tmp_path / "first")
    home = tmp_path / "home"
    env = {"HF_ENDPOINT": site.url, "KVARN_HOME": str(home), "NO_PROXY": "127.0.0.1", "KVARN_OFFLINE": "0"}
    site.seconds_per_chunk = 0.02
    options = ("--model", first, "--context", "512")
    with ServerProcess(*options, env=env) as process, process.client() as http:  # no keys: this machine is the admin
        assert http.post(PULL, json={"model": BIG, "dry_run": True}).json()["plan"]["fits"]
        with http.stream("POST", PULL, json={"model": BIG}) as response:
            for line in response.iter_lines():
                if '"done_bytes":' in line and json.loads(line[6:])["done_bytes"] > 1 << 20:
                    break
            os.kill(process.pid, 9)
    parts = list(home.rglob("*.part"))
    assert len(parts) == 1
    assert parts[0].stat().st_size >= 1 << 20
    site.seconds_per_chunk = 0.0
    with ServerProcess(*options, env=env, prefix=SMALL_FILES) as process, process.client() as http:
        assert http.get(STORED).json()["pulls"] == []
        status, code, message = refused(http.post(PULL, json={"model": BIG, "stream": False}))
        assert (status, code) == (502, "pull_failed")
        assert "disk" in message
        assert not list(home.rglob("*.part"))  # the space is given back
        assert answer(http, TEXT, {"model": "first", **BODY})["usage"]["completion_tokens"] == 8
        assert http.get(STORED).json()["pulls"][0]["status"] == "failed"
    with ServerProcess(*options, env=env) as process, process.client() as http:
        assert pull(http, BIG)[-1]["status"] == "success"


def test_a_model_is_pulled_asked_and_unloaded_as_ollama_does(
    admin: httpx.Client, keys: dict[str, str], server: ServerProcess
) -> None:
    def pulled(name: str) -> list[dict[str, Any]]:
        response = admin.post("/api/pull", json={"model": name})
        assert response.status_code == 200, response.text
        return [json.loads(line) for line in response.text.splitlines()]

    name = "hf.co/org/tiny"
    told = pulled(name)
    assert told[-1] == {"status": "success"}
    assert all("error" not in line for line in told)
    asked = {
        "model": f"{name}:latest",
        "prompt": "The mill",
        "raw": True,
        "stream": False,
        "options": {"num_predict": 4},
    }
    assert admin.post("/api/generate", json=asked).json()["eval_count"] == 4
    assert name in [one["name"] for one in admin.get("/api/tags").json()["models"]]
    assert pulled(name) == [{"status": "success"}]
    gone = admin.post("/api/pull", json={"model": "hf.co/org/gone"})
    assert (gone.status_code, list(gone.json())) == (404, ["error"])
    with server.client(headers={"authorization": f"Bearer {keys['user']}"}) as user:
        assert user.post("/api/pull", json={"model": "hf.co/org/tiny2"}).status_code == 403
        assert user.post("/api/chat", json={"model": name, "keep_alive": 0}).status_code == 403
    unloaded = admin.post("/api/generate", json={"model": name, "keep_alive": 0, "stream": False}).json()
    assert unloaded["done_reason"] == "unload"
    assert name not in ids(admin)


def test_a_long_pull_tells_how_far_it_is_in_ollamas_lines(admin: httpx.Client, site: Site) -> None:
    site.seconds_per_chunk = 0.02
    try:
        with admin.stream("POST", "/api/pull", json={"name": "hf:org/lines"}) as response:
            assert response.headers["content-type"] == "application/x-ndjson"
            told = [json.loads(line) for line in response.iter_lines() if line]
    finally:
        site.seconds_per_chunk = 0.0
    bars = [line for line in told if "completed" in line]
    assert bars[-1]["total"] >= 8 << 20
    assert [line["completed"] for line in bars] == sorted(line["completed"] for line in bars)
    assert "error" in told[-1]  # noise is no model, which is told once it is there
