"""Third-party clients, unchanged, against a running server: one script for each does what its users do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.assets import minilm
from tests.clients.installing import node_modules_of, python_of
from tests.server.process import ServerProcess

pytestmark = pytest.mark.model
FOLDER = Path(__file__).parent
SCRIPT_TIMEOUT_S = 540
# Nothing is fetched from, or told to, their authors.
QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
# Clients and the environments they are in.
PYTHON = {
    "langchain": "newest",
    "llm": "newest",
    "openai_agents": "newest",
    "pydantic_ai": "newest",
    "smolagents": "newest",
    "instructor": "instructor",
    "ollama": "ollama",
}
LARGE = {
    "aider": "aider",
    "dspy": "older",
    "guidellm": "guidellm",
    "litellm": "litellm",
    "llama_index": "older",
    "llama_index_ollama": "llama_index_ollama",
}


@pytest.mark.parametrize("client", PYTHON)
def test_a_python_client_does_what_its_users_do(served: ServerProcess, client: str, tmp_path: Path) -> None:
    run(served, [python_of(PYTHON[client]), FOLDER / "python" / f"use_{client}.py"], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("client", LARGE)
def test_a_large_python_client_does_what_its_users_do(served: ServerProcess, client: str, tmp_path: Path) -> None:
    run(served, [python_of(LARGE[client]), FOLDER / "python" / f"use_{client}.py"], tmp_path)


@pytest.mark.parametrize("client", ["ai_sdk", "anthropic", "openai"])
def test_a_javascript_client_does_what_its_users_do(served: ServerProcess, client: str, tmp_path: Path) -> None:
    packages = node_modules_of("javascript")
    scripts = shutil.copytree(FOLDER / "javascript", tmp_path / "scripts")
    (scripts / "node_modules").symlink_to(packages)  # where modules look for packages
    run(served, ["node", scripts / f"use_{client}.mjs"], tmp_path)


def run(server: ServerProcess, command: list[str | Path], home: Path) -> None:
    """Run a client's script: every task it tells of was done, and nothing that it sent was refused."""
    logged_before = len(server.log)
    done = subprocess.run(
        [*command, server.url, minilm()],
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **QUIET},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SCRIPT_TIMEOUT_S,
        check=False,
    )
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"task":')]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert told, done.stderr[-4000:]
    failed = "\n".join(f"{one['task']}:\n{one['error']}" for one in told if one["error"])
    assert not failed, failed
    assert not refused(server.log[logged_before:])


def refused(log: str) -> list[str]:
    """Lines of the access log about requests that were not served."""
    return [line for line in log.splitlines() if '"kvarn.access"' in line and json.loads(line)["status"] >= 400]
