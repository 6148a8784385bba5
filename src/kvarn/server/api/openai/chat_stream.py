"""A chat as a stream of chunks. Text is written by hand around one constant frame: this runs once for every token."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any, Protocol

from kvarn.diffusion import CanvasView
from kvarn.server.api.openai.envelope import Envelope, finish_word, usage_fields
from kvarn.server.api.openai.errors import error_body
from kvarn.server.api.openai.logprobs import chat_logprobs
from kvarn.server.chat.output.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallStart
from kvarn.server.chat.output.harmony_stream import AnswerReader
from kvarn.server.failures import Failure
from kvarn.server.http.sse import StreamFormat
from kvarn.tokenizer.canvas import canvas_text
from kvarn.types import FinishReason, TokenEvent, Usage

if TYPE_CHECKING:
    from kvarn.server.api.openai.sampling_schema import StreamOptions
    from kvarn.server.chat.generation import Generation
    from kvarn.server.chat.output.output_plan import OutputPlan
    from kvarn.tokenizer.tokenizer import Tokenizer

ROLE = '{"role":"assistant","content":""}'
ROLE_WITH_TOOLS = '{"role":"assistant","content":null}'  # an answer of calls alone has no content
EMPTY = '{"content":""}'


def _error_event(failure: Failure) -> bytes:
    return f"data: {_json(error_body(failure))}\n\n".encode()


STREAM_FORMAT = StreamFormat(_error_event, done=b"data: [DONE]\n\n")


class ChunkFrame:
    """The part of a chunk around its choice: always the same, unless every chunk tells the usage."""

    def __init__(self, envelope: Envelope, options: StreamOptions | None) -> None:
        written = json.dumps(envelope.fields(), separators=(",", ":"))
        self._head = f'data: {written[:-1]},"choices":['
        self.has_usage = options is not None and bool(options.include_usage)
        self.counts = options is not None and bool(options.continuous_usage_stats)  # take() is to be called
        self._tail = '],"usage":null}\n\n' if self.has_usage else "]}\n\n"
        self._num_tokens = 0

    def take(self, event: TokenEvent, usage: Usage) -> None:
        """Count its tokens for the chunks that follow; usage: what the generation has read."""
        self._num_tokens += event.num_more + (event.token_id is not None)
        so_far = Usage(usage.prompt_tokens, self._num_tokens, usage.cached_tokens)
        self._tail = f'],"usage":{_json(usage_fields(so_far))}}}\n\n'

    def chunk(self, choice: str) -> str:
        """One event with one choice, given as JSON."""
        return f"{self._head}{choice}{self._tail}"

    def canvas_chunk(self, index: int, canvas: CanvasView, tokenizer: Tokenizer) -> str:
        """A step of a diffusion model: an event without a choice, which clients that do not know it pass over."""
        fields = {
            "index": index,
            "step": canvas.step,
            "block": [canvas.block_start, canvas.block_end],
            "token_ids": canvas.token_ids,
            "text": canvas_text(tokenizer, canvas.token_ids),
        }
        return f'{self._head}],"diffusion":{_json(fields)}{self._tail.removeprefix("]")}'

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last event, which has no choice."""
        return f'{self._head}],"usage":{_json(usage_fields(usage))}}}\n\n'.encode()


class ChoiceStream(Protocol):
    """One of the answers of a stream."""

    def chunks(self, event: TokenEvent) -> str: ...


