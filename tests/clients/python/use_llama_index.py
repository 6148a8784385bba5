"""LlamaIndex (openai-like): completion, chat, streams, tools, structured prediction, an index over embeddings."""

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from tasks import CHAT, EMBEDDING, KEY, MAX_TOKENS, OPENAI_URL, QUESTION, WEATHER, City, Verdict, follows, task

llm = OpenAILike(
    model=CHAT,
    api_base=OPENAI_URL,
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=MAX_TOKENS,
    context_window=2048,
    temperature=0,
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
def a_text_is_completed() -> None:
    completing = OpenAILike(model=CHAT, api_base=OPENAI_URL, api_key=KEY, is_chat_model=False, max_tokens=8)
    assert completing.complete("The sky is").text


@task
def a_tool_is_called() -> None:
    tools = [FunctionTool.from_defaults(weather)]
    calls = llm.get_tool_calls_from_response(llm.chat_with_tools(tools, WEATHER, tool_required=True))
    assert calls
    assert all(call.tool_name == "weather" and follows(call.tool_kwargs) for call in calls)


@task
def a_schema_is_followed() -> None:
    assert isinstance(llm.structured_predict(Verdict, PromptTemplate("Is Oslo warm?")), Verdict)


@task
def an_index_finds_and_answers() -> None:
    embedding = OpenAILikeEmbedding(model_name=EMBEDDING, api_base=OPENAI_URL, api_key=KEY)
    documents = [Document(text="The sky over Oslo is green."), Document(text="Cats sleep all day.")]
    cut = [SentenceSplitter(chunk_size=64, chunk_overlap=0, tokenizer=str.split)]
    index = VectorStoreIndex.from_documents(documents, embed_model=embedding, transformations=cut)
    answer = index.as_query_engine(llm=llm, similarity_top_k=1).query("What is above Oslo?")
    assert "sky" in answer.source_nodes[0].get_content()
    assert str(answer)
