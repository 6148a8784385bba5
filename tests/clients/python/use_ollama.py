"""Ollama's own Python client, and LangChain's for it: lists, chat, streams, tools, schemas, embeddings."""

from __future__ import annotations

from typing import Any

import ollama
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from tasks import CHAT, DIMENSIONS, EMBEDDING, MAX_TOKENS, QUESTION, URL, WEATHER, City, Verdict, follows, task

OPTIONS: dict[str, Any] = {"temperature": 0, "num_predict": MAX_TOKENS}
SAID = [{"role": "user", "content": QUESTION}]
client = ollama.Client(host=URL)
chat = ChatOllama(model=CHAT, base_url=URL, temperature=0, num_predict=MAX_TOKENS)


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Oslo or Paris
    """
    return f"cold in {city}"


@tool
def weather(city: City) -> str:
    """The weather of a city."""
    return f"cold in {city}"


@task
def models_are_listed_and_shown() -> None:
    assert {CHAT, EMBEDDING} <= {one.model for one in client.list().models}
    shown = client.show(CHAT)
    assert shown.capabilities is not None
    assert "tools" in shown.capabilities
    assert shown.modelinfo is not None
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] > 0


@task
def a_stream_adds_up_to_the_answer() -> None:
    whole = client.chat(CHAT, SAID, options=OPTIONS)
    parts = list(client.chat(CHAT, SAID, options=OPTIONS, stream=True))
    assert whole.message.content
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert parts[-1].eval_count == whole.eval_count
    assert client.ps().models


@task
def a_prompt_is_answered_and_continued() -> None:
    assert client.generate(CHAT, QUESTION, options=OPTIONS).response
    parts = client.generate(CHAT, "The sky is", raw=True, stream=True, options={"num_predict": 4})
    assert "".join(part.response for part in parts)


@task
def a_function_of_python_is_a_tool_and_its_result_is_read() -> None:
    asked = client.chat(CHAT, [{"role": "user", "content": WEATHER}], tools=[get_weather], options=OPTIONS)
    call = {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    said = [{"role": "user", "content": WEATHER}, asked.message, {"role": "assistant", "tool_calls": [call]}]
    result = {"role": "tool", "tool_name": "get_weather", "content": "cold"}
    assert client.chat(CHAT, [*said, result], options=OPTIONS).message.content


@task
def a_schema_is_followed() -> None:
    said = [{"role": "user", "content": "Is Oslo warm?"}]
    answer = client.chat(CHAT, said, format=Verdict.model_json_schema(), options=OPTIONS)
    assert Verdict.model_validate_json(answer.message.content or "")


@task
def texts_become_vectors() -> None:
    assert [len(one) for one in client.embed(EMBEDDING, ["the sky", "the sea"]).embeddings] == [DIMENSIONS] * 2
    assert len(client.embeddings(EMBEDDING, "the sky").embedding) == DIMENSIONS


@task
def langchain_streams_and_answers() -> None:
    whole = chat.invoke(QUESTION).text
    assert whole
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == whole
    assert OllamaLLM(model=CHAT, base_url=URL, num_predict=8).invoke("The sky is")


@task
def langchain_offers_tools_and_follows_schemas() -> None:
    for call in chat.bind_tools([weather]).invoke(WEATHER).tool_calls:
        assert follows(call["args"])
    assert isinstance(chat.with_structured_output(Verdict).invoke("Is Oslo warm?"), Verdict)


@task
def langchain_embeds() -> None:
    assert len(OllamaEmbeddings(model=EMBEDDING, base_url=URL).embed_query("the sky")) == DIMENSIONS
