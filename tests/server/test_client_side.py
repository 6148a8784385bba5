"""Kvarn's own clients, the examples and the curl page against a real server."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvarn.bench.serve import Load, run_load
from tests.server.process import MINILM, ROOT, SMOLLM2, ServerProcess

pytestmark = pytest.mark.model

URL = "http://127.0.0.1:8000"
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if URL in path.read_text(encoding="utf-8")]
COMMANDS = re.findall(r"^curl .*?(?=^curl |^```)", (ROOT / "docs" / "api.md").read_text("utf-8"), re.M | re.S)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_with_an_official_client_runs(server: ServerProcess, path: Path) -> None:
    code = path.read_text(encoding="utf-8").replace(URL, server.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_there_is_an_example_for_each_official_client() -> None:
    assert [path.stem for path in EXAMPLES] == ["08_openai_client", "09_anthropic_client", "18_batch"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("command", COMMANDS, ids=[re.sub(r"\s+", " ", command)[26:60] for command in COMMANDS])
def test_a_curl_command_of_the_page_is_answered(server: ServerProcess, command: str) -> None:
    arguments = shlex.split(command.replace(URL, server.url))
    done = subprocess.run(
        [*arguments, "--fail", "--silent", "--show-error", "--noproxy", "*"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout


def test_the_load_generator_measures_a_real_server_and_sees_the_shared_prefix_in_the_cache(
    server: ServerProcess,
) -> None:
    load = Load(server.url, SMOLLM2, concurrency=4, num_requests=8, shared_prefix=64, prompt_tokens=8, max_tokens=6)
    report = asyncio.run(run_load(load))
    assert (report["succeeded"], report["failed"], report["refused_429"]) == (8, 0, 0), report
    assert 0 < report["completion_tokens"] <= 48
    assert report["prompt_tokens"] >= 8 * 72
    assert report["cached_tokens"] >= 4 * 48
    assert report["first_token_ms"]["p50"] > 0


def test_the_load_generator_counts_requests_that_a_server_refuses(server: ServerProcess) -> None:
    report = asyncio.run(run_load(Load(server.url, "no-such", concurrency=2, num_requests=4)))
    assert report["failures"] == {"status 404": 4}


def test_a_conversation_through_a_server(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "kvarn.cli.main", "chat", "--url", server.url, "-t", "0", "-n", "12"]
    done = subprocess.run(
        command, input="Name a colour.\n/help\nAnother.\n", capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert f"{SMOLLM2}, 2,048 tokens of context" in done.stderr
    assert done.stderr.count("first token after") == 2


def test_a_server_without_generating_models_says_why_it_cannot_chat(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "kvarn.cli.main", "chat", "--url", server.url, "-m", MINILM]
    done = subprocess.run(command, input="Hello\n", capture_output=True, text=True, timeout=120, check=False)
    assert "the server refused (400)" in done.stderr
    assert not done.stdout


def test_bench_serve_on_the_command_line(server: ServerProcess) -> None:
    options = ["--url", server.url, "-r", "3", "-c", "3", "-n", "4", "--prompt-tokens", "5", "--ignore-eos"]
    command = [sys.executable, "-m", "kvarn.cli.main", "bench", "serve", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["succeeded"], report["completion_tokens"]) == (3, 12)
