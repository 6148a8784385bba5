"""The text of a request as its reader takes it from the tokens: the engine's thread does nothing for it until the end.

engine's thread    appends to request.token_ids; closes request.text before the token that ends the answer
reader             takes what is there, unless the text is closed: the rest comes with the last event
"""

from __future__ import annotations

from dataclasses import replace

from kvarn.engine.stream import AnswerText
from kvarn.request import Request
from kvarn.types import TokenEvent


class PolledText:
    """How far one request has been read."""

    __slots__ = ("_decoder", "_num_characters", "_num_read", "_request")

    def __init__(self, request: Request) -> None:
        answer: AnswerText = request.text
        assert answer.reader is not None
        self._request = request
        self._decoder = answer.reader
        self._num_read = len(request.prompt_ids)
        self._num_characters = 0

    def poll(self) -> TokenEvent | None:
        """All that was said since the last time, as one event."""
        request = self._request
        ids = request.token_ids[self._num_read :]
        if not ids or request.text.is_closed:  # asked after the ids were taken: none of them is a stop token then
            return None
        self._num_read += len(ids)
        text = self._decoder.push_all(ids)
        self._num_characters += len(text)
        index = self._num_read - len(request.prompt_ids) - 1
        return TokenEvent(text, ids[-1], index, None, None, None, request.id, request.choice, None, len(ids) - 1)

    def last(self, event: TokenEvent) -> TokenEvent:
        """The last event, which has the whole text, with what is left of it."""
        num_left = len(self._request.token_ids) - self._num_read - (event.token_id is not None)
        return replace(event, text=event.text[self._num_characters :], num_more=max(num_left, 0))
