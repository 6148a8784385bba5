"""Log-probabilities in the two shapes of the OpenAI API. Tokens are bytes; their texts may be parts of characters."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvarn.types import TokenLogprob

if TYPE_CHECKING:
    from kvarn.tokenizer.incremental import IncrementalDecoder
    from kvarn.tokenizer.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no minus infinity


def chat_logprobs(tokenizer: Tokenizer, scores: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """The shape of chat completions."""
    return [
        {
            **_chat_token(tokenizer, one.token_id, one.logprob),
            "top_logprobs": [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in one.top],
        }
        for one in scores
    ]


def prompt_logprobs(tokenizer: Tokenizer, scores: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """The same for a prompt, whose first token has none."""
    return [None, *chat_logprobs(tokenizer, scores)]


class TextScores:
    """Finds the scores of the tokens that a part of an answer's text was made of, in whichever order they come.

    A token counts if any of its bytes went into the part; it is given out once. Control tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, decoder: IncrementalDecoder) -> None:
        """decoder: a fresh one, that reads the tokens as the engine does."""
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()  # characters [start, end) and the score

    def add(self, scores: Iterable[TokenLogprob]) -> None:
        """The next tokens; to be called before the parts that they are in are taken."""
        for score in scores:
            text, data = self._decoder.push(score.token_id), self._tokenizer.token_bytes(score.token_id)
            if not text and _is_whole(data):
                continue
            self._utf8.decode(data)
            start, self._offset = self._offset, self._offset + len(text)
            is_inside_character = bool(self._utf8.getstate()[0])
            self._waiting.append((start, self._offset + is_inside_character, score))

    def take(self, start: int, end: int) -> list[TokenLogprob]:
        """Those of the characters [start, end); what stands before them and was not taken is dropped."""
        taken: list[TokenLogprob] = []
        while self._waiting and self._waiting[0][0] < end:
            _, token_end, score = self._waiting.popleft()
            if token_end > start:
                taken.append(score)
        return taken


class LegacyLogprobsWriter:
    """The shape of text completions: lists side by side, with offsets into the text."""

    def __init__(self, tokenizer: Tokenizer, *, offset: int = 0, starts_text: bool = False) -> None:
        from kvarn.tokenizer.incremental import IncrementalDecoder

        self._tokenizer = tokenizer
        self._reader = IncrementalDecoder(tokenizer, at_start=starts_text)
        self._offset = offset
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, token_id: int, score: TokenLogprob | None) -> None:
        """One more token; score is None for the first one of a prompt."""
        text = legacy_text(self._tokenizer, token_id)
        self.tokens.append(text)
        self.text_offset.append(self._offset)
        self._offset += len(self._reader.push(token_id))
        self.token_logprobs.append(None if score is None else _finite(score.logprob))
        self.top_logprobs.append(None if score is None else self._top(text, score))

    def fields(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }

    def take(self) -> dict[str, Any]:
        """What was added since the last time, for a chunk of a stream."""
        taken = self.fields()
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return taken

    def _top(self, text: str, score: TokenLogprob) -> dict[str, float]:
        best = {legacy_text(self._tokenizer, token_id): _finite(logprob) for token_id, logprob in score.top}
        return {**best, text: _finite(score.logprob)}


def legacy_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; one that is no whole characters as `bytes:\\x..`, as OpenAI writes it."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _is_whole(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _finite(logprob: float) -> float:
    return max(LOWEST, float(logprob))  # in this order NaN, too, becomes a number
