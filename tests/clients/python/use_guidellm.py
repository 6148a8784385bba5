"""guidellm: a short synchronous benchmark with made-up prompts, counted with the tokenizer of a local folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tasks import CHAT, TOKENIZER, URL, task

NUM_REQUESTS = 3


@task
def a_benchmark_counts_its_requests() -> None:
    report = Path("report.json")
    options = ["--target", URL, "--model", CHAT, "--rate-type", "synchronous", "--max-requests", str(NUM_REQUESTS)]
    data = ["--data", "prompt_tokens=32,output_tokens=8", "--processor", TOKENIZER, "--output-path", str(report)]
    done = subprocess.run(
        [sys.executable, "-m", "guidellm", "benchmark", *options, *data], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (found,) = json.loads(report.read_text())["benchmarks"]
    requests = found["requests"]
    assert len(requests["successful"]) == NUM_REQUESTS
    assert not requests["errored"]
