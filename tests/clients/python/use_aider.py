"""aider with the larger model: it asks for a change of a file, streamed, and writes the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tasks import CODER, KEY, OPENAI_URL, task

OPTIONS = (
    *("--model", f"openai/{CODER}", "--openai-api-base", OPENAI_URL, "--openai-api-key", KEY),
    *("--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--no-show-release-notes"),
    *("--no-git", "--yes-always", "--map-tokens", "0", "--edit-format", "whole", "--no-auto-lint"),
)
REQUEST = "Write a function add(a, b) that returns the sum of a and b."


@task
def a_file_is_written() -> None:
    source = Path("sums.py")
    source.write_text("# sums\n")
    command = [sys.executable, "-m", "aider", *OPTIONS, "--stream", "--message", REQUEST, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "def add" in source.read_text(), done.stdout
