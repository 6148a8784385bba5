"""pydantic-ai: agents over chat, responses and messages: text, streams, tools, typed output."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from tasks import CHAT, KEY, MAX_TOKENS, OPENAI_URL, QUESTION, URL, Verdict, task_of

SETTINGS = ModelSettings(max_tokens=MAX_TOKENS, temperature=0)


def use(dialect: str, model: Any) -> None:
    @task_of(dialect)
    async def a_stream_adds_up_to_the_answer() -> None:
        agent = Agent(model(), model_settings=SETTINGS)
        whole = (await agent.run(QUESTION)).output
        assert whole
        async with agent.run_stream(QUESTION) as stream:
            texts = [text async for text in stream.stream_text(debounce_by=None)]
        assert texts[-1] == whole

    @task_of(dialect)
    async def a_typed_answer_is_typed() -> None:
        agent = Agent(model(), model_settings=SETTINGS, output_type=Verdict)
        assert isinstance((await agent.run("Is Oslo warm?")).output, Verdict)

    @task_of(dialect)
    async def a_conversation_goes_on() -> None:
        agent = Agent(model(), model_settings=SETTINGS)
        first = await agent.run(QUESTION)
        assert (await agent.run("Name another.", message_history=first.all_messages())).output


def open_ai() -> OpenAIProvider:
    return OpenAIProvider(base_url=OPENAI_URL, api_key=KEY)


use("chat", lambda: OpenAIChatModel(CHAT, provider=open_ai()))
use("responses", lambda: OpenAIResponsesModel(CHAT, provider=open_ai()))
use("messages", lambda: AnthropicModel(CHAT, provider=AnthropicProvider(base_url=URL, api_key=KEY)))
