"""Claude Code and Codex: whole conversations as their command lines send them, and the command lines themselves.

recordings/*.json has the bodies of one conversation with two rounds of tool calls, structure and lengths as sent; texts
of their authors are {"filler": length}.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types import RawMessageStreamEvent
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.assets import qwen_coder
from tests.clients.installing import node_modules_of
from tests.server.process import SMOLLM2, ServerProcess, model_path
from tests.server.sse import events

pytestmark = pytest.mark.model
RECORDINGS = Path(__file__).parent / "recordings"
LIMITS = {"claude_code": "max_tokens", "codex": "max_output_tokens"}
WARNINGS = {
    "claude_code": ("ignored: context_management", "max_tokens lowered from 32000", "output_config.effort"),
    "codex": ("tools not offered to the model: namespace, web_search",),
}
EVENTS: dict[str, TypeAdapter[Any]] = {
    "claude_code": TypeAdapter(RawMessageStreamEvent),
    "codex": TypeAdapter(ResponseStreamEvent),
}
LAST = {"claude_code": ("message_stop",), "codex": ("response.completed", "response.incomplete")}
RUN_S = 1500


@pytest.fixture(scope="module")
def agent_server() -> Iterator[ServerProcess]:
    """With the context that the model was made for, as an operator would start it, and no other setting."""
    with ServerProcess("--model", f"coder={model_path(SMOLLM2)}") as server:
        yield server


@pytest.mark.parametrize("client", ["claude_code", "codex"])
def test_a_recorded_conversation_is_answered_turn_by_turn(agent_server: ServerProcess, client: str) -> None:
    recording = json.loads((RECORDINGS / f"{client}.json").read_text())
    with agent_server.client(headers=recording["headers"]) as http:
        for number, request in enumerate(recording["requests"]):
            body = filled(recording["common"] | request)
            assert begins(http, recording["path"], body, client)
            told = answer(http, recording["path"], body | {LIMITS[client]: 8}, client)
            assert told[-1]["type"] in LAST[client]
            assert num_results(body) == number + (client == "claude_code" and number == 2)


def test_the_recordings_have_what_other_servers_stumble_over() -> None:
    claude, codex = (json.loads((RECORDINGS / f"{client}.json").read_text())["common"] for client in LIMITS)
    assert claude["max_tokens"] == 32_000
    assert claude["thinking"] == {"type": "adaptive"}
    assert max(len(tool["description"]) for tool in filled(claude["tools"])) > 16_384
    assert {"context_management", "output_config"} < claude.keys()
    assert {tool["type"] for tool in codex["tools"]} == {"function", "namespace", "web_search"}
    assert {"reasoning", "client_metadata", "include"} < codex.keys()


@pytest.fixture(scope="module")
def coder() -> Iterator[ServerProcess]:
    """A model with room for a command line's prompt."""
    with ServerProcess("--model", f"coder={qwen_coder()}", config=f"request_timeout_s = {RUN_S}") as server:
        yield server


@pytest.mark.long
@pytest.mark.timeout(RUN_S)
class TestCommandLines:
    def test_claude_code_gets_its_answer(self, coder: ServerProcess, tmp_path: Path) -> None:
        variables = {"ANTHROPIC_BASE_URL": coder.url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "coder"}
        options = ("--tools", "Read", "--system-prompt", "Answer briefly.")
        told = run("claude", ("-p", "Say hello.", *options), tmp_path, variables)
        assert told.strip()
        assert '"status": 400' not in coder.log

    def test_codex_gets_its_answer(self, coder: ServerProcess, tmp_path: Path) -> None:
        instructions = tmp_path / "instructions.md"
        instructions.write_text("Answer briefly.")
        provider = f'{{name="kvarn", base_url="{coder.url}/v1", wire_api="responses"}}'
        settings = {"model": '"coder"', "model_provider": '"kvarn"', "model_providers.kvarn": provider}
        settings["model_instructions_file"] = f'"{instructions}"'
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = ("exec", *options, "--skip-git-repo-check", "--sandbox", "read-only", "Say hello.")
        assert run("codex", command, tmp_path, {}).strip()
        assert '"status": 400' not in coder.log


def run(program: str, arguments: tuple[str, ...], home: Path, variables: dict[str, str]) -> str:
    """What a command line prints, with a home of its own."""
    found = node_modules_of("command_lines") / ".bin" / program
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
    done = subprocess.run(
        [found, *arguments], cwd=home, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def begins(http: httpx.Client, path: str, body: dict[str, Any], client: str) -> bool:
    """Whether the answer to a body as it was sent begins; the client leaves after its first piece."""
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        for words in WARNINGS[client]:
            assert words in response.headers["x-kvarn-warning"]
        return any("delta" in event["type"] for event in checked(response, client))


def answer(http: httpx.Client, path: str, body: dict[str, Any], client: str) -> list[dict[str, Any]]:
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        return list(checked(response, client))


def checked(response: httpx.Response, client: str) -> Iterator[dict[str, Any]]:
    """The events, each one that the client's library knows; pings it passes over."""
    for event in events(response):
        if event["type"] != "ping":
            EVENTS[client].validate_python(event)
            yield event


def filled(value: Any) -> Any:
    """A recorded value with its fillers: as many characters as were sent, and few tokens."""
    if isinstance(value, dict):
        if value.keys() == {"filler"}:
            return "-" * value["filler"]
        return {name: filled(one) for name, one in value.items()}
    return [filled(one) for one in value] if isinstance(value, list) else value


def num_results(body: dict[str, Any]) -> int:
    items = [*body.get("input", ()), *(part for turn in body.get("messages", ()) for part in turn["content"])]
    kinds = [item.get("type") for item in items if isinstance(item, dict)]
    return sum(kind in ("tool_result", "function_call_output") for kind in kinds)
