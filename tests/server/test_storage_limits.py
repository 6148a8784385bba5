"""Documents cost what they take: charged by bytes too, bounded on disk, left with their caller, stored all or none."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.edge_client import Client, post, until
from tests.server.keyed import KeyedServer
from tests.server.process import MINILM, ServerProcess, model_path

pytestmark = pytest.mark.model
MANY_WORDS = "a mill grinds grain into flour for bread and "


def documents(number: int, text: str = "x", first: int = 0) -> dict[str, Any]:
    return {"documents": [{"id": f"d{first + one}", "text": f"{first + one} {text}"} for one in range(number)]}


def create(client: httpx.Client, name: str) -> None:
    answer = client.post("/v1/collections", json={"name": name})
    assert answer.status_code == 200, answer.text


def test_a_word_without_end_is_charged_by_its_bytes(keyed: KeyedServer) -> None:
    """To the embedding model it is one token; the tier allows 120 a minute."""
    with keyed.client("collector") as client:
        create(client, "charged")
        refused = client.post("/v1/collections/charged/documents", json=documents(1, "x" * 16 * 121))
        assert refused.status_code == 400
        assert "may take 122 tokens" in refused.json()["error"]["message"]
        taken = client.post("/v1/collections/charged/documents", json=documents(1, "x" * 16 * 100))
        assert taken.status_code == 200, taken.text
        assert int(taken.headers["x-ratelimit-remaining-tokens"]) <= 20
        client.delete("/v1/collections/charged")


def test_the_chunks_of_a_word_without_end_are_bounded(keyed: KeyedServer) -> None:
    with keyed.client("alice") as client:
        create(client, "long")
        added = client.post("/v1/collections/long/documents", json=documents(1, "x" * 320_000)).json()
        assert added["chunks"] >= 320_000 / (16 * 200)
        found = client.post("/v1/collections/long/search", json={"query": "x", "mode": "dense", "k": 100}).json()
        assert max(len(hit["text"]) for hit in found["data"]) <= 16 * 200
        client.delete("/v1/collections/long")


def test_a_tier_bounds_the_bytes_that_its_keys_store(keyed: KeyedServer) -> None:
    with keyed.client("hoarder") as client:
        create(client, "hoard")
        statuses, number = [], 0
        while not statuses or statuses[-1] == 200:
            answer = client.post("/v1/collections/hoard/documents", json=documents(4, "x" * 20_000, 4 * number))
            statuses.append(answer.status_code)
            number += 1
        assert statuses[-1] == 403
        error = answer.json()["error"]
        assert error["code"] == "storage_quota_exceeded"
        assert "allows 3,000,000" in error["message"]
        assert client.get("/v1/collections/hoard").json()["documents"] == 4 * (number - 1)
        ids = [f"d{one}" for one in range(4 * number)]
        assert client.post("/v1/collections/hoard/documents/delete", json={"ids": ids}).status_code == 200
        again = client.post("/v1/collections/hoard/documents", json=documents(4, "y" * 20_000))
        assert again.status_code == 200, again.text
        client.delete("/v1/collections/hoard")


def cpu_s(process: ServerProcess) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_work_on_documents_ends_with_its_caller(keyed: KeyedServer) -> None:
    """A tenth of the document is added to its end, the whole one is left at once: that costs less than the tenth."""
    text = MANY_WORDS * 20_000
    with keyed.client("alice") as client:
        create(client, "left")
        began = cpu_s(keyed.process)
        tenth = client.post("/v1/collections/left/documents", json=documents(1, text[: len(text) // 10]))
        assert tenth.status_code == 200
        of_tenth_s = cpu_s(keyed.process) - began
        began = cpu_s(keyed.process)
        with Client(keyed.process.port) as leaving:
            key = f"authorization: Bearer {keyed.keys['alice']}"
            body = httpx.Request("POST", keyed.url, json=documents(1, text, 1)).content
            leaving.send(post("/v1/collections/left/documents", body, key))
            until(lambda: client.get("/fault/state").json()["http_requests"] > 0)
        until(lambda: is_quiet(keyed.process))
        assert cpu_s(keyed.process) - began < of_tenth_s
        assert client.get("/v1/collections/left").json()["documents"] == 1
        client.delete("/v1/collections/left")


def is_quiet(process: ServerProcess) -> bool:
    before = cpu_s(process)
    time.sleep(0.5)
    return cpu_s(process) - before < 0.1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("a file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def grow(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)


def test_on_a_full_disk_all_documents_of_a_request_are_stored_or_none(small_disk: Path) -> None:
    check_all_or_none(small_disk, lambda _: None, lambda _: grow(small_disk))


def test_where_a_file_cannot_grow_all_documents_of_a_request_are_stored_or_none(tmp_path: Path) -> None:
    def limit(number: int) -> Callable[[ServerProcess], None]:
        return lambda process: resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (number, resource.RLIM_INFINITY))

    check_all_or_none(tmp_path, limit(1_500_000), limit(resource.RLIM_INFINITY))


def check_all_or_none(
    home: Path, shrink: Callable[[ServerProcess], None], make_room: Callable[[ServerProcess], None]
) -> None:
    """Requests of forty documents until one is refused: what is stored is what was acknowledged, also afterwards."""
    number, text = 40, "x" * 3000
    options = ("--model", model_path(MINILM))
    acknowledged = 0
    with ServerProcess(*options, env={"KVARN_HOME": str(home)}) as process, process.client() as client:
        create(client, "full")
        shrink(process)
        for first in range(0, 100 * number, number):
            answer = client.post("/v1/collections/full/documents", json=documents(number, text, first))
            if answer.status_code != 200:
                break
            acknowledged += number
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "storage_unavailable"
        assert acknowledged > 0
        assert stored(client) == [f"d{one}" for one in range(acknowledged)]
        make_room(process)
        again = client.post("/v1/collections/full/documents", json=documents(number, text, acknowledged))
        assert again.status_code == 200, again.text
        assert process.stop() == 0
    with ServerProcess(*options, env={"KVARN_HOME": str(home)}) as process, process.client() as client:
        assert stored(client) == [f"d{one}" for one in range(acknowledged + number)]
        found = client.post(
            "/v1/collections/full/search", json={"query": str(acknowledged + 1), "mode": "sparse", "k": 1}
        ).json()
        assert [hit["document"] for hit in found["data"]] == [f"d{acknowledged + 1}"]


def stored(client: httpx.Client) -> list[str]:
    listed = client.get("/v1/collections/full/documents").json()["data"]
    return sorted((one["id"] for one in listed), key=lambda name: int(name[1:]))
