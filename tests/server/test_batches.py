"""/v1/files and /v1/batches with the official client: whole way, tenants, limits, cancel, kill -9 and a new start."""

from __future__ import annotations

import io
import json
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvarn.server.batches.file_store import FileStore
from kvarn.server.batches.jobs import BatchJobs
from kvarn.server.failures import BatchesUnwritable
from kvarn.server.process.settings import make_config
from kvarn.types import MAX_PRIORITY
from tests.chat_model import write_chat_model
from tests.server.keyed import KeyedServer, events, tiny_keyed
from tests.server.process import ServerProcess

WAIT_S = 120.0
ENDED = ("completed", "failed", "expired", "cancelled")
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def keyed_batches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServer]:
    folder = tmp_path_factory.mktemp("keyed")
    settings = "batch_bytes = 1000000\nmax_body_bytes = 400000\n"
    with tiny_keyed(folder, "--batch-dir", str(folder / "batches"), config=settings) as server:
        yield server


def client_of(server: KeyedServer, name: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.keys[name], max_retries=0, timeout=60)


def line(custom_id: str, text: str = "hi", **fields: Any) -> str:
    messages = [{"role": "user", "content": text}]
    body = {"model": "tiny.gguf", "messages": messages, "max_tokens": 8, "seed": 5, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}) + "\n"


def upload(client: openai.OpenAI, text: str) -> str:
    return client.files.create(file=("in.jsonl", io.BytesIO(text.encode())), purpose="batch").id


def create(client: openai.OpenAI, file_id: str) -> Any:
    return client.batches.create(
        input_file_id=file_id, endpoint=CHAT, completion_window="24h", metadata={"job": "nightly"}
    )


def until(is_so: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < WAIT_S
        time.sleep(0.02)


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    until(lambda: client.batches.retrieve(batch_id).status in ENDED)
    return client.batches.retrieve(batch_id)


def lines_of(client: openai.OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


def test_a_batch_answers_what_the_server_answers_and_tells_broken_lines(keyed_batches: KeyedServer) -> None:
    client = client_of(keyed_batches, "boss")
    given = "".join(line(f"r{index}", f"n {index}", temperature=0.9, seed=index) for index in range(8))
    file_id = upload(client, given + "{broken\n" + line("r1") + line("cold", temperature=-1))
    assert client.files.content(file_id).content.endswith(line("cold", temperature=-1).encode())
    batch = ended(client, create(client, file_id).id)
    assert (batch.status, batch.metadata, batch.endpoint) == ("completed", {"job": "nightly"}, CHAT)
    assert batch.request_counts.model_dump() == {"total": 11, "completed": 8, "failed": 3}
    told = {one["custom_id"]: one["response"]["body"] for one in lines_of(client, batch.output_file_id)}
    assert sorted(told) == [f"r{index}" for index in range(8)]
    for index in range(8):
        asked: Any = json.loads(given.splitlines()[index])["body"]
        answer = client.chat.completions.create(**asked)
        assert told[f"r{index}"]["choices"] == json.loads(answer.to_json())["choices"]
    failed = lines_of(client, batch.error_file_id)
    assert sorted(one["error"]["line"] for one in failed if one["error"]) == [9, 10]
    assert [one["response"]["body"]["error"]["param"] for one in failed if one["response"]] == ["temperature"]
    assert batch.id in [one.id for one in client.batches.list(limit=1)]
    assert {file_id, batch.output_file_id} <= {one.id for one in client.files.list()}


def test_files_and_batches_of_other_keys_do_not_exist(keyed_batches: KeyedServer) -> None:
    owner, other = client_of(keyed_batches, "boss"), client_of(keyed_batches, "pia")
    file_id = upload(owner, line("a"))
    batch = ended(owner, create(owner, file_id).id)
    asks: list[Callable[[], object]] = [
        lambda: other.files.retrieve(file_id),
        lambda: other.files.content(batch.output_file_id),
        lambda: other.files.delete(file_id),
        lambda: create(other, file_id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
    ]
    for ask in asks:
        with pytest.raises(openai.NotFoundError):
            ask()
    assert list(other.files.list()) == list(other.batches.list()) == []
    owner.files.delete(file_id)
    with pytest.raises(openai.NotFoundError):
        owner.files.retrieve(file_id)


def test_what_cannot_be_is_refused_by_name(keyed_batches: KeyedServer) -> None:
    client = client_of(keyed_batches, "fred")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"{}", purpose="fine-tune")
    with pytest.raises(openai.APIStatusError) as too_large:
        upload(client, "x" * 500_000)
    assert too_large.value.status_code == 413
    upload(client, "x" * 300_000)
    with pytest.raises(openai.PermissionDeniedError, match="at most 500,000 are kept"):
        upload(client, "x" * 300_000)
    with keyed_batches.client("fred") as http:
        assert http.post("/v1/files", content=b"{}").status_code == 415
        form = {"content-type": "multipart/form-data; boundary=b"}
        assert http.post("/v1/files", content=b"--b\r\nno form", headers=form).status_code == 400
        assert http.get("/v1/files?limit=0").json()["error"]["param"] == "limit"
        asked = {"input_file_id": "x", "endpoint": "/v1/files", "completion_window": "24h"}
        assert http.post("/v1/batches", json=asked).json()["error"]["param"] == "endpoint"
    with pytest.raises(openai.BadRequestError, match="only one that has not ended"):
        client.batches.cancel(ended(client, create(client, upload(client, line("a"))).id).id)


def test_a_cancelled_batch_keeps_what_it_answered_and_lets_others_pass(keyed_batches: KeyedServer) -> None:
    client = client_of(keyed_batches, "boss")
    lines = "".join(line(f"r{index}", max_tokens=200, ignore_eos=True) for index in range(1500))
    batch = create(client, upload(client, lines))
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 20)
    assert keyed_batches.chat("pia", "hi", model="tiny.gguf").status_code == 200  # in the middle of it
    with keyed_batches.client("boss") as http, http.stream("GET", "/v1/live") as live:
        running = next(event["requests"] for event in events(live) if event["requests"])  # none between two lines
    assert {one["priority"] for one in running} == {-MAX_PRIORITY}, "beside interactive ones"
    client.batches.cancel(batch.id)
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
    assert 20 < len(lines_of(client, batch.output_file_id)) == batch.request_counts.completed < 1500


def test_a_killed_server_goes_on_and_answers_each_line_once(tmp_path: Path) -> None:
    model, folder, number = write_chat_model(tmp_path / "tiny.gguf"), tmp_path / "batches", 600
    with ServerProcess("--model", model, "--batch-dir", folder) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60)
        text = "".join(line(f"r{index}", max_tokens=32, ignore_eos=True) for index in range(number))
        batch = create(client, upload(client, text))
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 20)
        server.stop(signal.SIGKILL)
    assert 20 < len((folder / "batches" / f"{batch.id}.answers").read_bytes().splitlines()) < number
    with ServerProcess("--model", model, "--batch-dir", folder) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60)
        batch = ended(client, batch.id)
        told = Counter(one["custom_id"] for one in lines_of(client, batch.output_file_id))
        assert told == Counter(f"r{index}" for index in range(number))
        assert batch.status == "completed"


