"""llm, the command line, with an extra OpenAI model: a prompt, a schema, tools of Python, a conversation, a vector."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tasks import CHAT, KEY, OPENAI_URL, QUESTION, WEATHER, task

MODELS = f"""
- model_id: kvarn
  model_name: {CHAT}
  api_base: {OPENAI_URL}
  api_key_name: kvarn
  supports_schema: true
  supports_tools: true
"""
TOOL = "def weather(city: str) -> str:\n    'The weather of a city.'\n    return 'cold'\n"
home = Path(tempfile.mkdtemp())
(home / "extra-openai-models.yaml").write_text(MODELS)
(home / "keys.json").write_text(json.dumps({"kvarn": KEY}))


def llm(*arguments: str) -> str:
    environment = os.environ | {"LLM_USER_PATH": str(home)}
    command = [sys.executable, "-m", "llm", "-m", "kvarn", "-o", "temperature", "0", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@task
def a_stream_adds_up_to_the_answer() -> None:
    whole = llm("--no-stream", "-o", "max_tokens", "12", QUESTION)
    assert whole
    assert llm("-o", "max_tokens", "12", QUESTION) == whole


@task
def a_conversation_goes_on() -> None:
    assert llm("-c", "-o", "max_tokens", "12", "Name another.")


@task
def a_schema_is_followed() -> None:
    assert "is_warm" in json.loads(llm("--schema", "is_warm bool", "-o", "max_tokens", "100", "Is Oslo warm?"))


@task
def tools_may_be_offered() -> None:
    assert llm("--functions", TOOL, "-o", "max_tokens", "60", WEATHER)
