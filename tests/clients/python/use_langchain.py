"""LangChain and LangGraph: chat models of all three dialects, completions, embeddings, an agent."""

from __future__ import annotations

from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from langgraph.prebuilt import create_react_agent
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
    Verdict,
    follows,
    task,
    task_of,
)

OPTIONS: dict[str, Any] = {"model": CHAT, "api_key": KEY, "max_tokens": MAX_TOKENS, "max_retries": 0, "temperature": 0}
chat = ChatOpenAI(base_url=OPENAI_URL, **OPTIONS)


@tool
def weather(city: City) -> str:
    """The weather of a city."""
    return f"cold in {city}"


def use(dialect: str, model: Any) -> None:
    @task_of(dialect)
    def a_stream_adds_up_to_the_answer() -> None:
        whole = model.invoke(QUESTION).text
        assert whole
        assert "".join(chunk.text for chunk in model.stream(QUESTION)) == whole

    @task_of(dialect)
    def a_tool_is_called() -> None:
        calls = model.bind_tools([weather], tool_choice="any").invoke(WEATHER).tool_calls
        assert calls
        assert all(call["name"] == "weather" and follows(call["args"]) for call in calls)

    @task_of(dialect)
    def a_schema_is_followed() -> None:
        assert isinstance(model.with_structured_output(Verdict).invoke("Is Oslo warm?"), Verdict)


use("chat", chat)
use("responses", ChatOpenAI(base_url=OPENAI_URL, use_responses_api=True, use_previous_response_id=True, **OPTIONS))
use("messages", ChatAnthropic(base_url=URL, **OPTIONS))


@task
def an_effort_may_be_asked_for() -> None:
    assert ChatOpenAI(base_url=OPENAI_URL, reasoning_effort="low", **OPTIONS).invoke(QUESTION).text


@task
def a_text_is_completed() -> None:
    assert OpenAI(base_url=OPENAI_URL, model=CHAT, api_key=KEY, max_tokens=8).invoke("The sky is")


@task
def a_text_becomes_a_vector() -> None:
    embeddings = OpenAIEmbeddings(base_url=OPENAI_URL, model=EMBEDDING, api_key=KEY, check_embedding_ctx_length=False)
    assert len(embeddings.embed_query("the sky")) == DIMENSIONS


@task
def an_agent_reads_what_its_tool_said() -> None:
    asked = [("user", WEATHER)]
    called = chat.bind_tools([weather], tool_choice="any").invoke(asked)
    told = [weather.invoke(call) for call in called.tool_calls]
    state = create_react_agent(chat, [weather]).invoke({"messages": [*asked, called, *told]}, {"recursion_limit": 8})
    assert state["messages"][-1].text
