"""A router before replicas of several machines: what one of them keeps is found again, everything else is spread."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvarn.server.access.keyfile import draw_key, write_keys
from tests.chat_model import write_chat_model
from tests.lora_files import chat_model_pairs, write_peft
from tests.server.process import MINILM, ServerProcess, model_path
from tests.server.routed import CHAT, MODEL, REPLICA, RouterProcess, body, cluster_files
from tests.unit.hub.servers import Site, add_repository, serving

NUM_KEYS = 12  # that all have one home: once in 2,048 runs
EMBED = "minilm"


@dataclass(frozen=True, slots=True)
class Machines:
    """Two replicas with folders of their own, a router, and clients of it with a key each."""

    key: Path
    replicas: list[ServerProcess]
    router: RouterProcess
    admins: list[httpx.Client]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A hub with one model."""
    model = write_chat_model(tmp_path_factory.mktemp("hub") / "tiny.gguf").read_bytes()
    with serving(Site()) as running:
        add_repository(running, "org/later", {"later.gguf": model})
        yield running


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, site: Site) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    _, key = cluster_files(folder)
    fim = {f"tokenizer.ggml.fim_{part}_token_id": 257 + i for i, part in enumerate(("pre", "suf", "mid"))}
    model = write_chat_model(folder / "fim.gguf", **fim)
    for seed in range(NUM_KEYS):
        write_peft(folder / "loras" / f"lora{seed}", chat_model_pairs(seed))
    drawn = [draw_key(f"k{number}", "enterprise", is_admin=True) for number in range(NUM_KEYS)]
    write_keys(folder / "keys.toml", [entry for _, entry in drawn])
    args = ("--model", f"{MODEL}={model}", "--model", f"{EMBED}={model_path(MINILM)}")
    args += ("--cluster-key", str(key), "--threads", "1", "--lora-dir", str(folder / "loras"))
    offline = {"HF_ENDPOINT": site.url, "NO_PROXY": "127.0.0.1", "KVARN_OFFLINE": "0"}
    homes = [offline | {"KVARN_HOME": str(folder / f"home{number}")} for number in range(2)]
    with ExitStack() as stack:
        replicas = [
            ServerProcess(*args, config="memory_bytes = 1000000000", keys=folder / "keys.toml", env=home)
            for home in homes
        ]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(stack.enter_context, replicas))
        router = stack.enter_context(RouterProcess(key, [one.url for one in replicas]))
        router.until_usable(2)
        headers = [{"authorization": f"Bearer {drawn_key}"} for drawn_key, _ in drawn]
        admins = [stack.enter_context(router.client(headers=one)) for one in headers]
        yield Machines(key, replicas, router, admins)


