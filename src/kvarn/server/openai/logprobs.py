"""Log-probabilities in the two shapes of the OpenAI API. Tokens are bytes; their texts may be parts of characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvarn.types import TokenLogprob

if TYPE_CHECKING:
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


class LegacyLogprobs:
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


def _finite(logprob: float) -> float:
    return max(float(logprob), LOWEST)
