"""A partly denoised canvas as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvarn.tokenizer.incremental import IncrementalDecoder, TokenBytes

MASKED = "░"


def canvas_text(tokenizer: TokenBytes, token_ids: Sequence[int | None], *, at_start: bool = False) -> str:
    """The text of known tokens, and a mark for each that is still masked."""
    return "".join(_texts(IncrementalDecoder(tokenizer, at_start=at_start), token_ids))


def _texts(decoder: IncrementalDecoder, token_ids: Sequence[int | None]) -> Iterator[str]:
    for token_id in token_ids:
        yield decoder.flush() + MASKED if token_id is None else decoder.push(token_id)
    yield decoder.flush()
