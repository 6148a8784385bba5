"""/v1/models and /v1/models/{id} of a real server."""

from __future__ import annotations

import hashlib
from datetime import datetime

import httpx
import pytest

from tests.assets import smollm2
from tests.server.process import MINILM, SMOLLM2

pytestmark = pytest.mark.model


def test_every_configured_model_is_listed_the_default_one_first(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == [SMOLLM2, MINILM]
    assert [card["kind"] for card in listed["data"]] == ["generate", "embed"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (SMOLLM2, MINILM, False)


def test_a_page_has_its_ends_and_tells_whether_there_are_more(client: httpx.Client) -> None:
    first = client.get("/v1/models?limit=1").json()
    assert [card["id"] for card in first["data"]] == [SMOLLM2]
    assert (first["first_id"], first["last_id"], first["has_more"]) == (SMOLLM2, SMOLLM2, True)
    after = client.get(f"/v1/models?limit=1&after_id={SMOLLM2}").json()
    assert ([card["id"] for card in after["data"]], after["has_more"]) == ([MINILM], False)
    beyond = client.get(f"/v1/models?after_id={MINILM}").json()
    assert (beyond["data"], beyond["first_id"], beyond["last_id"], beyond["has_more"]) == ([], None, None, False)


def test_a_page_that_cannot_be_is_refused_by_name(client: httpx.Client) -> None:
    for query, param in (("limit=0", "limit"), ("limit=1001", "limit"), ("after_id=gpt-4", "after_id")):
        answer = client.get(f"/v1/models?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert client.get("/v1/models?colour=blue").status_code == 200


def test_a_card_tells_what_openai_and_anthropic_clients_ask(client: httpx.Client) -> None:
    card = client.get(f"/v1/models/{SMOLLM2}").json()
    assert (card["object"], card["type"], card["owned_by"]) == ("model", "model", "kvarn")
    assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
    assert card["max_model_len"] == 2048
    assert card["is_loaded"] is True


def test_a_card_shows_the_digest_of_the_weights(client: httpx.Client) -> None:
    with smollm2().open("rb") as file:
        expected = hashlib.file_digest(file, "sha256").hexdigest()
    assert client.get(f"/v1/models/{SMOLLM2}").json()["digest"] == expected


@pytest.mark.parametrize(
    "name",
    ["gpt-4", "%2Fetc%2Fpasswd", "http:%2F%2Fexample.org%2Fm.gguf", "hf:org%2Frepo", "m" * 4096, "%F0%9F%90%89"],
)
def test_a_name_that_is_not_configured_is_not_found_and_never_opened(client: httpx.Client, name: str) -> None:
    answer = client.get(f"/v1/models/{name}")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert len(error["message"]) < 300


def test_a_path_that_climbs_is_refused(client: httpx.Client) -> None:
    answer = client.get("/v1/models/..%2F..%2Fetc%2Fpasswd")
    assert answer.status_code == 400
    assert "passwd" not in answer.text


def test_models_cannot_be_posted(client: httpx.Client) -> None:
    answer = client.post("/v1/models", json={})
    assert answer.status_code == 405
    assert answer.json()["error"]["type"] == "invalid_request_error"
