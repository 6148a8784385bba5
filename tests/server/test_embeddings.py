"""/v1/embeddings of a real server with an encoder."""

from __future__ import annotations

import base64
import re
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from tests.server.process import MINILM, SMOLLM2

pytestmark = pytest.mark.model
WIDTH = 384
TEXTS = ["a mill grinds grain", "ein Müller mahlt Korn", "🦜"]


def embed(client: httpx.Client, given: Any, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/embeddings", json={"model": MINILM, "input": given, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def vectors(client: httpx.Client, given: Any, **fields: Any) -> npt.NDArray[np.float32]:
    return np.array([one["embedding"] for one in embed(client, given, **fields)["data"]], np.float32)


def refused(client: httpx.Client, given: Any, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/embeddings", json={"model": MINILM, "input": given, **fields})
    assert answer.status_code == 400, answer.text[:300]
    return answer.json()["error"]


def test_each_text_gets_a_vector_of_length_one_in_order(client: httpx.Client) -> None:
    answer = embed(client, TEXTS)
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    found = np.array([one["embedding"] for one in answer["data"]])
    assert found.shape == (3, WIDTH)
    assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(3), abs=1e-5)
    assert found[0] @ found[1] > found[0] @ found[2]


def test_a_vector_does_not_depend_on_its_neighbours(client: httpx.Client) -> None:
    together = vectors(client, TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        assert (vectors(client, text)[0] == vector).all()


def test_token_ids_give_the_vector_of_their_text(client: httpx.Client) -> None:
    ids = [client.post("/tokenize", json={"model": MINILM, "prompt": text}).json()["tokens"] for text in TEXTS]
    assert (vectors(client, ids) == vectors(client, TEXTS)).all()
    assert (vectors(client, ids[0]) == vectors(client, TEXTS[0])).all()
    usage = embed(client, ids)["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == sum(map(len, ids))


def test_base64_holds_the_same_numbers(client: httpx.Client) -> None:
    told = embed(client, TEXTS, encoding_format="base64")["data"]
    decoded = np.stack([np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in told])
    assert (decoded == vectors(client, TEXTS)).all()


def test_fewer_dimensions_are_the_first_ones_at_length_one(client: httpx.Client) -> None:
    raw = vectors(client, TEXTS, normalize=False)[:, :64]
    short = vectors(client, TEXTS, dimensions=64)
    assert short == pytest.approx(raw / np.linalg.norm(raw, axis=1, keepdims=True), abs=1e-6)
    assert (vectors(client, TEXTS, dimensions=WIDTH) == vectors(client, TEXTS)).all()


def test_without_normalising_the_lengths_are_the_models_own(client: httpx.Client) -> None:
    raw = vectors(client, TEXTS, normalize=False)
    lengths = np.linalg.norm(raw, axis=1, keepdims=True)
    assert (np.abs(lengths - 1) > 0.01).any()
    assert raw / lengths == pytest.approx(vectors(client, TEXTS), abs=1e-6)


def test_mean_pooling_is_the_models_own_and_cls_and_last_differ_from_it(client: httpx.Client) -> None:
    by_pooling = {name: vectors(client, TEXTS[0], pooling=name)[0] for name in ("mean", "cls", "last")}
    assert (by_pooling["mean"] == vectors(client, TEXTS[0])[0]).all()
    assert by_pooling["mean"] @ by_pooling["cls"] < 0.999
    assert by_pooling["cls"] @ by_pooling["last"] < 0.999


NO_TEXTS = [None, {}, {"a": 1}, 7, [None], ["a", 5], ["a", [5]], [5, "a"], [[5], "a"], [[[1]]]]
NO_IDS = [[True], [[True]], [1.5], [-1], [30522], [2**31], [2**63], [2**64], [[5, -1]]]
EMPTY = ["", [], [""], ["a", ""], [[]], [[101], []]]


@pytest.mark.parametrize("given", [*EMPTY, *NO_TEXTS, *NO_IDS], ids=str)
def test_an_input_that_is_empty_or_no_text_is_refused(client: httpx.Client, given: Any) -> None:
    assert refused(client, given)["type"] == "invalid_request_error"


def test_too_many_inputs_are_refused_by_number(client: httpx.Client) -> None:
    error = refused(client, ["x"] * 10_000)
    assert "10,000" in error["message"]
    assert error["param"] == "input"


@pytest.mark.parametrize("dimensions", [0, -1, 385, 10**9, 2**63, 2**64, "5", True, [], {}, 1.5])
def test_dimensions_out_of_range_are_refused(client: httpx.Client, dimensions: Any) -> None:
    assert refused(client, "x", dimensions=dimensions)["param"] == "dimensions"


@pytest.mark.parametrize(
    ("name", "value"),
    [("pooling", "max"), ("normalize", 1), ("encoding_format", "int8"), ("model", None), ("truncate", True)],
)
def test_other_fields_out_of_range_are_refused_by_name(client: httpx.Client, name: str, value: Any) -> None:
    assert refused(client, "x", **{name: value})["param"] == name


def test_an_input_longer_than_the_context_is_refused_and_never_cut(client: httpx.Client) -> None:
    error = refused(client, ["short", "long " * 600])
    assert error["code"] == "context_length_exceeded"
    assert "602" in error["message"]
    assert "512" in error["message"]
    assert refused(client, "x " * 500_000)["code"] == "context_length_exceeded"


def test_a_model_that_generates_does_not_embed(client: httpx.Client) -> None:
    assert refused(client, "x", model=SMOLLM2)["code"] == "unsupported_by_model"


def test_an_encoder_does_not_chat(client: httpx.Client) -> None:
    body = {"model": MINILM, "messages": [{"role": "user", "content": "Hi"}]}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text


def test_the_user_field_is_accepted_and_ignored(client: httpx.Client) -> None:
    assert (vectors(client, "x", user="somebody") == vectors(client, "x")).all()


def test_embedded_tokens_are_counted(client: httpx.Client) -> None:
    before = counted(client, "prompt_tokens_total")
    usage = embed(client, TEXTS)["usage"]
    assert counted(client, "prompt_tokens_total") - before == usage["prompt_tokens"]


def counted(client: httpx.Client, name: str) -> float:
    found = re.search(rf'^kvarn_{name}{{model_name="{MINILM}"}} (\S+)$', client.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])
