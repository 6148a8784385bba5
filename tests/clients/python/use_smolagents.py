"""smolagents: its model whole and streamed, an agent that calls tools, and one that writes code."""

from __future__ import annotations

import json
from typing import Any, Literal

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
from tasks import CHAT, KEY, MAX_TOKENS, OPENAI_URL, QUESTION, WEATHER, follows, task

model = OpenAIServerModel(model_id=CHAT, api_base=OPENAI_URL, api_key=KEY, max_tokens=MAX_TOKENS, temperature=0)
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]


@tool
def weather(city: Literal["Oslo", "Paris"]) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"cold in {city}"


def answered(agent: Any, question: str) -> bool:
    """Whether the model was asked and answered, whatever so small a one made of it."""
    agent.run(question)
    return any(getattr(step, "model_output_message", None) for step in agent.memory.steps)


def arguments(call: Any) -> Any:
    given = call.function.arguments
    return json.loads(given) if isinstance(given, str) else given


@task
def a_stream_adds_up_to_the_answer() -> None:
    whole = model(MESSAGES).content
    assert whole
    assert "".join(delta.content or "" for delta in model.generate_stream(MESSAGES)) == whole


@task
def a_tool_is_called() -> None:
    asked = [{"role": "user", "content": [{"type": "text", "text": WEATHER}]}]
    calls = model(asked, tools_to_call_from=[weather]).tool_calls
    assert calls
    assert all(call.function.name == "weather" and follows(arguments(call)) for call in calls)


@task
def an_agent_that_calls_tools_runs() -> None:
    assert answered(ToolCallingAgent([weather], model, max_steps=1, verbosity_level=0), WEATHER)


@task
def an_agent_that_writes_code_runs() -> None:
    assert answered(CodeAgent([], model, max_steps=1, verbosity_level=0), "What is 2 + 2?")
