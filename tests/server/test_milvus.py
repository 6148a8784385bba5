"""Collections on a Milvus behind two real servers: one's documents are the other's, and chats go on without it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvarn.cli.main import app
from kvarn.server.access.keyfile import draw_key, write_keys
from tests.server.asking import CHAT, answer, chat_body, refusal
from tests.server.process import MINILM, SMOLLM2, ServerProcess, model_path

pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")
from tests.unit.retrieval.milvus_server import MilvusServer

pytestmark = pytest.mark.model
THINGS = "/v1/collections/things"
SEARCH = f"{THINGS}/search"
DOCUMENTS = [
    {"id": "mill", "text": "A mill grinds grain into flour with two heavy stones.", "metadata": {"topic": "food"}},
    {"id": "stars", "text": "Astronomers count stars with large telescopes.", "metadata": {"topic": "sky"}},
]
CONFIG = "[tiers.few_bytes]\nstorage_bytes = 600000\n"


@pytest.fixture(scope="module")
def milvus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusServer]:
    with MilvusServer(tmp_path_factory.mktemp("milvus")) as one:
        yield one


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Keys by name, and the path of their file."""
    drawn = {name: draw_key(name, tier) for name, tier in (("alice", "pro"), ("bert", "pro"), ("cora", "few_bytes"))}
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    write_keys(file, [entry for _, entry in drawn.values()])
    return {name: key for name, (key, _) in drawn.items()} | {"file": str(file)}