def sent(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[str, Any]:
    """Who answered, and what; 200 it must be."""
    answer = client.request(method, path, json=body)
    assert answer.status_code == 200, f"{method} {path}: {answer.text}"
    return answer.headers[REPLICA], answer.json()


def test_requests_that_name_an_adapter_go_where_it_was_loaded(machines: Machines) -> None:
    homes = {}
    for number, client in enumerate(machines.admins):
        name = f"lora{number}"
        homes[name], _ = sent(client, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": name})
        assert {sent(client, "POST", CHAT, body(f"{turn} {name}", model=name))[0] for turn in range(4)} == {homes[name]}
    assert set(homes.values()) == {"0", "1"}
    stranger = machines.admins[0]  # any key may use it, and any admin unload it
    for name, home in homes.items():
        assert sent(stranger, "POST", "/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})[0] == home
        assert sent(stranger, "GET", f"/v1/models/{name}")[0] == home
    with RouterProcess(machines.key, [one.url for one in machines.replicas]) as late:  # which hears of all of them
        late.until_usable(2)
        with late.client(headers=stranger.headers) as client:
            assert {name: sent(client, "POST", CHAT, body("hi", model=name))[0] for name in homes} == homes
    for name, home in homes.items():
        assert sent(stranger, "POST", "/v1/unload_lora_adapter", {"lora_name": name})[0] == home
        assert stranger.post(CHAT, json=body("hi", model=name)).status_code == 404


def test_adapters_by_number_are_those_that_were_listed(machines: Machines) -> None:
    for number, client in enumerate(machines.admins[:4]):
        name = f"lora{number}"
        home, _ = sent(client, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": name})
        listed, known = sent(client, "GET", "/lora-adapters")
        assert (listed, known[-1]["path"]) == (home, name)
        mixed = {
            "input_prefix": "a",
            "input_suffix": "b",
            "n_predict": 2,
            "lora": [{"id": known[-1]["id"], "scale": 1}],
        }
        assert {sent(client, "POST", "/infill", mixed)[0] for _ in range(3)} == {home}
    for number, client in enumerate(machines.admins[:4]):
        sent(client, "POST", "/v1/unload_lora_adapter", {"lora_name": f"lora{number}"})


def test_a_model_that_was_added_is_asked_where_it_is_and_the_replica_stays(machines: Machines) -> None:
    admin, user = machines.admins[:2]
    pulled, _ = sent(admin, "POST", "/v1/models/pull", {"model": "hf:org/later", "stream": False})
    home, loaded = sent(admin, "POST", "/v1/models/load", {"model": "hf:org/later", "id": "later"})
    assert (pulled, loaded["is_loaded"]) == (home, True)
    assert {sent(user, "POST", CHAT, body(f"{turn}", model="later"))[0] for turn in range(4)} == {home}
    with RouterProcess(machines.key, [one.url for one in machines.replicas]) as late:
        late.until_usable(2)
        assert "it differs" not in late.log
        with late.client(headers=user.headers) as client:
            assert {sent(client, "POST", CHAT, body(f"{turn}", model="later"))[0] for turn in range(4)} == {home}
    assert sent(user, "POST", "/v1/models/unload", {"model": "later"})[0] == home


def test_chats_find_the_collections_of_their_key(machines: Machines) -> None:
    homes = set()
    for client in machines.admins[:8]:
        home, _ = sent(client, "POST", "/v1/collections", {"name": "things"})
        document = {"id": "mill", "text": "A mill grinds grain into flour."}
        assert sent(client, "POST", "/v1/collections/things/documents", {"documents": [document]})[0] == home
        for turn in range(3):
            asked = body(f"What does mill {turn} do?", retrieval={"collection": "things", "k": 1})
            number, told = sent(client, "POST", CHAT, asked)
            assert (number, told["retrieval"]["citations"][0]["id"]) == (home, "mill#0")
        homes.add(home)
    assert homes == {"0", "1"}


def test_responses_of_one_key_are_spread_and_continued_where_they_are_stored(machines: Machines) -> None:
    client = machines.admins[0]
    asked = {"model": MODEL, "max_output_tokens": 4, "temperature": 0}
    stored = [sent(client, "POST", "/v1/responses", asked | {"input": f"Question {number}"}) for number in range(6)]
    assert {home for home, _ in stored} == {"0", "1"}
    for home, first in stored:
        path = f"/v1/responses/{first['id']}"
        more = {"input": "And?", "previous_response_id": first["id"]}
        second_home, _ = sent(client, "POST", "/v1/responses", asked | more)
        read, _ = sent(client, "GET", path)
        listed, items = sent(client, "GET", f"{path}/input_items")
        item = {"type": "item_reference", "id": items["data"][0]["id"]}
        again, _ = sent(client, "POST", "/v1/responses", asked | {"input": [item, {"role": "user", "content": "So?"}]})
        deleted, _ = sent(client, "DELETE", path)
        assert {second_home, again, read, listed, deleted} == {home}
        assert client.get(path).status_code == 404


def test_any_router_finds_a_running_request(machines: Machines) -> None:
    asked = body("Go on.", max_tokens=1500, n=5, stream=True, ignore_eos=True)
    client = machines.admins[0]
    with RouterProcess(machines.key, [one.url for one in machines.replicas[::-1]]) as other, ExitStack() as stack:
        other.until_usable(2)
        with other.client(headers=client.headers) as second:
            sent(second, "GET", "/v1/models")  # connects
            stream = stack.enter_context(client.stream("POST", CHAT, json=asked))
            assert stream.status_code == 200, stream.read()
            next(lines := stream.iter_lines())
            request_id = stream.headers["x-request-id"]
            ended, _ = sent(second, "DELETE", f"/v1/requests/chatcmpl-{request_id}")
            assert int(ended) == 1 - int(stream.headers[REPLICA])  # its list begins with the other
            assert '"cancelled"' in "".join(lines)