def test_a_server_without_a_folder_says_so(tmp_path: Path) -> None:
    with ServerProcess("--model", write_chat_model(tmp_path / "tiny.gguf")) as server, server.client() as http:
        for path in ("/v1/files", "/v1/batches", "/v1/files/x", "/v1/batches/x"):
            answer = http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (501, "batches_unavailable")


def test_on_a_full_disk_a_batch_fails_in_words_and_leaves_room(tmp_path: Path) -> None:
    """A limit of each file's bytes stands for it."""
    text = "".join(line(f"r{n}", max_tokens=100, logprobs=True, top_logprobs=5, ignore_eos=True) for n in range(40))
    folder = tmp_path / "batches"
    with tiny_keyed(tmp_path, "--batch-dir", str(folder)) as server:
        client = client_of(server, "boss")
        file_id = upload(client, text)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        failed = ended(client, create(client, file_id).id)
        assert (failed.status, failed.errors.data[0].code) == ("failed", "storage")
        assert "cannot be written: File too large; ask its operator" in failed.errors.data[0].message
        with pytest.raises(openai.InternalServerError, match="cannot be written: File too large") as refused:
            upload(client, "x" * 200_000)
        assert refused.value.status_code == 503
        assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".json", ".data"}
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert ended(client, create(client, file_id).id).status == "completed"


def test_a_state_that_cannot_be_kept_is_none(tmp_path: Path) -> None:
    jobs = BatchJobs(make_config({"batch_dir": tmp_path}))
    file = jobs.files.put("me", "in.jsonl", "batch", b"{}")
    job = jobs.create("me", CHAT, file.id, None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        for change in (lambda: jobs.create("me", CHAT, file.id, None), lambda: jobs.cancel(job)):
            with pytest.raises(BatchesUnwritable, match="make room"):
                change()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(one.id, one.status) for one in jobs.of("me")] == [(job.id, "validating")]
    jobs.cancel(job)
    assert job.status == "cancelling"


def test_a_file_that_was_being_written_does_not_exist(tmp_path: Path) -> None:
    files = FileStore(tmp_path, 1000)
    kept = files.put("", "a", "batch", b"abc")
    (tmp_path / "file-x.data").write_bytes(b"no metadata")
    (tmp_path / "file-y.json.part").write_bytes(b"{")
    again = FileStore(tmp_path, 1000)
    assert again.of("") == [kept]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{kept.id}.data", f"{kept.id}.json"]
