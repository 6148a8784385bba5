"""Log-probabilities as callers get them: of sampled tokens, and of prompt tokens.

Those of a prompt are taken from the passes that compute it: row p scores token p + 1.
"""

from __future__ import annotations

import numpy as np

from kvarn.backends.batch import Sampled
from kvarn.backends.protocol import Backend, Hidden
from kvarn.decoding.decoder import Span
from kvarn.request import Request
from kvarn.types import TokenLogprob


def sampled_logprob(sampled: Sampled, row: int, num_top: int | None) -> TokenLogprob:
    """The log-probability of a row's sampled token, beside the num_top most probable ones."""
    top_ids, top_logprobs = sampled.top_ids[row, :num_top].tolist(), sampled.top_logprobs[row, :num_top].tolist()
    pairs = tuple(zip(top_ids, top_logprobs, strict=True))
    return TokenLogprob(int(sampled.token_ids[row]), float(sampled.logprobs[row]), pairs, float(sampled.entropy[row]))


def scored_offsets(request: Request, start: int, num_rows: int) -> range:
    """Rows of a span whose following prompt token is still to be scored; empty for most requests."""
    if not request.wants_prompt_logprobs:
        return range(0)
    first = max(start, len(request.prompt_logprobs))
    end = min(start + num_rows, request.num_prompt - 1)
    return range(first - start, max(first, end) - start)


def score_prompt(backend: Backend, hidden: Hidden, span: Span, vocab_size: int) -> tuple[TokenLogprob, ...]:
    """Score the prompt tokens that follow the span's scored rows, which hidden holds."""
    request, offsets = span.request, scored_offsets(span.request, span.start, len(span.token_ids))
    first = span.start + offsets.start + 1
    targets = request.prompt_ids[first : first + len(offsets)]
    num_top = min(request.params.prompt_logprobs or 0, vocab_size)
    scored = backend.score(hidden[: len(offsets)], np.array(targets, np.int32), num_top)
    tops = zip(scored.top_ids.tolist(), scored.top_logprobs.tolist(), strict=True)
    pairs = [tuple(zip(ids, logprobs, strict=True)) for ids, logprobs in tops]
    return tuple(map(TokenLogprob, targets, scored.logprobs.tolist(), pairs))
