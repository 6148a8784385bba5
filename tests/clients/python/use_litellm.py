"""LiteLLM: its providers of all dialects, streams, tools, an effort, responses, embeddings."""

from __future__ import annotations

import json
from typing import Any

import litellm
from tasks import (
    CHAT,
    DIMENSIONS,
    EMBEDDING,
    KEY,
    MAX_TOKENS,
    OPENAI_URL,
    QUESTION,
    URL,
    WEATHER,
    City,
    follows,
    task,
    task_of,
)

OPTIONS: dict[str, Any] = {"api_key": KEY, "max_tokens": MAX_TOKENS, "temperature": 0, "num_retries": 0}
SCHEMA = {"type": "object", "properties": {"city": {"enum": list(City)}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": SCHEMA}}]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def use(provider: str, address: str) -> None:
    asked = {"model": f"{provider}/{CHAT}", "api_base": address, **OPTIONS}

    @task_of(provider)
    def a_stream_adds_up_to_the_answer() -> None:
        whole = litellm.completion(messages=user(QUESTION), **asked).choices[0].message.content
        assert whole
        chunks = litellm.completion(messages=user(QUESTION), stream=True, **asked)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole

    @task_of(provider)
    def a_tool_is_called() -> None:
        answer = litellm.completion(messages=user(WEATHER), tools=TOOLS, tool_choice="required", **asked)
        calls = answer.choices[0].message.tool_calls
        assert calls
        assert all(follows(json.loads(call.function.arguments)) for call in calls)


use("openai", OPENAI_URL)
use("hosted_vllm", OPENAI_URL)
use("anthropic", URL)


@task
def an_effort_may_be_asked_for() -> None:
    effort = {"reasoning_effort": "low", "allowed_openai_params": ["reasoning_effort"]}
    answer = litellm.completion(f"openai/{CHAT}", user(QUESTION), api_base=OPENAI_URL, **effort, **OPTIONS)
    assert answer.choices[0].message.content


@task
def a_text_is_completed() -> None:
    asked = {"prompt": "The sky is", "api_base": OPENAI_URL, "api_key": KEY, "max_tokens": 8}
    assert litellm.text_completion(model=f"text-completion-openai/{CHAT}", **asked).choices[0].text


@task
def a_response_is_given() -> None:
    asked = {"input": QUESTION, "api_base": OPENAI_URL, "api_key": KEY, "max_output_tokens": 12}
    assert litellm.responses(model=f"openai/{CHAT}", **asked).output[0].content[0].text


@task
def a_text_becomes_a_vector() -> None:
    found = litellm.embedding(model=f"openai/{EMBEDDING}", input=["the sky"], api_base=OPENAI_URL, api_key=KEY)
    assert len(found.data[0]["embedding"]) == DIMENSIONS