class ChatChoiceStream:
    """One of the n answers, event by event."""

    def __init__(
        self,
        index: int,
        frame: ChunkFrame,
        tokenizer: Tokenizer,
        reader: AnswerReader | None,
        *,
        has_tools: bool = False,
    ) -> None:
        """reader: None when the text needs no parsing; has_tools: the answer may be calls."""
        self._index = index
        self._frame = frame
        self._tokenizer = tokenizer
        self._reader = reader
        self._has_tools = has_tools
        self._has_begun = False
        self._has_calls = False
        self._has_content = not has_tools  # the first chunk has it, if nothing else may come
        self._before, _, self._after = self._chunk('{"content":@}').rpartition("@")  # around the text of a plain chunk

    def chunks(self, event: TokenEvent) -> str:
        """The chunks of one event, often one, sometimes none."""
        if event.canvas is not None:
            return self._frame.canvas_chunk(self._index, event.canvas, self._tokenizer)
        if self._is_plain(event):
            return f"{self._before}{quoted(event.text)}{self._after}" if event.text else ""
        logprobs = "null"
        if event.logprob is not None:
            logprobs = _json({"content": chat_logprobs(self._tokenizer, [event.logprob])})
        deltas = self._deltas(event)
        if not deltas and event.logprob is not None:
            deltas = ["{}" if self._has_tools else EMPTY]
        written = [] if self._has_begun else [self._chunk(ROLE_WITH_TOOLS if self._has_tools else ROLE)]
        self._has_begun = True
        for delta in deltas:
            written.append(self._chunk(delta, logprobs))
            logprobs = "null"
        reason = event.finish_reason
        if reason is not None and reason is not FinishReason.DEADLINE:  # an error tells about that
            written.append(self._last_chunk(reason))
        return "".join(written)

    def _last_chunk(self, reason: FinishReason) -> str:
        """Why it ended; an answer without calls has content, if only an empty one."""
        is_cut = self._reader is not None and self._reader.is_cut
        word = finish_word(reason, has_whole_calls=self._has_calls and not is_cut)
        return self._chunk("{}" if self._has_content or self._has_calls else EMPTY, finish=f'"{word}"')

    def _is_plain(self, event: TokenEvent) -> bool:
        """Text and nothing else, as almost all events are."""
        has_more = event.finish_reason is not None or event.logprob is not None
        return self._has_begun and self._reader is None and not has_more and not self._frame.counts

    def _chunk(self, delta: str, logprobs: str = "null", finish: str = "null") -> str:
        return self._frame.chunk(
            f'{{"index":{self._index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish}}}'
        )

    def _deltas(self, event: TokenEvent) -> list[str]:
        if self._reader is None:
            return ['{"content":' + quoted(event.text) + "}"] if event.text else []
        deltas = list(self._reader.push(event.text)) if event.text else []
        if event.finish_reason is not None:
            deltas += self._reader.end()
        return [self._written(delta) for delta in deltas]

    def _written(self, delta: Delta) -> str:
        match delta:
            case ContentDelta():
                self._has_content = True
                return _json({"content": delta.text})
            case ReasoningDelta():
                return _json({"reasoning_content": delta.text})
            case ToolCallStart():
                self._has_calls = True
                function = {"name": delta.name, "arguments": ""}
                call = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
                return _json({"tool_calls": [call]})
            case ToolCallArguments():
                return _json({"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]})


async def chat_events(
    generation: Generation, envelope: Envelope, plan: OutputPlan, options: StreamOptions | None
) -> AsyncIterator[bytes]:
    """Everything but [DONE]."""
    frame = ChunkFrame(envelope, options)
    tokenizer = generation.model.llm.llm.tokenizer
    has_tools = bool(plan.tools)
    readers = [None if plan.is_plain else generation.reader(plan, index) for index in range(generation.num_choices)]
    choices = [
        ChatChoiceStream(index, frame, tokenizer, reader, has_tools=has_tools) for index, reader in enumerate(readers)
    ]
    async for written in written_batches(generation, frame, lambda _, event: choices[event.choice]):
        yield written
    if frame.has_usage:
        yield frame.usage_chunk(generation.usage())


async def written_batches(
    generation: Generation, frame: ChunkFrame, choice_of: Callable[[int, TokenEvent], ChoiceStream]
) -> AsyncIterator[bytes]:
    """The chunks of all events, those that come at once together."""
    async for batch in generation.batches():
        written = []
        for index, event in batch:
            if frame.counts:
                frame.take(event, generation.usage())
            written.append(choice_of(index, event).chunks(event))
        if joined := "".join(written):
            yield joined.encode()


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
