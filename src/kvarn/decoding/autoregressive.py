"""Left-to-right generation: prompt chunks commit nothing, then every step commits one token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvarn.backends.batch import NO_TOKEN, Sampled, SampleRows
from kvarn.backends.protocol import Backend, Hidden
from kvarn.decoding.choice import Choice, SamplingDefaults
from kvarn.decoding.decoder import Commit, CommittedToken, Span
from kvarn.errors import BackendError
from kvarn.request import Request
from kvarn.types import TokenLogprob


class AutoregressiveDecoder:
    """Span = all tokens not yet in the cache; the last of them gives the next token."""

    def __init__(self, backend: Backend, vocab_size: int, eos_ids: tuple[int, ...], defaults: SamplingDefaults) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._defaults = defaults
        self._choices: dict[str, Choice] = {}

    def span(self, request: Request, budget: int) -> Span | None:
        start = request.num_computed
        token_ids = request.token_ids[start : start + budget]
        if not token_ids:
            return None
        is_last = start + len(token_ids) == len(request.token_ids)
        return Span(request, start, token_ids, (len(token_ids) - 1,) if is_last else ())

    def commit(self, spans: Sequence[Span], hidden: Hidden) -> list[Commit]:
        choosing = [span for span in spans if span.outputs]
        if not choosing:
            return [Commit(span.request, len(span.token_ids)) for span in spans]
        sampled = self._backend.sample(hidden, self._rows(choosing))
        row_of = {span.request.id: row for row, span in enumerate(choosing)}
        return [self._commit_span(span, sampled, row_of.get(span.request.id)) for span in spans]

    def forget(self, request: Request) -> None:
        self._choices.pop(request.id, None)

    def _rows(self, spans: Sequence[Span]) -> SampleRows:
        wanted = [span.request.params.logprobs for span in spans if span.request.params.logprobs is not None]
        params = tuple(self._choice(span.request).row(span.request) for span in spans)
        num_top = min(max(wanted, default=0), self._vocab_size)
        return SampleRows(np.arange(len(spans), dtype=np.int32), params, num_top, want_logprobs=bool(wanted))

    def _choice(self, request: Request) -> Choice:
        choice = self._choices.get(request.id)
        if choice is None:
            choice = self._choices[request.id] = Choice(request, self._defaults, self._eos_ids)
        return choice

    def _commit_span(self, span: Span, sampled: Sampled, row: int | None) -> Commit:
        if row is None:
            return Commit(span.request, len(span.token_ids))
        token_id = int(sampled.token_ids[row])
        if token_id == NO_TOKEN:
            return Commit(span.request, 0, error=_broken_logits(span))
        return Commit(span.request, len(span.token_ids), (CommittedToken(token_id, _logprob(span, sampled, row)),))


def _logprob(span: Span, sampled: Sampled, row: int) -> TokenLogprob | None:
    num_top = span.request.params.logprobs
    if num_top is None:
        return None
    top_ids = sampled.top_ids[row, :num_top].tolist()
    top_logprobs = sampled.top_logprobs[row, :num_top].tolist()
    pairs = tuple(zip(top_ids, top_logprobs, strict=True))
    return TokenLogprob(int(sampled.token_ids[row]), float(sampled.logprobs[row]), pairs)


def _broken_logits(span: Span) -> BackendError:
    return BackendError(
        f"the model's scores at position {span.end - 1:,} are not numbers; "
        "the model file may be damaged: fetch it again or try another quantisation"
    )
