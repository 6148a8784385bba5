"""Adapters over HTTP: as models of every dialect, loaded and unloaded by admins while others stream."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from kvarn import LLM
from kvarn.server.access.keyfile import draw_key, write_keys
from kvarn.server.models.adapters import ServedAdapter, _uses
from tests.chat_model import write_chat_model
from tests.lora_files import chat_model_pairs, write_peft
from tests.server.asking import CHAT, TEXT, answer, chunks, joined, refusal
from tests.server.process import ServerProcess
from tests.server.sse import DONE, events

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = "The mill stood by the river, and every morning the miller listened to the water."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "rust", "more")):
        write_peft(root / "loras" / name, chat_model_pairs(seed))
    write_peft(root / "outside", chat_model_pairs(9))
    (root / "loras" / "link").symlink_to(root / "outside")
    linked = root / "loras" / "linked"
    linked.mkdir()
    for file in os.listdir(root / "outside"):
        (linked / file).symlink_to(root / "outside" / file)
    wrong = {"model.layers.0.self_attn.q_proj": (np.zeros((4, 32), np.float32), np.zeros((32, 4), np.float32))}
    write_peft(root / "loras" / "wrong", wrong)
    fim = {f"tokenizer.ggml.fim_{part}_token_id": 257 + i for i, part in enumerate(("pre", "suf", "mid"))}
    write_chat_model(root / "tiny.gguf", **fim)
    return root


@pytest.fixture(scope="module")
def keys(folder: Path) -> dict[str, str]:
    drawn = {name: draw_key(name, "enterprise", is_admin=name == "root") for name in ("root", "user")}
    write_keys(folder / "keys.toml", [entry for _, entry in drawn.values()])
    return {name: key for name, (key, _) in drawn.items()}


@pytest.fixture(scope="module")
def server(folder: Path, keys: dict[str, str]) -> Iterator[ServerProcess]:
    loras = folder / "loras"
    models = ("--model", f"tiny={folder / 'tiny.gguf'}", "--model", f"twin={folder / 'tiny.gguf'}")
    arguments = (*models, "--lora", f"sql={loras / 'sql'}", "--lora-dir", loras)
    with ServerProcess(*arguments, keys=folder / "keys.toml") as process:
        yield process


@pytest.fixture
def admin(server: ServerProcess, keys: dict[str, str]) -> Iterator[httpx.Client]:
    with server.client(headers={"authorization": f"Bearer {keys['root']}"}) as client:
        yield client


@pytest.fixture
def user(server: ServerProcess, keys: dict[str, str]) -> Iterator[httpx.Client]:
    with server.client(headers={"authorization": f"Bearer {keys['user']}"}) as client:
        yield client


def text(client: httpx.Client, model: str, **fields: Any) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    found: str = answer(client, TEXT, body)["choices"][0]["text"]
    return found


def test_an_adapter_is_listed_with_its_parent(user: httpx.Client) -> None:
    base, _, sql = user.get("/v1/models").json()["data"][:3]
    assert (base["id"], base["parent"], base["root"]) == ("tiny", None, "tiny")
    assert (sql["id"], sql["parent"], sql["root"]) == ("sql", "tiny", "tiny")
    assert sql["digest"] != base["digest"]
    assert user.get("/v1/models/sql").json()["parent"] == "tiny"


def test_every_dialect_answers_under_the_name_of_an_adapter(user: httpx.Client) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    plain = {"messages": messages, "max_tokens": 16, "temperature": 0}
    expected = {}
    for model in ("tiny", "sql"):
        chat = answer(user, CHAT, {"model": model, **plain})
        assert chat["model"] == model
        expected[model] = chat["choices"][0]["message"]["content"]
        message = answer(user, "/v1/messages", {"model": model, **plain})
        assert (message["model"], message["content"][0]["text"]) == (model, expected[model])
        made = answer(
            user, "/v1/responses", {"model": model, "input": PROMPT, "max_output_tokens": 16, "temperature": 0}
        )
        assert (made["model"], made["output"][-1]["content"][0]["text"]) == (model, expected[model])
        options = {"num_predict": 16, "temperature": 0}
        ollama = answer(user, "/api/chat", {"model": model, "messages": messages, "stream": False, "options": options})
        assert (ollama["model"], ollama["message"]["content"]) == (model, expected[model])
        streamed = chunks(user, CHAT, {"model": model, **plain})
        assert joined(streamed) == expected[model]
    assert expected["tiny"] != expected["sql"]


def test_only_admins_load_and_unload(user: httpx.Client) -> None:
    for path, body in ((LOAD, {"lora_name": "x", "lora_path": "rust"}), (UNLOAD, {"lora_name": "sql"})):
        assert "admin" in refusal(user, path, body, 403)["message"]
    assert text(user, "sql")


def test_an_adapter_is_loaded_used_replaced_and_unloaded(admin: httpx.Client, user: httpx.Client) -> None:
    card = answer(admin, LOAD, {"lora_name": "mine", "lora_path": "rust"})
    assert (card["id"], card["parent"]) == ("mine", "tiny")
    rust = text(user, "mine")
    assert rust not in (text(user, "tiny"), text(user, "sql"))
    assert "loaded already" in refusal(admin, LOAD, {"lora_name": "mine", "lora_path": "more"})["message"]
    answer(admin, LOAD, {"lora_name": "mine", "lora_path": "more", "load_inplace": True})
    fresh = answer(
        user, TEXT, {"model": "mine", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    )
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert fresh["choices"][0]["text"] != rust
    answer(admin, UNLOAD, {"lora_name": "mine"})
    assert refusal(user, TEXT, {"model": "mine", "prompt": "x"}, 404)["code"] == "model_not_found"
    assert refusal(admin, UNLOAD, {"lora_name": "mine"}, 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("../outside", "not below"),
        ("rust/../../outside", "not below"),
        ("/etc", "not below"),
        (".", "not below"),
        ("link", "symbolic link"),
        ("linked", "symbolic link"),
        ("nothing", "no such adapter"),
        ("wrong", "another base"),
        ("a\0b", "NUL"),
    ],
)
def test_paths_outside_the_folder_and_wrong_files_are_refused(path: str, words: str, admin: httpx.Client) -> None:
    error = refusal(admin, LOAD, {"lora_name": "x", "lora_path": path})
    assert words in error["message"]
    assert error["param"] == "lora_path"
    assert refusal(admin, TEXT, {"model": "x", "prompt": "x"}, 404)


def test_a_folder_that_is_gone_is_told_and_no_failure(folder: Path, admin: httpx.Client) -> None:
    loras = folder / "loras"
    loras.rename(folder / "away")
    try:
        assert "--lora-dir is gone" in refusal(admin, LOAD, {"lora_name": "x", "lora_path": "rust"})["message"]
    finally:
        (folder / "away").rename(loras)


@pytest.mark.parametrize("name", ["tiny", "a b", "../x"])
def test_names_that_are_taken_or_strange_are_refused(name: str, admin: httpx.Client) -> None:
    assert "name" in refusal(admin, LOAD, {"lora_name": name, "lora_path": "rust"})["message"]


def test_an_adapter_is_no_base_of_another(admin: httpx.Client) -> None:
    error = refusal(admin, LOAD, {"lora_name": "x", "lora_path": "rust", "base_model": "sql"})
    assert (error["param"], "an adapter itself" in error["message"]) == ("base_model", True)
    assert [one["id"] for one in admin.get("/v1/models").json()["data"]] == ["tiny", "twin", "sql"]


def test_another_id_of_the_model_has_the_same_adapters(admin: httpx.Client) -> None:
    card = answer(admin, LOAD, {"lora_name": "of-twin", "lora_path": "rust", "base_model": "twin"})
    assert card["parent"] == "tiny"
    assert [one["path"] for one in admin.get("/lora-adapters").json()] == ["sql", "of-twin"]
    body = {"input_prefix": "a", "input_suffix": "b", "n_predict": 9, "temperature": 0, "lora": [{"id": 1, "scale": 1}]}
    found = [answer(admin, "/infill", body | {"model": model})["content"] for model in ("tiny", "twin", "of-twin")]
    assert found == found[:1] * 3
    answer(admin, UNLOAD, {"lora_name": "of-twin"})
    assert answer(admin, LOAD, {"lora_name": "of-twin", "lora_path": "more"})["parent"] == "tiny"
    answer(admin, UNLOAD, {"lora_name": "of-twin"})


def test_what_is_served_has_the_digest_that_was_told(folder: Path) -> None:
    """A load whose client has gone ends in its thread, after which the model has other bytes under the name."""
    with LLM(folder / "tiny.gguf", context=128, kv_bytes=1 << 20) as llm:
        lora = llm.load_lora(folder / "loras" / "sql")
        served = ServedAdapter("sql", "tiny", folder / "loras" / "sql", 0, lora.digest, lora.num_bytes)
        llm.load_lora(folder / "loras" / "rust", "sql")
        (use,) = _uses(llm, [served], "sql")
        assert use.digest.hex() == lora.digest


def test_streams_go_on_while_their_adapter_is_unloaded_and_replaced(admin: httpx.Client, user: httpx.Client) -> None:
    body = {"model": "hot", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    answer(admin, LOAD, {"lora_name": "hot", "lora_path": "rust"})
    expected = answer(admin, TEXT, body)["choices"][0]["text"]
    for _ in range(2):
        with ExitStack() as stack:
            streams = [stack.enter_context(user.stream("POST", TEXT, json=body | {"stream": True})) for _ in range(3)]
            readers = [events(stream) for stream in streams]
            read = [[next(reader)] for reader in readers]
            answer(admin, UNLOAD, {"lora_name": "hot"})
            answer(admin, LOAD, {"lora_name": "hot", "lora_path": "more"})
            assert text(user, "hot") != expected[:20]
            answer(admin, LOAD, {"lora_name": "hot", "lora_path": "rust", "load_inplace": True})
            for begun, reader in zip(read, readers, strict=True):
                begun += [event for event in reader if event != DONE]
            assert [joined(one) for one in read] == [expected] * 3
    answer(admin, UNLOAD, {"lora_name": "hot"})


def test_llama_servers_field_mixes_adapters_by_their_ids(admin: httpx.Client) -> None:
    answer(admin, LOAD, {"lora_name": "mine", "lora_path": "rust"})
    listed = admin.get("/lora-adapters").json()
    assert [(one["id"], one["path"], one["scale"]) for one in listed] == [(0, "sql", 0.0), (1, "mine", 0.0)]

    def infill(**fields: Any) -> str:
        body = {"input_prefix": PROMPT, "input_suffix": "The end.", "n_predict": 16, "temperature": 0, **fields}
        found: str = answer(admin, "/infill", {**body, "ignore_eos": True})["content"]
        return found

    ways = [infill(), infill(lora=[{"id": 0, "scale": 1.0}]), infill(lora=[{"id": 1, "scale": 1.0}])]
    ways += [infill(lora=[{"id": 0, "scale": 0.5}, {"id": 1, "scale": 0.5}])]
    assert len(set(ways)) == 4
    assert infill(lora=[]) == infill(lora=[{"id": 0, "scale": 0}]) == infill(model="mine", lora=[]) == ways[0]
    assert infill(model="sql") == ways[1]
    assert infill(model="mine") == ways[2]
    wrong = {"input_prefix": "a", "input_suffix": "b", "lora": [{"id": 9, "scale": 1.0}]}
    assert "2 adapters" in refusal(admin, "/infill", wrong)["message"]
    answer(admin, UNLOAD, {"lora_name": "mine"})


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_chat_and_text_completions_take_the_field_too(path: str, admin: httpx.Client) -> None:
    answer(admin, LOAD, {"lora_name": "mine", "lora_path": "rust"})
    asked = {"messages": [{"role": "user", "content": PROMPT}]} if path == CHAT else {"prompt": PROMPT}

    def told(model: str = "tiny", **fields: Any) -> str:
        body = {"model": model, **asked, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
        whole = answer(admin, path, body)
        found: str = whole["choices"][0]["message"]["content"] if path == CHAT else whole["choices"][0]["text"]
        assert joined(chunks(admin, path, body)) == found
        assert whole["model"] == model
        return found

    both = [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 0.5}]
    ways = [told(), told("sql"), told("mine"), told(lora=both), told(lora=[{"id": 1, "scale": 0.25}])]
    assert len(set(ways)) == 5
    assert told(lora=[{"id": 0, "scale": 1}]) == told("mine", lora=[{"id": 0, "scale": 1}]) == ways[1]
    assert told("sql", lora=[]) == told("mine", lora=[{"id": 1, "scale": 0}]) == ways[0]
    assert told("sql", lora=both) == told("mine", lora=both[::-1]) == ways[3]
    for wrong, words in (
        ({"id": 2, "scale": 1.0}, "2 adapters"),
        ({"id": 0}, "scale"),
        ({"id": 0, "scale": 1e9}, "1000"),
    ):
        assert words in refusal(admin, path, {"model": "tiny", **asked, "lora": [wrong]})["message"]
    answer(admin, UNLOAD, {"lora_name": "mine"})
