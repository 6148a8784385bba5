"""instructor: typed answers by tools and by schema, in all three dialects, whole and in parts."""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
from tasks import CHAT, KEY, MAX_TOKENS, OPENAI_URL, URL, Verdict, task

ASKED: dict[str, Any] = {
    "model": CHAT,
    "response_model": Verdict,
    "messages": [{"role": "user", "content": "Is Oslo warm?"}],
    "max_tokens": MAX_TOKENS,
    "extra_body": {"temperature": 0},
}
open_ai = openai.OpenAI(base_url=OPENAI_URL, api_key=KEY, max_retries=0)


@task
def by_a_tool() -> None:
    assert isinstance(instructor.from_openai(open_ai).create(**ASKED, max_retries=1), Verdict)


@task
def by_a_schema() -> None:
    client = instructor.from_openai(open_ai, mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(client.create(**ASKED, max_retries=1), Verdict)


@task
def by_a_tool_of_responses() -> None:
    client = instructor.from_openai(open_ai, mode=instructor.Mode.RESPONSES_TOOLS)
    assert isinstance(client.create(**ASKED, max_retries=1), Verdict)


@task
def by_a_tool_of_messages() -> None:
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0))
    assert isinstance(client.create(**ASKED, max_retries=1), Verdict)


@task
def in_parts() -> None:
    parts = list(instructor.from_openai(open_ai).create_partial(**ASKED))
    assert len(parts) > 1
    assert Verdict.model_validate(parts[-1].model_dump())
