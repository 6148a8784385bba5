"""Rows sampled by a registered Python sampler: a failure ends its own request only."""

from __future__ import annotations

import numpy as np

from kvarn.backends.batch import RowSampling
from kvarn.backends.protocol import Backend, Hidden
from kvarn.decoding.decoder import Commit, Span
from kvarn.decoding.sampling_state import SamplingState
from kvarn.errors import BackendError
from kvarn.sampling.custom_samplers import find_sampler, run_sampler
from kvarn.types import TokenLogprob


def sample_custom(
    backend: Backend, hidden: Hidden, span: Span, state: SamplingState, row: RowSampling
) -> tuple[int, TokenLogprob | None] | Commit:
    """The token that the request's sampler returns, or the commit of its failure; hidden is one row."""
    params = span.request.params
    assert params.sampler is not None
    logits = backend.logits(hidden)[0]
    if not np.isfinite(logits).all():
        return _failed(span, f"the model's scores at position {span.end - 1:,} are not numbers", None)
    if state.error is not None:
        return Commit(span.request, 0, error=state.error)
    try:
        token_id = run_sampler(find_sampler(params.sampler), logits, row, span.request.token_ids)
    except Exception as error:
        return _failed(span, f"sampler {params.sampler!r} failed: {error or type(error).__name__}", error)
    logprob = None
    if params.logprobs is not None:
        scored = backend.score(hidden, np.array([token_id], np.int32), min(params.logprobs, len(logits)))
        pairs = zip(scored.top_ids[0].tolist(), scored.top_logprobs[0].tolist(), strict=True)
        logprob = TokenLogprob(token_id, float(scored.logprobs[0]), tuple(pairs))
    return token_id, logprob


def _failed(span: Span, message: str, cause: Exception | None) -> Commit:
    failure = BackendError(message)
    failure.__cause__ = cause
    return Commit(span.request, 0, error=failure)
