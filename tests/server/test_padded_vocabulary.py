"""A folder with a padded vocabulary, served: no request reaches a padding id, and trying costs nobody else anything."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.padded_models import ROWS, UNUSED, padded_model
from tests.server.process import ServerProcess

PADDING = ROWS - 1


@pytest.fixture(scope="module", params=["llama", "sdar"])
def padded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("--model", padded_model(request.param, tmp_path_factory.mktemp("padded"))) as server:
        yield server


def complete(server: ServerProcess, **fields: Any) -> tuple[int, dict[str, Any]]:
    with server.client() as http:
        (model,) = http.get("/v1/models").json()["data"]
        body = {
            "model": model["id"],
            "prompt": "hello",
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
            **fields,
        }
        answer = http.post("/v1/completions", json=body)
        return answer.status_code, answer.json()


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", {str(PADDING): 100}), ("stop_token_ids", [PADDING]), ("prompt", [104, PADDING])],
)
def test_a_request_that_names_a_padding_id_is_refused_and_its_neighbours_go_on(
    padded: ServerProcess, field: str, value: Any
) -> None:
    status, alone = complete(padded)
    assert status == 200
    with ThreadPoolExecutor(6) as threads:
        others = [threads.submit(complete, padded) for _ in range(3)]
        named = [threads.submit(complete, padded, **{field: value}) for _ in range(3)]
    for status, refusal in (one.result() for one in named):
        assert status == 400
        assert f"token id {PADDING} in" in refusal["error"]["message"]
        assert "stands for no token" in refusal["error"]["message"]
    for status, answer in (one.result() for one in others):
        assert status == 200
        assert answer["choices"][0]["text"] == alone["choices"][0]["text"]


def test_scores_beside_a_choice_may_name_padding_ids(padded: ServerProcess) -> None:
    status, answer = complete(padded, logprobs=5)
    assert status == 200
    named = {text for top in answer["choices"][0]["logprobs"]["top_logprobs"] for text in top}
    assert named & {f"[UNUSED_{token_id}]" for token_id in UNUSED}
