"""Requests over time for a simulated fleet: conversations made from a seed, or a recorded trace.

A prompt is a list of pieces, each a number that stands for its text and a count of tokens; equal beginnings are equal
lists of pieces. A recorded trace is JSON lines as Mooncake publishes them: timestamp (ms), input_length, output_length
and hash_ids, one for each 512 tokens.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvarn.errors import FormatError
from kvarn.routing.text_prefix import TextPrefix

PIECE_TOKENS = 512  # of a recorded trace
BYTES_PER_TOKEN = 4
MAX_PIECE = 2**31 - 1

Piece = tuple[int, int]  # what it says, and how many tokens that is


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at: float  # seconds
    pieces: tuple[Piece, ...]
    output_tokens: int

    @property
    def prompt_ids(self) -> list[int]:
        return [piece for piece, count in self.pieces for _ in range(count)]

    @property
    def answer_id(self) -> int:
        """The token that an answer consists of: as in the prompt of a conversation's next turn."""
        return self.pieces[-1][0]

    def prefix(self) -> TextPrefix:
        """Its texts as a router knows them, a digest for each beginning."""
        texts, ends, digest, end = [], [], 1, 0
        for piece in self.pieces:
            digest = hash((digest, *piece)) & 0xFFFF_FFFF_FFFF_FFFF
            end += BYTES_PER_TOKEN * piece[1]
            texts.append(digest)
            ends.append(end)
        return TextPrefix(tuple(texts), tuple(ends))


@dataclass(frozen=True, slots=True)
class TraceShape:
    """Conversations: each begins with one of several system prompts, the popular ones more often."""

    num_requests: int
    requests_per_s: float
    num_systems: int
    system_tokens: int = 1024
    num_turns: float = 5.0  # mean
    think_s: float = 8.0  # between two turns, mean
    user_tokens: int = 96  # mean
    answer_tokens: int = 96  # mean
    max_tokens: int = 6000  # a conversation that gets longer ends
    skew: float = 1.0  # of the popularity of system prompts (Zipf)
    seed: int = 1


def synthetic(shape: TraceShape) -> Iterator[TraceRequest]:
    """Requests in order of time; conversations begin at random moments."""
    rng = random.Random(shape.seed)
    weights = [1 / (rank + 1) ** shape.skew for rank in range(shape.num_systems)]
    sizes = [rng.randrange(shape.system_tokens // 2, shape.system_tokens * 3 // 2) for _ in weights]
    starts_per_s = shape.requests_per_s / shape.num_turns
    popular = iter(rng.choices(range(shape.num_systems), weights, k=shape.num_requests))
    begins, number = rng.expovariate(starts_per_s), shape.num_systems
    open_turns: list[tuple[float, int, tuple[Piece, ...]]] = []  # by time; a number keeps equal times apart
    for _ in range(shape.num_requests):
        if not open_turns or begins < open_turns[0][0]:
            system = next(popular)
            at, pieces = begins, _pieces((system, sizes[system]))
            begins += rng.expovariate(starts_per_s)
        else:
            at, _, pieces = heapq.heappop(open_turns)
        number += 1
        piece = number % MAX_PIECE
        asked = (*pieces, (piece, _around(rng, shape.user_tokens)))
        answer = _around(rng, shape.answer_tokens)
        yield TraceRequest(at, asked, answer)
        total = sum(count for _, count in asked) + answer
        if rng.random() >= 1 / shape.num_turns and total < shape.max_tokens:
            next_at = at + rng.expovariate(1 / shape.think_s) + 1.0
            heapq.heappush(open_turns, (next_at, number, (*asked, (piece, answer))))


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """A recorded trace, line by line; FormatError names the line that is none."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                fields = json.loads(line)
                length, ids = int(fields["input_length"]), [int(one) % MAX_PIECE for one in fields["hash_ids"]]
                counts = [min(PIECE_TOKENS, length - PIECE_TOKENS * place) for place in range(len(ids))]
                pieces = tuple((piece, count) for piece, count in zip(ids, counts, strict=True) if count > 0)
                at, output = float(fields["timestamp"]) / 1000, max(1, int(fields["output_length"]))
            except (ValueError, LookupError, TypeError) as error:
                raise FormatError(f"line {number} of {path} is no request of a trace: {error}") from None
            if pieces:
                yield TraceRequest(at, pieces, output)


def _pieces(*pieces: Piece) -> tuple[Piece, ...]:
    return pieces


def _around(rng: random.Random, mean: int) -> int:
    return max(4, round(rng.expovariate(1 / mean)))