@pytest.fixture(scope="module")
def replicas(
    milvus: MilvusServer, keys: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two servers that share nothing but the keys and the Milvus."""
    options = ("--model", model_path(SMOLLM2), "--model", model_path(MINILM), "--context", "1024")
    homes = [{"KVARN_HOME": str(tmp_path_factory.mktemp("home"))} for _ in range(2)]
    first, second = (
        ServerProcess(*options, "--milvus-uri", milvus.uri, config=CONFIG, keys=keys["file"], env=env) for env in homes
    )
    with first, second:
        yield first, second


@pytest.fixture
def clients(
    replicas: tuple[ServerProcess, ServerProcess], keys: dict[str, str]
) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    headers = {"authorization": f"Bearer {keys['alice']}"}
    with replicas[0].client(headers=headers) as first, replicas[1].client(headers=headers) as second:
        answer(first, "/v1/collections", {"name": "things"})
        answer(first, f"{THINGS}/documents", {"documents": DOCUMENTS})
        yield first, second
        first.delete(THINGS)


def found(client: httpx.Client, query: str = "counting stars", **fields: Any) -> list[str]:
    return [hit["document"] for hit in answer(client, SEARCH, {"query": query, "k": 1, **fields})["data"]]


def test_documents_put_on_one_server_are_found_by_the_other(clients: tuple[httpx.Client, httpx.Client]) -> None:
    first, second = clients
    for mode in ("hybrid", "dense", "sparse"):
        assert found(second, mode=mode) == ["stars"]
    assert found(second, "grain", filter={"topic": "food"}) == ["mill"]
    told = answer(second, CHAT, chat_body("What does a mill do?", retrieval={"collection": "things", "k": 2}))
    assert "mill#0" in {one["id"] for one in told["retrieval"]["citations"]}
    added = {"documents": [{"id": "stars", "text": "Now about bread."}, {"id": "salt", "text": "Salt is mined."}]}
    assert answer(second, f"{THINGS}/documents", added)["updated"] == 1
    assert found(first, "salt mine") == ["salt"]
    assert {one["id"] for one in first.get(f"{THINGS}/documents").json()["data"]} == {"mill", "stars", "salt"}
    assert first.get(THINGS).json()["version"] == second.get(THINGS).json()["version"]
    assert answer(first, f"{THINGS}/documents/delete", {"ids": ["mill", "nope"]})["deleted"] == 1
    assert second.get(THINGS).json()["documents"] == 2


def test_a_collection_that_one_server_has_removed_is_not_found_by_the_other(
    clients: tuple[httpx.Client, httpx.Client],
) -> None:
    first, second = clients
    assert found(second) == ["stars"]
    assert first.delete(THINGS).json() == {"deleted": 1}
    assert refusal(second, SEARCH, {"query": "stars"}, 404)["code"] == "collection_not_found"
    assert second.get("/v1/collections").json()["data"] == []
    answer(first, "/v1/collections", {"name": "things"})
    answer(first, f"{THINGS}/documents", {"documents": [{"id": "new", "text": "Of telescopes anew."}]})
    assert found(second, "telescopes") == ["new"]
    answer(second, f"{THINGS}/documents", {"documents": [{"id": "newer", "text": "Salt is mined."}]})
    first.delete(THINGS)
    answer(first, "/v1/collections", {"name": "things"})
    assert second.get(THINGS).json()["documents"] == 0


def test_tenants_are_apart_and_their_bytes_are_counted_over_all_servers(
    replicas: tuple[ServerProcess, ServerProcess], keys: dict[str, str], clients: tuple[httpx.Client, httpx.Client]
) -> None:
    for name in ("bert", "cora"):
        with replicas[1].client(headers={"authorization": f"Bearer {keys[name]}"}) as other:
            assert other.get("/v1/collections").json()["data"] == []
            assert other.get(THINGS).status_code == 404
    headers = {"authorization": f"Bearer {keys['cora']}"}
    with replicas[0].client(headers=headers) as first, replicas[1].client(headers=headers) as second:
        answer(first, "/v1/collections", {"name": "hoard"})
        statuses = []
        for number in range(40):
            one = {"documents": [{"id": f"d{number}", "text": f"{number} " + "grain flour stone " * 600}]}
            statuses.append((first, second)[number % 2].post("/v1/collections/hoard/documents", json=one).status_code)
            if statuses[-1] != 200:
                break
        assert statuses[-1] == 403
        assert len(statuses) > 2
        assert first.get("/v1/collections/hoard").json()["documents"] == len(statuses) - 1
        assert refusal(second, "/v1/collections/hoard/documents", one, 403)["code"] == "storage_quota_exceeded"
        first.delete("/v1/collections/hoard")


def test_without_milvus_only_documents_are_refused(
    clients: tuple[httpx.Client, httpx.Client], milvus: MilvusServer, replicas: tuple[ServerProcess, ServerProcess]
) -> None:
    first, second = clients
    assert found(second) == ["stars"]
    milvus.freeze()
    try:
        began = time.monotonic()
        assert refusal(second, SEARCH, {"query": "stars"}, 503)["code"] == "storage_unavailable"
        assert time.monotonic() - began < 20
        for _ in range(3):
            assert answer(second, CHAT, chat_body())["choices"]
            asked = chat_body(retrieval={"collection": "things"})
            assert refusal(second, CHAT, asked, 503)["code"] == "storage_unavailable"
            assert second.get("/health").status_code == 200
    finally:
        milvus.thaw()
    time.sleep(2.5)
    assert found(second) == ["stars"]
    assert f"Milvus at {milvus.uri}: " in replicas[1].log
    assert "check that it runs" in replicas[1].log
    assert found(first) == ["stars"]


def test_a_server_starts_without_its_milvus_and_finds_it_later(tmp_path: Path) -> None:
    milvus = MilvusServer(tmp_path / "m")
    options = ("--model", model_path(MINILM), "--milvus-uri", milvus.uri)
    with ServerProcess(*options, env={"KVARN_HOME": str(tmp_path)}) as server, server.client() as client:
        assert refusal(client, "/v1/collections", {"name": "things"}, 503)["code"] == "storage_unavailable"
        with milvus:
            time.sleep(2.5)
            answer(client, "/v1/collections", {"name": "things"})
            answer(client, f"{THINGS}/documents", {"documents": DOCUMENTS})
            told = run_kvarn("search", "-c", "things", "--json", "--milvus-uri", milvus.uri, "who counts stars")
            assert json.loads(told)[0]["document"] == "stars"
            note = tmp_path / "note.md"
            note.write_text("Ibexes climb dams.")
            told = run_kvarn("index", "add", "-c", "things", "--milvus-uri", milvus.uri, str(note))
            assert "1 added" in told
            assert found(client, "ibexes") == [str(note)]
            assert run_kvarn("index", "ls", "--milvus-uri", milvus.uri) == "things\n"
            stats = json.loads(run_kvarn("index", "stats", "-c", "things", "--json", "--milvus-uri", milvus.uri))
            assert stats["documents"] == 3
            assert "removed 1 doc" in run_kvarn("index", "rm", "-c", "things", "--milvus-uri", milvus.uri, "mill")
            assert "removed the" in run_kvarn("index", "rm", "-c", "things", "--milvus-uri", milvus.uri, "--all")
            assert client.get(THINGS).status_code == 404


def run_kvarn(*arguments: str) -> str:
    model = ("--model", str(model_path(MINILM))) if arguments[0] == "search" or arguments[1] == "add" else ()
    done = CliRunner().invoke(app, [*arguments, *model])
    assert done.exit_code == 0, done.output
    return done.stdout
