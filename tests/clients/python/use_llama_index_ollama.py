"""LlamaIndex's classes for Ollama: completion, chat, streams, tools, schemas, embeddings."""

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.llms.ollama import Ollama
from tasks import CHAT, DIMENSIONS, EMBEDDING, MAX_TOKENS, QUESTION, URL, WEATHER, City, Verdict, follows, task

OPTIONS = {"num_predict": MAX_TOKENS}
llm = Ollama(
    model=CHAT, base_url=URL, temperature=0, context_window=2048, request_timeout=120, additional_kwargs=OPTIONS
)
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


def weather(city: City) -> str:
    """The weather of a city."""
    return f"cold in {city}"


@task
def a_stream_adds_up_to_the_answer() -> None:
    whole = llm.chat(MESSAGES).message.content
    assert whole
    assert "".join(chunk.delta or "" for chunk in llm.stream_chat(MESSAGES)) == whole


@task
def a_prompt_is_answered() -> None:
    whole = llm.complete(QUESTION).text
    assert whole
    assert "".join(chunk.delta or "" for chunk in llm.stream_complete(QUESTION)) == whole


@task
def a_tool_is_offered_and_its_call_read() -> None:
    answer = llm.chat_with_tools([FunctionTool.from_defaults(weather)], WEATHER)
    for call in llm.get_tool_calls_from_response(answer, error_on_no_tool_call=False):
        assert call.tool_name == "weather"
        assert follows(call.tool_kwargs)


@task
def a_schema_is_followed() -> None:
    assert isinstance(llm.structured_predict(Verdict, PromptTemplate("Is Oslo warm?")), Verdict)


@task
def texts_become_vectors() -> None:
    embedding = OllamaEmbedding(model_name=EMBEDDING, base_url=URL)
    assert len(embedding.get_query_embedding("the sky")) == DIMENSIONS
    assert [len(one) for one in embedding.get_text_embedding_batch(["the sky", "the sea"])] == [DIMENSIONS] * 2
