"""What a chat session talks with: a model loaded here, with an adapter or a collection. Knows no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from kvarn.types import SamplingParams, TokenEvent

if TYPE_CHECKING:
    from kvarn.citations.types import Retrieves
    from kvarn.llm import LLM


class Reply(Protocol):
    """The event stream of one answer; the last event has a completion."""

    def __iter__(self) -> Iterator[TokenEvent]: ...
    def __enter__(self) -> Reply: ...
    def __exit__(self, *_: object) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class ChatModel(Protocol):
    """A model loaded here, or one behind a URL."""

    def stream(self, messages: list[dict[str, str]], params: SamplingParams, /) -> Reply: ...


class LoadedChat:
    """A model loaded here."""

    def __init__(self, llm: LLM, lora: str | None, retrieve: Retrieves | None = None) -> None:
        self._llm = llm
        self._lora = lora
        self._retrieve = retrieve

    def stream(self, messages: list[dict[str, str]], params: SamplingParams, /) -> Reply:
        return self._llm.stream(messages, params, retrieve=self._retrieve, lora=self._lora)
