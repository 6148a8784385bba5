"""/infill's fields by llama-server's names: what our samplers have is applied, hints pass, the rest is refused by name.

recordings/llama_vim.json and llama_vscode.json have what these editors send, by their sources, with texts of our own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chat_model import write_chat_model
from tests.server.asking import TEXT, answer, refusal
from tests.server.process import ServerProcess
from tests.server.sse import events
from tests.server.test_infill import FIM, body, infill

RECORDINGS = Path(__file__).parent / "recordings"
PATH = "/infill"
Z = ord("z")  # letters are their own tokens here


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = write_chat_model(tmp_path_factory.mktemp("models") / "coder", **FIM)
    with ServerProcess("--model", path, "--context", "512") as process, process.client() as http:
        yield http


def recording(editor: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((RECORDINGS / f"{editor}.json").read_text(encoding="utf-8"))
    return read


def test_llama_vim_gets_what_it_shows(coder: httpx.Client) -> None:
    sent = recording("llama_vim")
    warmed = coder.post(PATH, json=sent["warm-up"], headers=sent["headers"])
    assert (warmed.status_code, warmed.json()) == (200, {})  # it asked for no field
    response = coder.post(PATH, json=sent["completion"], headers=sent["headers"])
    assert response.status_code == 200, response.text
    got = response.json()
    assert list(got) == sent["completion"]["response_fields"]
    assert isinstance(got["content"], str)
    assert got["timings/predicted_n"] > 0
    assert got["timings/predicted_per_second"] > 0
    assert response.headers["x-kvarn-warning"] == "ignored: the sampler infill"


def test_llama_vscode_gets_its_three_answers(coder: httpx.Client) -> None:
    sent = recording("llama_vscode")
    warmed = coder.post(PATH, json=sent["warm-up"], headers=sent["headers"])
    assert (warmed.status_code, warmed.json()["content"]) == (200, "")
    response = coder.post(PATH, json=sent["completion"], headers=sent["headers"])
    assert response.status_code == 200, response.text
    assert [one["index"] for one in response.json()] == [0, 1, 2]
    assert len({one["content"] for one in response.json()}) > 1  # sampled independently
    assert all(one["tokens_predicted"] > 0 for one in response.json())


SAMPLED = {"n_predict": 24, "temperature": 1.0, "seed": 7, "ignore_eos": True}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 3}, {"top_k": 3}),
        ({"typical_p": 0.4}, {"typical_p": 0.4}),
        ({"repeat_penalty": 1.8, "repeat_last_n": 0}, {}),
        ({"repeat_penalty": 1.8, "repeat_last_n": -1}, {"repetition_penalty": 1.8}),
        ({"repeat_penalty": 1.8, "repeat_last_n": 4}, {"repetition_penalty": 1.8, "penalty_window": 4}),
        ({"dry_multiplier": 9.0, "dry_allowed_length": 1}, {"dry_multiplier": 9.0, "dry_allowed_length": 1}),
        ({"dry_multiplier": 9.0, "dry_penalty_last_n": 0}, {}),
        (
            {"dry_multiplier": 9.0, "dry_allowed_length": 1, "dry_penalty_last_n": 6, "repeat_last_n": 64},
            {"dry_multiplier": 9.0, "dry_allowed_length": 1, "penalty_window": 6},
        ),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.01}, {"xtc_probability": 1.0, "xtc_threshold": 0.01}),
        ({"logit_bias": [[Z, 100], [65, False]]}, {"logit_bias": {str(Z): 100, "65": -100}}),
        ({"logit_bias": {"z": 100, "65": False}}, {"logit_bias": {str(Z): 100, "65": -100}}),
        ({"samplers": ["top_k"], "top_k": 3, "temperature": 0.1, "top_p": 0.1}, {"top_k": 3, "top_p": 1}),
        ({"samplers": "kt", "top_k": 3, "temperature": 0.3, "min_p": 0.9}, {"top_k": 3, "temperature": 0.3}),
        ({"samplers": ["temperature", "penalties"], "repeat_penalty": 1.8}, {"repetition_penalty": 1.8}),
        ({"json_schema": {"enum": ["abc"]}, "ignore_eos": False}, {"guided_regex": '"abc"', "ignore_eos": False}),
        ({"grammar": 'root ::= [xy]{3} "!"', "ignore_eos": False}, {"guided_regex": "[xy]{3}!", "ignore_eos": False}),
        (
            {"grammar": "%llguidance {}\nstart: /[xy]{3}!/", "ignore_eos": False},
            {"guided_regex": "[xy]{3}!", "ignore_eos": False},
        ),
    ],
)
def test_a_field_does_what_the_same_one_of_completions_does(
    coder: httpx.Client, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    same = {name: value for name, value in SAMPLED.items() if name != "n_predict"} | {"top_p": 1, "min_p": 0}
    wanted = answer(coder, TEXT, body(suffix="):", max_tokens=24, **same | ours))["choices"][0]
    got = answer(coder, PATH, infill(**SAMPLED | {"top_p": 1, "min_p": 0} | theirs))
    assert got["content"] == wanted["text"]


@pytest.mark.parametrize(
    "fields",
    [
        {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1},
        {"dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "top_n_sigma": -1.0, "adaptive_target": -1.0},
        {"min_keep": 0, "n_probs": 0, "grammar": "", "lora": [], "post_sampling_probs": False, "grammar_lazy": False},
        {"cache_prompt": False, "id_slot": 3, "n_keep": -1, "n_discard": 0, "timings_per_token": True},
        {"speculative.n_max": 16, "speculative.n_min": 0, "speculative.p_min": 0.75, "n_cache_reuse": 256},
        {"t_max_prompt_ms": 1, "t_max_predict_ms": 0, "n_indent": 0, "samplers": None, "logit_bias": None},
        {"stop": [], "seed": 4294967295, "repeat_penalty": 1.0, "repeat_last_n": 64, "dry_multiplier": 0.0},
        {"n_predict": 8, "max_tokens": 1},
    ],
)
def test_hints_and_neutral_values_change_nothing(coder: httpx.Client, fields: dict[str, Any]) -> None:
    assert answer(coder, PATH, infill(**fields))["content"] == answer(coder, PATH, infill())["content"]


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"mirostat": 2}, "mirostat", "mirostat is 2; there is no such sampler here; leave it out or give 0"),
        ({"top_n_sigma": 1.5}, "top_n_sigma", "no such sampler"),
        ({"dynatemp_range": 0.5}, "dynatemp_range", "no such sampler"),
        ({"adaptive_target": 0.3}, "adaptive_target", "no such sampler"),
        ({"min_keep": 5}, "min_keep", "min_keep is 5"),
        ({"post_sampling_probs": True}, "post_sampling_probs", "give false"),
        ({"grammar_lazy": True}, "grammar_lazy", "give false"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora", "0 adapters"),
        ({"samplers": ["top_k", "sharpen"]}, "samplers", "dry, top_k"),
        ({"n_probs": 50}, "n_probs", "20"),
        ({"n_cmpl": 100}, "n_cmpl", "at most 16 answers"),
        ({"logit_bias": [["z", 500]]}, "logit_bias.0", "from -100 to 100"),
        ({"logit_bias": [[300_000, 1]]}, "logit_bias", "300000"),
        ({"grammar": "root ::= missing"}, "grammar", "no GBNF with a rule root"),
        ({"grammar": 'root ::= "a"\nx ::= %'}, "grammar", "line 2"),
        ({"grammar": "root ::= " + "(" * 8000}, "grammar", "no GBNF"),
        ({"grammar": "".join(f'r{n} ::= "a"\n' for n in range(300))}, "grammar", "300 rules"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema", "both given"),
        (
            {"dry_multiplier": 1.0, "dry_penalty_last_n": 8, "repeat_penalty": 1.1, "repeat_last_n": 64},
            "dry_penalty_last_n",
            "give both the same number",
        ),
        ({"input_extra": [{"text": "x"}] * 1025}, "input_extra", "1,024"),
        ({"input_extra": [{"text": "x", "filename": "y" * 4097}]}, "input_extra.0.filename", "4,096"),
        ({"input_extra": [{"text": "x", "filename": "y" * 4000}] * 5}, "input_extra", "more than 4,096 tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    coder: httpx.Client, fields: dict[str, Any], field: str, words: str
) -> None:
    error = refusal(coder, PATH, infill(**fields))
    assert error["param"] == field, error
    assert words in error["message"]


def test_probabilities_and_tokens_come_on_request(coder: httpx.Client) -> None:
    got = answer(coder, PATH, infill(n_probs=2, return_tokens=True))
    scores = got["completion_probabilities"]
    assert [one["id"] for one in scores] == got["tokens"]
    assert {len(one["top_logprobs"]) for one in scores} == {2}
    assert all(one["top_logprobs"][0]["id"] == one["id"] for one in scores)  # greedy
    assert "".join(one["token"] for one in scores).startswith(got["content"])
    with coder.stream("POST", PATH, json=infill(n_probs=2, stream=True)) as response:
        *parts, last = events(response)
    assert [one["id"] for part in parts for one in part["completion_probabilities"]] == got["tokens"]
    assert "completion_probabilities" not in last


LAST = "e" * 200  # long enough for the server to notice the end before the model gets there, on a busy machine too
LINES = {"grammar": rf'root ::= "a\n" "    b\n" "  c\n" "d\n" "{LAST}\n"', "n_predict": 240}


@pytest.mark.parametrize(
    ("limit", "content"),
    [
        ({}, f"a\n    b\n  c\nd\n{LAST}\n"),
        ({"n_indent": 1}, "a\n    b\n  c\n"),
        ({"n_indent": 3}, "a\n    b\n  "),
        ({"n_indent": 5}, "a\n    "),
    ],
)
def test_an_answer_ends_at_a_line_that_is_indented_less(
    coder: httpx.Client, limit: dict[str, int], content: str
) -> None:
    got = answer(coder, PATH, infill(**LINES, **limit))
    assert got["content"] == content
    with coder.stream("POST", PATH, json=infill(**LINES, **limit, stream=True)) as response:
        read = list(events(response))
    assert "".join(one["content"] for one in read) == content
    assert {got["stop_type"], read[-1]["stop_type"]} == ({"limit"} if limit else {"eos"})
    assert not limit or got["tokens_predicted"] <= len(content) + len(LAST) // 2  # it was not written to its end


def test_an_answer_ends_with_its_line_when_its_time_is_up(coder: httpx.Client) -> None:
    endless = {"grammar": r'root ::= ([a-c]{20} "\n"){10}', "n_predict": 300}
    got = answer(coder, PATH, infill(**endless, t_max_predict_ms=1))
    assert got["stop_type"] == "limit"
    assert got["content"].endswith("\n")
    assert got["content"].count("\n") < answer(coder, PATH, infill(**endless))["content"].count("\n")


def test_an_answer_is_as_long_as_the_context_allows(coder: httpx.Client) -> None:
    response = coder.post(PATH, json=infill(n_predict=100_000, ignore_eos=True))
    assert response.status_code == 200, response.text
    assert "n_predict lowered from 100000" in response.headers["x-kvarn-warning"]
