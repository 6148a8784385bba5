"""/api: bodies become chats, answers become Ollama's lines; then both over a real socket."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import httpx
import pytest

from kvarn.server.api.ollama.errors import field_name
from kvarn.server.api.ollama.schema import GenerateBody, OllamaChatBody, OllamaOptions
from kvarn.server.api.ollama.translation import chat_fields, chat_messages, model_id, sampling_fields, thinking_kwargs
from kvarn.server.api.ollama.writer import LineWriter, Shape
from kvarn.server.api.schema import InvalidField
from kvarn.server.chat.delta_stream import AnswerPart
from kvarn.server.chat.output.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallStart
from kvarn.types import Completion, FinishReason, Timings, Usage
from tests.server.keyed import KeyedServer
from tests.server.process import MINILM, SMOLLM2

CHAT, GENERATE = "/api/chat", "/api/generate"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
HI = [{"role": "user", "content": "Say hi."}]
DELTAS: tuple[Delta, ...] = (
    ReasoningDelta("Let me"),
    ReasoningDelta(" see."),
    ContentDelta("I will"),
    ContentDelta(" look."),
    ToolCallStart(0, "call_a", "weather"),
    ToolCallArguments(0, '{"city": '),
    ToolCallArguments(0, '"Oslo"}'),
    ToolCallStart(1, "call_b", "time"),
    ToolCallArguments(1, "{}"),
)


def body(*messages: Any, **fields: Any) -> OllamaChatBody:
    return OllamaChatBody.model_validate({"model": "m", "messages": list(messages), **fields})


def completion(reason: FinishReason = FinishReason.STOP) -> Completion:
    return Completion("", (), reason, Usage(20, 7), Timings(0.5, 1.0, 2.0, 1.5), seed=1)


def writer(shape: Shape = "chat") -> LineWriter:
    return LineWriter("m", shape, cast("Any", None), load_s=0.25)


def lines_of(deltas: Sequence[Delta], cut: int, shape: Shape = "chat") -> list[dict[str, Any]]:
    one = writer(shape)
    return [*one.lines(AnswerPart(deltas[:cut])), *one.lines(AnswerPart(deltas[cut:], completion=completion()))]


class TestConversation:
    def test_a_result_belongs_to_the_oldest_call_of_its_tool(self) -> None:
        calls = [{"function": {"name": name, "arguments": {"at": at}}} for at, name in enumerate(("a", "b", "a"))]
        results = [{"role": "tool", "tool_name": name, "content": "x"} for name in ("b", "a", "a")]
        asked = {"role": "assistant", "tool_calls": calls}
        first, *told = chat_messages(body(asked, *results).messages or ())
        ids = [call["id"] for call in first["tool_calls"]]
        assert [one["tool_call_id"] for one in told] == [ids[1], ids[0], ids[2]]
        assert json.loads(first["tool_calls"][2]["function"]["arguments"]) == {"at": 2}

    def test_a_result_that_names_its_call_belongs_to_it(self) -> None:
        calls = [{"id": one, "function": {"name": "a"}} for one in ("x", "y")]
        result = {"role": "tool", "tool_call_id": "y", "content": "1"}
        messages = chat_messages(body({"role": "assistant", "tool_calls": calls}, result).messages or ())
        assert messages[1]["tool_call_id"] == "y"

    def test_a_result_without_its_call_is_named_by_its_place(self) -> None:
        with pytest.raises(InvalidField) as error:
            chat_messages(body(*HI, {"role": "tool", "tool_name": "a", "content": "x"}).messages or ())
        assert error.value.field == "messages.1.tool_name"

    def test_options_have_the_names_of_v1(self) -> None:
        given = {"num_predict": 5, "repeat_last_n": 64, "repeat_penalty": 1.1, "seed": 7, "stop": ["a"], "num_gpu": 1}
        wanted = {"max_tokens": 5, "penalty_window": 64, "repeat_penalty": 1.1, "seed": 7, "stop": ["a"]}
        assert sampling_fields(OllamaOptions.model_validate(given)) == wanted

    @pytest.mark.parametrize("number", [-2, -1, 0])
    def test_no_limit_and_no_seed_are_numbers_too(self, number: int) -> None:
        assert sampling_fields(OllamaOptions.model_validate({"num_predict": number, "seed": -1})) == {}

    def test_a_window_of_nothing_turns_the_penalties_off(self) -> None:
        fields = sampling_fields(OllamaOptions.model_validate({"repeat_last_n": 0, "repeat_penalty": 1.5}))
        assert fields == {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}

    def test_a_schema_is_a_response_format(self) -> None:
        schema = {"type": "object"}
        formats = [chat_fields(body(*HI, format=one), HI).get("response_format") for one in ("json", schema, "")]
        named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        assert formats == [{"type": "json_object"}, named, None]

    @pytest.mark.parametrize(
        ("think", "template", "kwargs"),
        [
            (None, "enable_thinking", {}),
            (True, "enable_thinking", {"enable_thinking": True}),
            (False, "enable_thinking", {"enable_thinking": False}),
            ("high", "reasoning_effort", {"reasoning_effort": "high"}),
        ],
    )
    def test_thinking_is_told_to_the_template(self, think: Any, template: str, kwargs: dict[str, Any]) -> None:
        assert thinking_kwargs(think, template, can_think=True) == (kwargs, None)

    def test_a_model_that_always_thinks_says_so(self) -> None:
        assert thinking_kwargs(False, "", can_think=True)[1] == "ignored: think, because this model always thinks"

    def test_latest_is_the_model_without_a_tag(self) -> None:
        asked = {"a": "a", "a:latest": "a", "b:latest": "b:latest", "b": "b:latest", "c:latest": "c"}
        assert {one: model_id(one, ["a", "b:latest"]) for one in asked} == asked

    @pytest.mark.parametrize(("value", "unloads"), [(0, True), ("0s", True), ("0", True), (-1, False), ("5m", False)])
    def test_keep_alive_of_nothing_asks_to_unload(self, value: Any, unloads: bool) -> None:
        assert GenerateBody.model_validate({"model": "m", "keep_alive": value}).asks_to_unload is unloads

    def test_errors_have_the_names_of_the_body(self) -> None:
        names = ("max_tokens", "response_format.json_schema", "messages.0.content", "stop.3")
        wanted = ["options.num_predict", "format", "messages.0.content", "options.stop.3"]
        assert [field_name(one) for one in names] == wanted


class TestLines:
    @pytest.mark.parametrize("cut", range(len(DELTAS) + 1))
    def test_they_add_up_to_the_whole_answer_wherever_it_is_cut(self, cut: int) -> None:
        *parts, last = [line["message"] for line in lines_of(DELTAS, cut)]
        whole = writer().whole(AnswerPart(DELTAS, completion=completion()))["message"]
        assert "".join(part["content"] for part in parts) == whole["content"] == "I will look."
        assert "".join(part.get("thinking", "") for part in parts) == whole["thinking"] == "Let me see."
        calls = [call for part in [*parts, last] for call in part.get("tool_calls", ())]
        assert calls == whole["tool_calls"]
        assert calls[0] == {"id": "call_a", "function": {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}}

    def test_only_the_last_is_done_and_has_nanoseconds(self) -> None:
        *lines, last = lines_of(DELTAS, 3)
        assert not any(line["done"] for line in lines)
        assert last["done_reason"] == "stop"
        times = {"total_duration": 3_750_000_000, "load_duration": 250_000_000, "prompt_eval_duration": 1_000_000_000}
        counts = {"eval_duration": 2_000_000_000, "prompt_eval_count": 20, "eval_count": 7}
        assert (times | counts).items() <= last.items()

    def test_a_call_that_is_not_whole_is_left_out(self) -> None:
        part = AnswerPart(DELTAS[:6], completion=completion(FinishReason.LENGTH))
        whole = writer().whole(part)
        assert whole["done_reason"] == "length"
        assert "tool_calls" not in whole["message"]

    def test_a_prompt_is_answered_in_another_shape(self) -> None:
        whole = writer("generate").whole(AnswerPart(DELTAS[:4], completion=completion()))
        assert (whole["response"], whole["thinking"]) == ("I will look.", "Let me see.")


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.mark.model
class TestServer:
    @pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.0, "seed": 7, "top_k": 20}])
    def test_the_same_seed_gives_the_bytes_of_v1(self, client: httpx.Client, options: dict[str, Any]) -> None:
        asked = {"model": SMOLLM2, "messages": HI}
        written = lines(client.post(CHAT, json={**asked, "options": {**options, "num_predict": 24}}))
        text = "".join(line["message"]["content"] for line in written)
        whole = client.post("/v1/chat/completions", json={**asked, **options, "max_tokens": 24}).json()
        assert text == whole["choices"][0]["message"]["content"]
        assert written[-1]["eval_count"] == whole["usage"]["completion_tokens"]

    def test_a_raw_prompt_is_continued_as_it_is(self, client: httpx.Client) -> None:
        asked = {"model": SMOLLM2, "prompt": "The capital of France is"}
        options = {"temperature": 0, "num_predict": 6}
        raw = client.post(GENERATE, json={**asked, "raw": True, "stream": False, "options": options}).json()
        whole = client.post("/v1/completions", json={**asked, "temperature": 0, "max_tokens": 6}).json()
        assert raw["response"] == whole["choices"][0]["text"]
        assert raw["done_reason"] == "length"

    def test_json_is_json_and_streams_are_lines(self, client: httpx.Client) -> None:
        only = {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
        options = {"num_predict": 200, "temperature": 0}
        asked = {"model": SMOLLM2, "prompt": "Is it?", "format": {"type": "object", **only}, "options": options}
        response = client.post(GENERATE, json=asked)
        assert response.headers["content-type"] == "application/x-ndjson"
        assert isinstance(json.loads("".join(line["response"] for line in lines(response)))["a"], bool)

    def test_logprobs_come_with_the_tokens(self, client: httpx.Client) -> None:
        asked = {"model": SMOLLM2, "messages": HI, "options": {"num_predict": 4}, "logprobs": True, "top_logprobs": 2}
        scores = [one for line in lines(client.post(CHAT, json=asked)) for one in line.get("logprobs", ())]
        assert [len(one["top_logprobs"]) for one in scores] == [2] * 4

    def test_models_have_what_editors_require(self, client: httpx.Client) -> None:
        tags = {one["name"]: one for one in client.get("/api/tags").json()["models"]}
        details = {"format", "family", "families", "parameter_size", "quantization_level"}
        assert tags.keys() == {SMOLLM2, MINILM}
        assert all(details <= one["details"].keys() for one in tags.values())
        assert (tags[SMOLLM2]["details"]["parameter_size"], len(tags[SMOLLM2]["digest"])) == ("134.5M", 64)
        shown = [client.post("/api/show", json={key: SMOLLM2}).json() for key in ("model", "name")]
        assert shown[0] == shown[1]
        assert shown[0]["model_info"]["llama.context_length"] == 2048
        assert shown[0]["capabilities"] == ["completion", "tools"]
        assert client.post("/api/show", json={"model": MINILM}).json()["capabilities"] == ["embedding"]
        assert client.get("/api/ps").json()["models"][0]["name"] == SMOLLM2
        assert client.head("/api/tags").status_code == 200
        assert client.get("/api/version").json()["version"].count(".") == 2

    def test_a_model_may_be_asked_to_load(self, client: httpx.Client) -> None:
        (line,) = lines(client.post(GENERATE, json={"model": f"{SMOLLM2}:latest"}))
        assert (line["done"], line["done_reason"], line["response"]) == (True, "load", "")
        assert client.post("/api/pull", json={"model": SMOLLM2}).json() == {"status": "success"}

    def test_hints_that_cannot_change_the_answer_are_taken(self, client: httpx.Client) -> None:
        hints = {"num_keep": 4, "num_gpu": 99, "num_thread": 2, "use_mmap": True, "low_vram": False, "main_gpu": 0}
        asked = {
            "model": SMOLLM2,
            "messages": HI,
            "shift": False,
            "truncate": True,
            "keep_alive": "5m",
            "stream": False,
        }
        options = {"num_predict": 4, "temperature": 0}
        texts = [
            client.post(CHAT, json=asked | {"options": options | given}).json()["message"]["content"]
            for given in (hints, {})
        ]
        assert texts[0] == texts[1] != ""

    def test_a_null_is_what_was_not_given(self, client: httpx.Client) -> None:
        few = {"options": {"num_predict": 2, "seed": None, "stop": None}, "stream": False}
        call = {"id": None, "function": {"name": "f", "arguments": None}}
        said = [{**HI[0], "tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        said += [{"role": "tool", "tool_name": None, "content": "done"}]
        answer = client.post(CHAT, json={"model": SMOLLM2, "messages": said, "tools": None, "format": None, **few})
        assert answer.json()["eval_count"] == 2, answer.text
        asked = {"model": SMOLLM2, "prompt": "hi", "system": None, "suffix": None, "keep_alive": None, **few}
        assert client.post(GENERATE, json=asked).json()["eval_count"] == 2
        assert client.post(GENERATE, json={**asked, "prompt": None}).json()["done_reason"] == "load"

    def test_an_older_client_asks_for_no_vector_to_load_the_model(self, client: httpx.Client) -> None:
        assert client.post("/api/embeddings", json={"model": MINILM}).json() == {"embedding": []}

    @pytest.mark.parametrize("value", [300, -1, 0.5, "5m", "1h30m", "-1", "1.5s", ".5h", "24h", "300"])
    def test_keep_alive_is_seconds_or_a_duration(self, client: httpx.Client, value: object) -> None:
        assert client.post(GENERATE, json={"model": SMOLLM2, "keep_alive": value}).status_code == 200

    def test_a_model_is_unloaded_by_keep_alive_and_loaded_again(self, client: httpx.Client) -> None:
        assert client.post(GENERATE, json={"model": SMOLLM2, "stream": False}).json()["done_reason"] == "load"
        (line,) = lines(client.post(CHAT, json={"model": SMOLLM2, "keep_alive": 0}))
        assert (line["done"], line["done_reason"], line["message"]["content"]) == (True, "unload", "")
        assert SMOLLM2 not in [one["name"] for one in client.get("/api/ps").json()["models"]]
        again = {"model": SMOLLM2, "messages": HI, "stream": False, "options": {"num_predict": 2}}
        assert client.post(CHAT, json=again).json()["eval_count"] == 2

    @pytest.mark.parametrize(
        ("path", "fields", "status", "words"),
        [
            (CHAT, {"messages": HI, "options": {"num_ctx": 4096}}, 400, "options.num_ctx is 4,096"),
            (CHAT, {"messages": HI, "options": {"top_p": 2}}, 400, "options.top_p"),
            (CHAT, {"messages": HI, "options": {"mirostat": 1}}, 400, "options.mirostat"),
            (CHAT, {"messages": HI, "options": {"no_such": 1}}, 400, "options.no_such"),
            (CHAT, {"messages": [{**HI[0], "images": ["eA=="]}]}, 400, "messages.0.images"),
            (CHAT, {"messages": HI, "think": True}, 400, "think"),
            (CHAT, {"messages": HI, "format": "yaml"}, 400, "format"),
            (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {}}]}, 400, "tools.0.function.name"),
            (CHAT, {"messages": HI, "model": "llama3"}, 404, SMOLLM2),
            (CHAT, {"messages": HI, "model": MINILM}, 400, "model"),
            (CHAT, {"messages": HI, "shift": True}, 400, "shift"),
            (CHAT, {"messages": HI, "keep_alive": "banana"}, 400, "keep_alive"),
            (CHAT, {"messages": HI, "keep_alive": ""}, 400, "keep_alive"),
            (CHAT, {"messages": HI, "width": 512}, 400, "width"),
            (CHAT, {"messages": HI, "options": {"rope_frequency_base": 1e4}}, 400, "options.rope_frequency_base"),
            (GENERATE, {"prompt": "x", "context": [1]}, 400, "context"),
            (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "template"),
            (GENERATE, {"prompt": "x", "raw": True, "system": "s"}, 400, "system"),
            (GENERATE, {"prompt": "x", "suffix": "y"}, 400, "suffix"),
            (GENERATE, {"prompt": "word " * 3000}, 400, "prompt"),
            ("/api/embed", {"input": "x"}, 400, "model"),
            ("/api/show", {"model": "llama3"}, 404, SMOLLM2),
            ("/api/pull", {"model": "llama3"}, 404, "no alias"),
            ("/api/pull", {"model": ""}, 400, "model"),
            ("/api/copy", {}, 403, "operator"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_what_cannot_be_done_is_refused_by_name(
        self, client: httpx.Client, path: str, fields: dict[str, Any], status: int, words: str
    ) -> None:
        response = client.post(path, json={"model": SMOLLM2, **fields})
        assert response.status_code == status, response.text
        assert words in response.json()["error"]
        assert response.json().keys() == {"error"}

    def test_other_keys_unload_and_pull_nothing(self, keyed: KeyedServer) -> None:
        with keyed.client("anna") as http:
            for path, fields in ((CHAT, {"keep_alive": 0}), ("/api/pull", {"model": "hf:org/other"})):
                refused = http.post(path, json={"model": http.get("/v1/models").json()["data"][0]["id"], **fields})
                assert refused.status_code == 403, refused.text
                assert "admin = true" in refused.json()["error"]

    def test_nothing_is_told_without_a_key(self, keyed: KeyedServer) -> None:
        with keyed.process.client() as http:
            for method, path in (
                ("GET", "tags"),
                ("GET", "version"),
                ("GET", "ps"),
                ("POST", "chat"),
                ("POST", "show"),
            ):
                response = http.request(method, f"/api/{path}", json={} if method == "POST" else None)
                assert response.status_code == 401, path
                assert response.json().keys() == {"error"}


class TestEditors:
    """What editors send and read, written from their published calls; none of them runs here."""

    def test_zed_lists_shows_and_chats(self, client: httpx.Client) -> None:
        listed = client.get("/api/tags").json()["models"]
        for model in listed:
            assert {"name", "modified_at", "size", "digest", "details"} <= model.keys()
            assert {"format", "family", "parameter_size", "quantization_level"} <= model["details"].keys()
        name = next(model["name"] for model in listed if model["name"].startswith(SMOLLM2))
        shown = client.post("/api/show", json={"model": name}).json()
        info = shown["model_info"]
        context = info[f"{info['general.architecture']}.context_length"]
        body = {"model": name, "messages": HI, "stream": True, "keep_alive": -1, "tools": [], "think": None}
        body["options"] = {"num_ctx": context, "num_predict": 4, "stop": [], "temperature": 1.0, "top_p": None}
        *parts, last = lines(client.post(CHAT, json=body))
        assert all({"model", "created_at", "message", "done"} <= part.keys() for part in parts)
        assert all(part["message"]["role"] == "assistant" for part in parts)
        assert (last["done"], last["eval_count"]) == (True, 4)
        assert last["prompt_eval_count"] > 0

    def test_continue_shows_chats_completes_embeds_and_pulls(self, client: httpx.Client) -> None:
        shown = client.post("/api/show", json={"name": SMOLLM2}).json()
        assert ".Suffix" not in shown["template"]  # else it would ask for what this model cannot do
        assert isinstance(shown["parameters"], str)
        options = {"num_predict": 4, "num_ctx": 256, "temperature": 0.01, "stop": ["\n\n\n"], "mirostat": None}
        body = {"model": SMOLLM2, "messages": HI, "options": options, "keep_alive": 1800, "stream": True}
        assert lines(client.post(CHAT, json=body))[-1]["done"]
        raw = {"model": SMOLLM2, "prompt": "def add(a, b):", "raw": True, "options": options, "keep_alive": 1800}
        assert "".join(line["response"] for line in lines(client.post(GENERATE, json=raw)))
        embedded = client.post("/api/embed", json={"model": MINILM, "input": ["a", "b"]}).json()
        assert len(embedded["embeddings"]) == 2
        assert lines(client.post("/api/pull", json={"name": SMOLLM2}))[-1]["status"] == "success"

    def test_copilot_compares_the_version_and_chats_under_v1(self, client: httpx.Client) -> None:
        version = tuple(int(part) for part in client.get("/api/version").json()["version"].split("."))
        assert version >= (0, 6, 4)
        able = []
        for model in client.get("/api/tags").json()["models"]:
            shown = client.post("/api/show", json={"model": model["model"]}).json()
            info = shown["model_info"]
            assert info[f"{info['general.architecture']}.context_length"] > 0
            able += [model["model"]] if "tools" in shown["capabilities"] else []
        assert [name.partition(":")[0] for name in able] == [SMOLLM2]
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
        body = {"model": able[0], "messages": HI, "max_tokens": 4, "stream": True, "tools": [tool], "n": 1, "top_p": 1}
        response = client.post("/v1/chat/completions", json=body | {"temperature": 0.1})
        assert response.status_code == 200, response.text
        assert response.text.rstrip().endswith("[DONE]")
