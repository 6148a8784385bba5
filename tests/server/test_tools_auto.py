"""Tools in `auto` on Qwen2.5-Coder-0.5B, which writes its calls as JSON, bare or in a fence, and not in its format."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.tool_tasks import TASKS, TOOLS
from benchmarks.tools_auto import measure

from tests.assets import qwen_coder
from tests.conftest import Size
from tests.server.asking import CHAT, answer, chunks
from tests.server.process import ServerProcess
from tests.server.test_tools import told, whole

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def coder() -> Iterator[ServerProcess]:
    with ServerProcess("--model", qwen_coder(), "--context", "4096") as process:
        yield process


def test_calls_that_the_model_writes_as_json_are_calls(coder: ServerProcess, size: Size) -> None:
    num_tasks = size(2, len(TASKS))
    figures = measure(coder.url, None, 200, TASKS[:num_tasks])
    assert figures["recognised"] >= 0.8 * num_tasks
    assert figures["valid_arguments"] == figures["recognised"]


def test_a_stream_of_such_calls_adds_up_to_the_whole_answer(coder: ServerProcess) -> None:
    with coder.client() as http:
        body = {
            "model": http.get("/v1/models").json()["data"][0]["id"],
            "messages": [{"role": "user", "content": "What are 12 pounds worth in dollars?"}],
            "tools": [TOOLS["convert_currency"]],
            "max_tokens": 80,
            "temperature": 0,
        }
        (choice,) = answer(http, CHAT, body)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert told(chunks(http, CHAT, body)) == whole(choice)
        (single,) = answer(http, CHAT, body | {"parallel_tool_calls": False})["choices"]
        assert [call["name"] for call in whole(single)["tool_calls"]] == ["convert_currency"]
        assert single["finish_reason"] == "tool_calls"
