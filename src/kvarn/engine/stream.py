"""Tokens become text, text meets stop strings, and both become events. Knows no cache and no backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvarn.decoding.decoder import Commit, CommittedToken, failed_commit
from kvarn.diffusion import CanvasView
from kvarn.engine.launching.decode_rows import PlainTokens
from kvarn.engine.stop_strings import StopMatcher
from kvarn.engine.submission import Submission
from kvarn.request import Finish, Request
from kvarn.types import FinishReason, TokenEvent

log = logging.getLogger("kvarn.engine")

MAX_NAMED = 4  # tokens in an error; a diffusion model commits a block of them


class TextDecoder(Protocol):
    """kvarn.tokenizer.incremental.IncrementalDecoder, as this module needs it."""

    def push(self, token_id: int) -> str: ...

    def push_all(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


@dataclass(slots=True)
class AnswerText:
    """The text of one request so far; kept as request.text."""

    decoder: TextDecoder
    matcher: StopMatcher
    is_deferred: bool = False  # read when the answer ends
    parts: list[str] = field(default_factory=list)
    reader: TextDecoder | None = None  # for a reader on another thread: engine.delivery
    is_closed: bool = False  # it ends with the next token, or has ended


class Stream:
    """Turns what requests commit into text and events."""

    def __init__(self, make_decoder: Callable[[bool, frozenset[int]], TextDecoder], eos_ids: tuple[int, ...]) -> None:
        """make_decoder(starts_text, visible_ids) makes the text decoder of one answer."""
        self._make_decoder = make_decoder
        self._eos_ids = eos_ids

    def open(self, request: Request, submission: Submission) -> None:
        """Prepare the text of an answer."""
        request.is_polled, stop = submission.is_polled, request.params.stop
        assert isinstance(stop, tuple)
        # What a constraint allows is the text as it is: the space before its first word is kept.
        starts_text = submission.starts_text and submission.params.constraint is None
        decoder = self._make_decoder(starts_text, submission.visible_ids)
        request.text = AnswerText(decoder, StopMatcher(stop), is_deferred=request.is_silent)
        if request.is_polled:
            request.text.reader = self._make_decoder(starts_text, submission.visible_ids)

    def tell(
        self, commits: Iterable[Commit], apply: Callable[[Iterable[Commit]], None]
    ) -> tuple[list[Commit], list[TokenEvent]]:
        """Commits with their text, and the events of them once they are applied."""
        read = self.read(commits)
        apply(read)
        return read, self.events(read)

    def tell_plain(self, plain: PlainTokens) -> tuple[list[TokenEvent], list[Commit]]:
        """The events of tokens that were appended already; the commits end requests whose text cannot be read."""
        events: list[TokenEvent] = []
        failed: list[Commit] = []
        for request, token_id in zip(plain.requests, plain.token_ids, strict=True):
            answer: AnswerText = request.text
            if answer.is_deferred:
                continue
            try:
                text = answer.decoder.push(token_id)
            except BaseException as error:
                failed.append(_unreadable(request, [token_id], error))
                continue
            answer.parts.append(text)
            index = len(request.token_ids) - len(request.prompt_ids) - 1
            events.append(TokenEvent(text, token_id, index, None, None, None, request.id, request.choice))
        return events, failed

    def read(self, commits: Iterable[Commit]) -> list[Commit]:
        """Add texts and ends to commits; tokens after an end are dropped. What cannot be read fails its request."""
        return [self._read_alone(commit) for commit in commits]

    def events(self, commits: Iterable[Commit]) -> list[TokenEvent]:
        """One event per token, the last one with the completion; called when the ends have been applied."""
        events: list[TokenEvent] = []
        for commit in commits:
            events.extend(self._events(commit))
        return events

    def end(self, requests: Sequence[Request]) -> list[TokenEvent]:
        """Last events of requests that ended without a token: cancelled or failed."""
        return [self._last_event(request, self._rest(request)) for request in requests]

    def _read_alone(self, commit: Commit) -> Commit:
        try:
            return self._read(commit)
        except BaseException as error:
            return _unreadable(commit.request, [token.token_id for token in commit.tokens[:MAX_NAMED]], error)

    def _rest(self, request: Request) -> str:
        """The text held back of an ended request, if there is one that can be read."""
        try:
            before = self._deferred(Commit(request, 0), 0) if request.text.is_deferred else ""
            return before + self._flush(request.text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # what failed it before, mostly; its end is told all the same
            log.exception("the end of the text of request %s cannot be read", request.id)
            return ""

    def _read(self, commit: Commit) -> Commit:
        request, tokens, finish = commit.request, commit.tokens, None
        if request.params.prefill_only and request.num_computed + commit.num_computed >= len(request.prompt_ids):
            return commit._replace(tokens=(), finish=Finish(FinishReason.LENGTH))
        if not tokens:
            return commit
        texts: list[str] = []
        answer: AnswerText = request.text
        for index, token in enumerate(tokens, start=request.num_output):
            finish = finish_after(request, token.token_id, index + 1, self._eos_ids)
            if answer.is_deferred and finish is None and not token.ends_answer:
                texts.append("")
                continue
            before = self._deferred(commit, len(texts)) if answer.is_deferred else ""
            text, finish = self._advance(answer, token, finish, is_early=index < request.params.min_tokens)
            texts.append(before + text)
            if finish is not None:
                answer.is_closed = True
                break
        if answer.is_deferred and finish is None:
            return commit
        _, num_computed, _, prompt_logprobs, error, is_late, canvas, num_rejected, *_ = commit
        told = (prompt_logprobs, error, is_late, canvas, num_rejected, tuple(texts), finish)
        return Commit(request, num_computed, tokens[: len(texts)], *told)

    def _deferred(self, commit: Commit, num_tokens: int) -> str:
        """The text before that of the commit's token of this number, where reading it was put off."""
        answer: AnswerText = commit.request.text
        said = [*commit.request.output_ids, *(token.token_id for token in commit.tokens[:num_tokens])]
        return answer.decoder.push_all(said)

    def _advance(
        self, answer: AnswerText, token: CommittedToken, finish: Finish | None, *, is_early: bool
    ) -> tuple[str, Finish | None]:
        """Text that became certain with one token; a stop string found in it is an earlier end."""
        is_stop_token = finish is not None and finish.reason is FinishReason.STOP
        piece = "" if is_stop_token else answer.decoder.push(token.token_id)
        if token.ends_answer and not is_stop_token:
            finish = Finish(FinishReason.STOP)
        text = piece if is_early else answer.matcher.push(piece)
        if finish is not None and answer.matcher.found is None:
            text += self._flush(answer)
        if answer.matcher.found is not None:
            finish = Finish(FinishReason.STOP, answer.matcher.found)
        return text, finish

    def _flush(self, answer: AnswerText) -> str:
        """Bytes and text held back, once nothing more will come."""
        text = answer.matcher.push(answer.decoder.flush())
        return text + answer.matcher.flush()

    def _events(self, commit: Commit) -> list[TokenEvent]:
        request, tokens, canvas = commit.request, commit.tokens, commit.canvas
        is_ended = request.is_ended
        if is_ended and not tokens:  # failed, or only the prompt was wanted
            return self.end([request])
        events = [] if canvas is None else [_canvas_event(request, canvas)]
        num_told = len(tokens) - 1 if is_ended else len(tokens)
        if request.text.is_deferred:
            return [*events, self._last_event(request, commit.texts[num_told])] if is_ended else events
        first, parts, name = request.num_output - len(tokens), request.text.parts, request.id
        for index in range(num_told):
            text, token = commit.texts[index], tokens[index]
            parts.append(text)
            logprob = token.logprob
            events.append(TokenEvent(text, token.token_id, first + index, None, logprob, None, name, request.choice))
        if is_ended:
            events.append(self._last_event(request, commit.texts[num_told]))
        return events

    def _last_event(self, request: Request, text: str) -> TokenEvent:
        has_token = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and request.num_output > 0
        return TokenEvent(
            text=text,
            token_id=request.token_ids[-1] if has_token else None,
            index=request.num_output - 1 if has_token else request.num_output,
            finish_reason=request.finish_reason,
            logprob=request.logprobs[-1] if has_token and request.logprobs else None,
            completion=request.completion("".join([*request.text.parts, text])),
            request_id=request.id,
            choice=request.choice,
        )


def _unreadable(request: Request, said: Sequence[int], error: BaseException) -> Commit:
    return failed_commit(request, f"the text of tokens {said} of this answer could not be read", error)


def _canvas_event(request: Request, canvas: CanvasView) -> TokenEvent:
    return TokenEvent("", None, request.num_output, request_id=request.id, choice=request.choice, canvas=canvas)


def finish_after(request: Request, token_id: int, num_output: int, eos_ids: tuple[int, ...]) -> Finish | None:
    """The end that token_id, the num_output-th token of the answer, brings; None: go on."""
    params = request.params
    if num_output > params.min_tokens:
        if token_id in params.stop_token_ids:
            return Finish(FinishReason.STOP, token_id)
        if token_id in eos_ids and not params.ignore_eos:
            return Finish(FinishReason.STOP, token_id)
    if len(request.prompt_ids) + num_output >= request.max_total_tokens:
        return Finish(FinishReason.LENGTH)
    return None
