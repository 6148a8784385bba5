"""Fill in the middle over HTTP: suffix, control tokens in prompts, /infill; on small models with and without tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.chat_model import write_chat_model
from tests.server.asking import TEXT, answer, chunks, joined, refusal
from tests.server.process import ServerProcess
from tests.server.sse import events

PREFIX, SUFFIX, MIDDLE = 257, 258, 259
FIM = {
    "tokenizer.ggml.fim_pre_token_id": PREFIX,
    "tokenizer.ggml.fim_suf_token_id": SUFFIX,
    "tokenizer.ggml.fim_mid_token_id": MIDDLE,
}


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with the model coder, which has the tokens, and plain, which has none."""
    folder = tmp_path_factory.mktemp("models")
    coder, plain = write_chat_model(folder / "coder", **FIM), write_chat_model(folder / "plain")
    with ServerProcess("--model", coder, "--model", plain, "--context", "512") as process, process.client() as http:
        yield http


def body(prompt: Any = "def f(", **fields: Any) -> dict[str, Any]:
    return {"model": "coder", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields


def infill(**fields: Any) -> dict[str, Any]:
    return {"input_prefix": "def f(", "input_suffix": "):", "n_predict": 8, "temperature": 0} | fields


def marked(prefix: str, suffix: str) -> list[int]:
    return [PREFIX, *prefix.encode(), SUFFIX, *suffix.encode(), MIDDLE]


def test_a_suffix_is_a_prompt_with_the_models_tokens(coder: httpx.Client) -> None:
    before = answer(coder, "/tokenize", {"model": "coder", "prompt": "def"})["tokens"]
    after = answer(coder, "/tokenize", {"model": "coder", "prompt": "end"})["tokens"]
    asked = answer(coder, TEXT, body("def", suffix="end"))
    by_hand = answer(coder, TEXT, body([PREFIX, *before, SUFFIX, *after, MIDDLE]))
    assert asked["usage"]["prompt_tokens"] == 9
    assert asked["choices"][0]["text"] == by_hand["choices"][0]["text"]
    assert joined(chunks(coder, TEXT, body("def", suffix="end"))) == asked["choices"][0]["text"]
    again = answer(coder, "/infill", infill(input_prefix="def", input_suffix="end"))
    assert again["content"] == asked["choices"][0]["text"]


@pytest.mark.parametrize("token_id", [PREFIX, SUFFIX, MIDDLE])
def test_the_middle_ends_at_the_models_own_tokens(coder: httpx.Client, token_id: int) -> None:
    insisting = {"logit_bias": {str(token_id): 100}}
    (choice,) = answer(coder, TEXT, body(suffix="):", **insisting))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    (choice,) = answer(coder, TEXT, body([PREFIX, SUFFIX, MIDDLE], **insisting))["choices"]
    assert choice["finish_reason"] == "stop"
    (choice,) = answer(coder, TEXT, body(**insisting))["choices"]
    assert choice["finish_reason"] == "length"  # no middle was asked for


def test_control_tokens_in_a_prompt_are_text_unless_the_caller_says_so(coder: httpx.Client) -> None:
    text = "<|user|>def<|assistant|>"
    assert answer(coder, TEXT, body(text))["usage"]["prompt_tokens"] == len(text)
    assert answer(coder, TEXT, body(text, parse_special=False))["usage"]["prompt_tokens"] == len(text)
    assert answer(coder, TEXT, body(text, parse_special=True))["usage"]["prompt_tokens"] == 5
    counted = answer(coder, "/tokenize", {"model": "coder", "prompt": text, "parse_special": True})
    assert counted["tokens"][0] == PREFIX
    assert counted["count"] == 5


@pytest.mark.parametrize("path", [TEXT, "/infill"])
def test_a_model_without_the_tokens_refuses_by_name(coder: httpx.Client, path: str) -> None:
    asked = body(model="plain", suffix="):") if path == TEXT else infill(model="plain")
    error = refusal(coder, path, asked)
    assert error["code"] == "unsupported_by_model"
    assert error["param"] == ("suffix" if path == TEXT else "input_suffix")
    assert "no tokens for filling in the middle" in error["message"]
    answer(coder, TEXT, body(model="plain", suffix=""))  # nothing follows: the same as leaving it out


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, 2], "suffix": "x"}, "suffix"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"suffix": "x", "parse_special": True}, "parse_special"),
        ({"suffix": 3}, "suffix"),
        ({"suffix": "x" * 2000}, "prompt"),  # with what follows it
    ],
)
def test_what_makes_no_sense_with_a_suffix_is_refused(coder: httpx.Client, fields: Any, param: str) -> None:
    assert refusal(coder, TEXT, body(**fields))["param"] == param


def test_infill_answers_as_llama_server_does(coder: httpx.Client) -> None:
    got = answer(coder, "/infill", infill())
    assert got["stop"] is True
    assert got["stop_type"] in ("limit", "eos")
    assert got["tokens_evaluated"] == len(marked("def f(", "):"))
    assert 1 <= got["tokens_predicted"] <= 8
    assert got["timings"]["prompt_n"] + got["timings"]["cache_n"] == got["tokens_evaluated"]
    with coder.stream("POST", "/infill", json=infill(stream=True)) as response:
        read = list(events(response))
    assert "".join(event["content"] for event in read) == got["content"]
    assert [event["stop"] for event in read] == [False] * (len(read) - 1) + [True]


def test_infill_takes_what_editors_send(coder: httpx.Client) -> None:
    editors = {
        **{"samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "n_indent": 4, "t_max_prompt_ms": 500},
        **{
            "t_max_predict_ms": 1000,
            "response_fields": ["tokens_evaluated", "timings/prompt_n"],
            "top_k": 40,
            "top_p": 0.9,
        },
        **{"stop": ["\n"], "seed": -1, "id_slot": 0},
    }
    extra = [{"text": "x = 1\n", "filename": "a.py", "time": 7}, {"text": "y = 2\n"}]
    got = answer(coder, "/infill", infill(prompt="x", input_extra=extra, **editors))
    text = "\n\n--- snippet ---\n\nx = 1\n\n\n--- snippet ---\n\ny = 2\n"
    assert got["tokens_evaluated"] == len(text) + len(marked("def f(x", "):"))
    warmed = answer(coder, "/infill", infill(n_predict=0))
    assert (warmed["content"], warmed["stop_type"]) == ("", "limit")


def test_other_files_give_way_to_what_is_asked(coder: httpx.Client) -> None:
    got = answer(coder, "/infill", infill(input_extra=[{"text": "x = 1\n" * 400}]))
    assert got["tokens_evaluated"] == 512 - 8
    assert refusal(coder, "/infill", infill(input_prefix="x" * 600))["code"] == "context_length_exceeded"
    assert refusal(coder, "/infill", infill(n_predict=-2))["param"] == "n_predict"
