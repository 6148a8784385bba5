"""Tokens become text, text meets stop strings, and both become events. Knows no cache and no backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvarn.decoding.decoder import Commit, CommittedToken
from kvarn.diffusion import CanvasView
from kvarn.engine.finish import finish_after
from kvarn.engine.stop_strings import StopMatcher
from kvarn.request import Finish, Request
from kvarn.types import FinishReason, TokenEvent


class TextDecoder(Protocol):
    """kvarn.tokenizer.incremental.IncrementalDecoder, as this module needs it."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(slots=True)
class _AnswerText:
    """The text of one request so far."""

    decoder: TextDecoder
    matcher: StopMatcher
    parts: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reading:
    """One commit as text: texts[i] became certain with tokens[i] of the commit."""

    commit: Commit
    texts: tuple[str, ...]
    finish: Finish | None


class Stream:
    """Readers of all open requests."""

    def __init__(self, make_decoder: Callable[[bool, frozenset[int]], TextDecoder], eos_ids: tuple[int, ...]) -> None:
        """make_decoder(starts_text, visible_ids) makes the reader of one answer."""
        self._make_decoder = make_decoder
        self._eos_ids = eos_ids
        self._readers: dict[str, _AnswerText] = {}

    def open(self, request: Request, *, starts_text: bool, visible_ids: frozenset[int] = frozenset()) -> None:
        """Begin to read a request; starts_text: its answer is a text of its own, not the rest of the prompt.

        visible_ids: control tokens that count as text, such as the mark before a tool call.
        """
        stop = request.params.stop
        assert isinstance(stop, tuple)
        self._readers[request.id] = _AnswerText(self._make_decoder(starts_text, visible_ids), StopMatcher(stop))

    def read(self, commits: Iterable[Commit]) -> list[Reading]:
        """Turn committed tokens into text and find out who is finished; tokens after an end are dropped."""
        return [self._read(commit) for commit in commits]

    def events(self, readings: Iterable[Reading]) -> list[TokenEvent]:
        """One event per token, the last one with the completion; called when the ends have been applied."""
        events: list[TokenEvent] = []
        for reading in readings:
            events.extend(self._events(reading))
        return events

    def end(self, requests: Sequence[Request]) -> list[TokenEvent]:
        """Last events of requests that ended without a token: cancelled or failed."""
        return [self._last_event(request, self._flush(self._readers[request.id])) for request in requests]

    def _read(self, commit: Commit) -> Reading:
        reader, request = self._readers[commit.request.id], commit.request
        if request.params.prefill_only and request.num_computed + commit.num_computed >= len(request.prompt_ids):
            return Reading(replace(commit, tokens=()), (), Finish(FinishReason.LENGTH))
        texts: list[str] = []
        for index, token in enumerate(commit.tokens, start=request.num_output):
            finish = finish_after(request, token.token_id, index + 1, self._eos_ids)
            text, finish = self._advance(reader, token, finish, is_early=index < request.params.min_tokens)
            texts.append(text)
            if finish is not None:
                kept = replace(commit, tokens=commit.tokens[: len(texts)])
                return Reading(kept, tuple(texts), finish)
        return Reading(commit, tuple(texts), None)

    def _advance(
        self, reader: _AnswerText, token: CommittedToken, finish: Finish | None, *, is_early: bool
    ) -> tuple[str, Finish | None]:
        """Text that became certain with one token; a stop string found in it is an earlier end."""
        is_stop_token = finish is not None and finish.reason is FinishReason.STOP
        piece = "" if is_stop_token else reader.decoder.push(token.token_id)
        if token.ends_answer and not is_stop_token:
            finish = Finish(FinishReason.STOP)
        text = piece if is_early else reader.matcher.push(piece)
        if finish is not None and reader.matcher.found is None:
            text += self._flush(reader)
        if reader.matcher.found is not None:
            finish = Finish(FinishReason.STOP, reader.matcher.found)
        return text, finish

    def _flush(self, reader: _AnswerText) -> str:
        """Bytes and text held back, once nothing more will come."""
        text = reader.matcher.push(reader.decoder.flush())
        return text + reader.matcher.flush()

    def _events(self, reading: Reading) -> list[TokenEvent]:
        request = reading.commit.request
        tokens = reading.commit.tokens
        if request.is_ended and not tokens:  # failed, or only the prompt was wanted
            return self.end([request])
        canvas = reading.commit.canvas
        events = [] if canvas is None else [_canvas_event(request, canvas)]
        num_told = len(events)
        for index, token in enumerate(tokens, start=request.num_output - len(tokens)):
            text = reading.texts[len(events) - num_told]
            if request.is_ended and len(events) - num_told == len(tokens) - 1:
                events.append(self._last_event(request, text))
            else:
                self._readers[request.id].parts.append(text)
                logprob, name = token.logprob, request.id
                events.append(TokenEvent(text, token.token_id, index, None, logprob, None, name, request.choice))
        return events

    def _last_event(self, request: Request, text: str) -> TokenEvent:
        reader = self._readers.pop(request.id)
        has_token = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and request.num_output > 0
        return TokenEvent(
            text=text,
            token_id=request.token_ids[-1] if has_token else None,
            index=request.num_output - 1 if has_token else request.num_output,
            finish_reason=request.finish_reason,
            logprob=request.logprobs[-1] if has_token and request.logprobs else None,
            completion=request.completion("".join([*reader.parts, text])),
            request_id=request.id,
            choice=request.choice,
        )


def _canvas_event(request: Request, canvas: CanvasView) -> TokenEvent:
    return TokenEvent("", None, request.num_output, request_id=request.id, choice=request.choice, canvas=canvas)
