"""openai-agents: runs and streams with a tool over responses and chat, and a stored response continued."""

from __future__ import annotations

from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI
from tasks import CHAT, KEY, OPENAI_URL, QUESTION, WEATHER, City, task, task_of

asked: list[City] = []


@function_tool
def weather(city: City) -> str:
    """The weather of a city."""
    asked.append(city)
    return f"cold in {city}"


def agent(model: Any, **settings: Any) -> Agent:
    tools = [weather] if "tool_choice" in settings else []
    client = AsyncOpenAI(base_url=OPENAI_URL, api_key=KEY, max_retries=0)
    return Agent("a", model=model(CHAT, client), tools=tools, model_settings=ModelSettings(temperature=0, **settings))


def use(dialect: str, model: Any) -> None:
    @task_of(dialect)
    async def a_run_ends() -> None:
        assert (await Runner.run(agent(model), QUESTION)).final_output

    @task_of(dialect)
    async def a_streamed_run_ends_the_same() -> None:
        whole = (await Runner.run(agent(model), QUESTION)).final_output
        streamed = Runner.run_streamed(agent(model), QUESTION)
        assert [event async for event in streamed.stream_events()]
        assert streamed.final_output == whole

    @task_of(dialect)
    async def a_tool_is_called() -> None:
        asked.clear()
        assert (await Runner.run(agent(model, tool_choice="required"), WEATHER, max_turns=4)).final_output
        assert asked


use("responses", OpenAIResponsesModel)
use("chat", OpenAIChatCompletionsModel)


@task
async def a_stored_response_is_continued() -> None:
    first = await Runner.run(agent(OpenAIResponsesModel), QUESTION)
    assert first.last_response_id
    second = await Runner.run(agent(OpenAIResponsesModel), QUESTION, previous_response_id=first.last_response_id)
    assert second.final_output
