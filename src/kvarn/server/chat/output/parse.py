"""An answer taken apart when it is whole: one pure function, equal to the stream for every way of cutting the text."""

from __future__ import annotations

from collections.abc import Collection

from kvarn.server.chat.output.deltas import ParsedOutput, ToolCall, joined
from kvarn.server.chat.output.formats import OutputFormat
from kvarn.server.chat.output.output_stream import AnswerContext, OutputStream

__all__ = ["ParsedOutput", "ToolCall", "parse_output"]

PIECE_CHARACTERS = 1024


def parse_output(
    text: str, format: OutputFormat, tools: Collection[str] = (), circumstances: AnswerContext | None = None
) -> ParsedOutput:
    """Return the reasoning, the content and the calls of a whole answer; tools: the names that may be called."""
    stream = OutputStream(format, tools, circumstances)
    # In pieces, because what follows a failed candidate is copied each time: hostile text stays linear.
    pieces = (text[begin : begin + PIECE_CHARACTERS] for begin in range(0, len(text), PIECE_CHARACTERS))
    deltas = [*(delta for piece in pieces for delta in stream.push(piece)), *stream.end()]
    return joined(deltas, is_cut=stream.is_cut)
