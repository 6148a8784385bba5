"""What a router reads of a request: which replica it needs, and whether another may be asked in its place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.routing import APIRoute

from kvarn.routing.cluster_key import ClusterKey
from kvarn.routing.holders import Holders
from kvarn.routing.text_prefix import TextHasher
from kvarn.server.app import ROUTES
from kvarn.server.http.request_id import new_request_id, tag_of
from kvarn.server.router.routed_body import GENERATING, HOME_PATHS, READING, RoutedBody

HASHER = TextHasher(ClusterKey(b"k" * 32))
TAG = "0a1b2c3d"
ELSEWHERE = ("/api/create", "/api/copy", "/api/push")  # which are refused


def read(path: str, body: Any = None, method: str = "POST") -> RoutedBody:
    data = b"" if body is None else json.dumps(body).encode()
    return RoutedBody.read({"path": path, "method": method, "headers": []}, data, HASHER)


def test_every_post_route_has_a_home_or_may_be_repeated() -> None:
    routes = [route for module in ROUTES for route in module.router.routes if isinstance(route, APIRoute)]
    posted = {route.path for route in routes if "POST" in (route.methods or ())}
    unknown = {one for one in posted if not one.startswith(HOME_PATHS)} - {*GENERATING, *READING, *ELSEWHERE}
    assert not unknown
    assert {*GENERATING, *READING} <= posted


@pytest.mark.parametrize("path", [*GENERATING, *READING])
def test_what_leaves_nothing_behind_may_be_repeated(path: str) -> None:
    assert read(path).may_repeat
    assert not read(path).is_homed


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/models/pull", "/v1/collections/a/documents"])
def test_what_one_replica_keeps_is_homed_and_not_repeated(path: str) -> None:
    assert read(path).is_homed
    assert not read(path).may_repeat
    assert read(path, method="GET").may_repeat


def test_a_response_is_found_by_the_tag_of_its_id() -> None:
    id = f"resp_{new_request_id(TAG)}"
    item = {"type": "item_reference", "id": id.replace("resp_", "fc_") + "_3"}
    assert read(f"/v1/responses/{id}/input_items", method="GET").tags == (TAG,)
    assert read("/v1/responses", {"input": "hi", "previous_response_id": id}).tags == (TAG,)
    assert read("/v1/responses", {"input": [{"role": "user", "content": "hi"}, item]}).tags == (TAG,)
    assert read("/v1/responses", {"input": "hi", "store": True}).tags == ()
    assert not read("/v1/responses", {"input": "hi"}).is_homed
    assert read("/v1/chat/completions", {"previous_response_id": id}).tags == ()


@pytest.mark.parametrize("id", ["", "resp_", "../x", "a" * 5000, "resp_" + "0" * 31, "ä" * 40])
def test_what_is_no_id_has_no_tag(id: str) -> None:
    assert tag_of(id) is None


@pytest.mark.parametrize(
    "body", [[], "x", {"model": 3, "input": {"id": 1}, "previous_response_id": []}, {"lora": None}]
)
def test_any_json_is_read(body: Any) -> None:
    for path in (*GENERATING, *READING, "/v1/load_lora_adapter"):
        found = read(path, body)
        assert (found.name, found.tags, found.is_mixed) == (None, (), False)
        assert found.is_homed == (path == "/v1/load_lora_adapter")


def test_names_are_those_of_models_and_adapters() -> None:
    assert read("/v1/chat/completions", {"model": "sql"}).name == "sql"
    assert read("/v1/load_lora_adapter", {"lora_name": "sql", "base_model": "tiny"}).offers == "sql"
    assert read("/v1/unload_lora_adapter", {"lora_name": "sql"}).name == "sql"
    assert read("/v1/models/load", {"model": "hf:a/b"}).offers == "hf:a/b"
    assert read("/v1/models/sql", method="GET").name == "sql"


def test_holders_are_those_who_said_so_last() -> None:
    holders = Holders()
    holders.set(0, ("sql", "rust"))
    holders.set(2, ("sql",))
    assert (holders.of("sql"), holders.of("rust"), holders.of("c")) == (0b101, 0b001, 0)
    assert not holders.are_same(0b101)
    assert holders.are_same(0b001)
    holders.add(2, "rust")
    assert holders.are_same(0b101)
    holders.set(0, ())
    assert (holders.of("sql"), holders.of("rust")) == (0b100, 0b100)
