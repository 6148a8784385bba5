"""/rerank of a real server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.asking import answer, refusal
from tests.server.process import MINILM, SMOLLM2

pytestmark = pytest.mark.model
DOCUMENTS = ["A mill grinds grain into flour.", {"text": "Stars shine at night."}, "Bread is baked in an oven."]


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": SMOLLM2, "query": "What does a mill do?", "documents": DOCUMENTS, **fields}


def test_documents_come_back_in_the_order_of_their_scores(client: httpx.Client) -> None:
    told = answer(client, "/rerank", _body())
    scores = [one["relevance_score"] for one in told["results"]]
    assert scores == sorted(scores, reverse=True)
    assert {one["index"] for one in told["results"]} == {0, 1, 2}
    assert {one["document"]["text"] for one in told["results"]} >= {"Stars shine at night."}
    assert told["usage"]["prompt_tokens"] > 20
    for path in ("/v1/rerank", "/v2/rerank"):
        assert answer(client, path, _body())["results"] == told["results"]


def test_only_the_best_are_told_when_asked_so(client: httpx.Client) -> None:
    (best,) = answer(client, "/rerank", _body(top_n=1, return_documents=False))["results"]
    assert best.keys() == {"index", "relevance_score"}


@pytest.mark.parametrize(
    "fields",
    [
        {"documents": []},
        {"documents": [""]},
        {"query": ""},
        {"top_n": 0},
        {"documents": [7]},
        {"documents": ["x"] * 2000},
    ],
)
def test_wrong_bodies_are_refused(client: httpx.Client, fields: dict[str, Any]) -> None:
    refusal(client, "/rerank", _body(**fields))


def test_an_embedding_model_cannot_rerank(client: httpx.Client) -> None:
    assert "cross-encoder" in refusal(client, "/rerank", _body(model=MINILM))["message"]
