"""A diffusion model behind the API: whole and in pieces, its canvas when asked for, refusals by name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.diffusing import write_talking_model
from tests.server.process import ServerProcess
from tests.server.sse import DONE, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FIELDS: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "ignore_eos": True}
BODY = FIELDS | {"messages": [{"role": "user", "content": "hi"}], "diffusion": {"block_length": 4}}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = write_talking_model(tmp_path_factory.mktemp("model") / "tiny.gguf").rename(
        tmp_path_factory.mktemp("served") / "tiny"
    )
    with ServerProcess("--model", path, "--context", "256") as server, server.client() as client:
        yield client


def read(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    with http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        *chunks, end = events(response)
    assert end == DONE
    return chunks


def test_an_answer_comes_whole_and_in_pieces(http: httpx.Client) -> None:
    whole = http.post(CHAT, json=BODY).json()
    assert whole["usage"]["completion_tokens"] == 12
    pieces = [one["delta"].get("content", "") for chunk in read(http, CHAT, BODY) for one in chunk["choices"]]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_canvas_comes_after_each_step_when_asked_for(http: httpx.Client, path: str) -> None:
    body = BODY | {"diffusion": {"block_length": 4, "steps": 6, "events": True}}
    if path == TEXT:
        body = FIELDS | {"prompt": "hi", "diffusion": body["diffusion"]}
    chunks = read(http, path, body)
    steps = [chunk["diffusion"] for chunk in chunks if "diffusion" in chunk]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step["token_ids"].count(None) for step in steps] == [10, 8, 6, 4, 2, 0]
    assert all(step["text"].count("░") == step["token_ids"].count(None) for step in steps)
    assert all(chunk["choices"] == [] for chunk in chunks if "diffusion" in chunk)


def test_tokens_are_edited_within_the_block_under_way_and_sent_text_never_changes(http: httpx.Client) -> None:
    edits = {"block_length": 6, "policy": "joint_threshold", "threshold": 0.0, "edit_threshold": 0.0}
    body = BODY | {"diffusion": edits | {"max_post_edit_steps": 4, "events": True}}
    chunks = read(http, CHAT, body)
    steps = [chunk["diffusion"] for chunk in chunks if "diffusion" in chunk]
    changed = [
        (index, now["block"])
        for before, now in pairwise(steps)
        for index, (a, b) in enumerate(zip(before["token_ids"], now["token_ids"], strict=False))
        if a is not None and a != b
    ]
    assert changed
    assert all(first <= index < end for index, (first, end) in changed)
    pieces = [one["delta"].get("content", "") for chunk in chunks for one in chunk["choices"]]
    whole = http.post(CHAT, json=BODY | {"diffusion": edits | {"max_post_edit_steps": 4}}).json()
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]


def test_denoising_steps_are_counted(http: httpx.Client) -> None:
    def counted() -> float:
        lines = http.get("/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith("kvarn_dllm_denoise_steps_total{")]
        return float(line.split()[-1])

    before = counted()
    http.post(CHAT, json=BODY | {"diffusion": {"block_length": 4, "steps": 6}})
    assert counted() - before == 6


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "constraint"),
        ({"diffusion": {"policy": "best"}}, "diffusion.policy"),
        ({"diffusion": {"threshold": 1.5}}, "diffusion.threshold"),
        ({"diffusion": {"threshold": 0.8}}, "threshold has no meaning for policy 'low_confidence'"),
        ({"diffusion": {"no_such": 1}}, "diffusion.no_such"),
        ({"diffusion": {"cache": "block"}}, "cache"),
        ({"diffusion": {"cache": "dual", "sparse": {"enabled": True}}}, "sparse"),
        ({"diffusion": {"sparse": {"retention_ratio": 0}}}, "retention_ratio"),
        ({"diffusion": {"events": True}}, "diffusion.events"),
        ({"diffusion": {"edit_threshold": 0.5}}, "edit_threshold has no meaning for policy 'low_confidence'"),
        ({"diffusion": {"policy": "joint_threshold", "edit_threshold": 2}}, "diffusion.edit_threshold"),
        ({"diffusion": {"block_length": 8, "sub_block_length": 3}}, "sub_block_length is 3"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], name: str) -> None:
    response = http.post(CHAT, json=BODY | fields)
    assert response.status_code == 400
    assert name in response.json()["error"]["message"]
