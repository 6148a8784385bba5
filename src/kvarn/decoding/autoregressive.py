"""Left-to-right generation: prompt chunks commit nothing, then every step commits a token, with drafts perhaps more."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import cast

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import Batch, RowSampling, Sampled, SampleRows, chosen_token
from kvarn.backends.protocol import Backend, Hidden, LaunchingBackend
from kvarn.backends.unused_ids import NO_UNUSED_IDS
from kvarn.decoding.custom_sampling import sample_custom
from kvarn.decoding.decoder import AnswerBounds, Commit, ReadCommits, Span, failed_commit
from kvarn.decoding.logprobs import score_prompt, scored_offsets
from kvarn.decoding.sampling_state import Encode, SamplingDefaults, SamplingState, breaker_tokens
from kvarn.decoding.speculation.speculation import Speculation
from kvarn.decoding.speculation.verification import broken_logits, commit_row, commit_token, num_accepted
from kvarn.errors import InvalidParameter
from kvarn.request import Clock, Request
from kvarn.types import SamplingParams

Int64 = npt.NDArray[np.int64]
SampledRow = tuple[int, Span]  # a row of the hidden states, and whose next token is chosen from it; drafts' rows follow

CANNOT_PREPARE = "what this answer's next token depends on (penalties, constraint) failed"


class AutoregressiveDecoder:
    """Span = all tokens not yet in the cache; the next token is sampled from the last of them.

    encode turns DRY's sequence breakers into tokens; without it they are ignored.
    """

    has_divisible_spans = True
    runs_ahead = True
    can_fork = True

    def __init__(
        self,
        backend: Backend,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        defaults: SamplingDefaults,
        encode: Encode | None = None,
        *,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.backend = backend
        self.unused = NO_UNUSED_IDS
        self.speculation: Speculation | None = None
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._defaults = defaults
        self._encode = encode
        self._clock = clock
        self.backend_s = 0.0
        self.num_denoise_steps = 0

    def bound(self, prompt_ids: Sequence[int], params: SamplingParams, max_tokens: int) -> AnswerBounds:
        if params.diffusion is not None:
            raise InvalidParameter(
                "diffusion is given, and this model writes from left to right; leave it out", field="diffusion"
            )
        return AnswerBounds(max_tokens, (len(prompt_ids) + max_tokens,))

    def slots_to_start(self, request: Request) -> tuple[int, ...]:
        return (len(request.token_ids),)

    def slots_to_continue(self, request: Request) -> tuple[int, ...]:
        return (len(request.token_ids) + 1,)

    def least_rows(self, request: Request) -> int:  # noqa: ARG002
        return 1

    def span(self, request: Request, budget: int) -> Span | None:
        start = request.num_computed + request.num_launched
        token_ids = request.token_ids[start : start + budget]
        if not token_ids:
            return self._span_ahead(request, start)
        outputs = tuple(scored_offsets(request, start, len(token_ids)))
        is_sampled = start + len(token_ids) == len(request.token_ids) and not request.params.prefill_only
        if self.speculation is not None and self.speculation.wants_states(request):
            outputs = tuple(range(len(token_ids) - is_sampled))
        if is_sampled and self.speculation is not None and len(token_ids) == 1 < budget:
            drafts = self.speculation.drafts(request, budget - 1)
            return Span(request, start, (*token_ids, *drafts), tuple(range(1 + len(drafts))), None, len(drafts))
        return Span(request, start, token_ids, (*outputs, len(token_ids) - 1) if is_sampled else outputs)

    def commit(self, spans: Sequence[Span], hidden: Hidden) -> list[Commit]:
        commits = _in_order(spans, self._sample(_sampled_rows(spans), hidden))
        if self.speculation is not None and self.speculation.reads_states:
            self._hand_over_states(self.speculation, spans, commits, hidden)
        if any(span.request.wants_prompt_logprobs for span in spans):
            return self._add_prompt_logprobs(spans, commits, hidden)
        return commits

    def can_launch(self, spans: Sequence[Span]) -> bool:
        return all(_wants_tokens_alone(span.request) for span in spans)

    def launch(self, spans: Sequence[Span], hidden: Hidden) -> ReadCommits:
        commits, ready, params = self._sampling_of(_sampled_rows(spans))
        for index, (_, span) in enumerate(ready):
            span.request.chosen_row = index
        read = self._sample_later(hidden, self._sample_rows(ready, params, masked=True)) if ready else None

        def read_commits() -> list[Commit]:
            if read is not None:
                commits.update(self._commits_by_id(ready, read()))
            return _in_order(spans, commits)

        return read_commits

    def is_steady(self, request: Request) -> bool:
        state: SamplingState | None = request.sampling
        is_static = state is not None and state.is_static and request.num_output >= request.params.min_tokens
        hands_states_over = self.speculation is not None and self.speculation.wants_states(request)
        return is_static and _wants_tokens_alone(request) and not hands_states_over

    def stop_ids(self, request: Request) -> tuple[int, ...]:
        return (() if request.params.ignore_eos else self._eos_ids) + request.params.stop_token_ids

    def steady_rows(self, requests: Sequence[Request]) -> SampleRows:
        params = [request.sampling.row(request, len(request.token_ids)) for request in requests]
        rows = self._row_params(np.arange(len(params)), requests, params, masked=True)
        return rows if self.backend.runs_ahead else self.unused.masked_rows(rows)

    def launch_rows(self, batch: Batch, rows: SampleRows) -> Callable[[], Sampled]:
        return self._sample_later(self.backend.forward(batch), rows)

    def compute_rows(self, batch: Batch, rows: SampleRows) -> Sampled:
        return self._timed(lambda: self.unused.sample_masked(self.backend, self.backend.forward(batch), rows))

    def commits_of(self, rows: Sequence[tuple[int, Span]], sampled: Sampled) -> list[Commit]:
        token_ids = sampled.token_ids.tolist()
        commits = [commit_row(span, self._state(span.request), token_ids[i], sampled, i) for i, span in rows]
        for commit, (_, span) in zip(commits, rows, strict=True):
            if span.num_drafts and self.speculation is not None:
                self.speculation.count(span.request, span.num_drafts, num_accepted(span, commit))
        if not sampled.late:
            return commits
        is_late = [i in sampled.late for i, _ in rows]
        return [commit._replace(is_late=late) for commit, late in zip(commits, is_late, strict=True)]

    def _sample_later(self, hidden: Hidden, rows: SampleRows) -> Callable[[], Sampled]:
        return partial(self._timed, cast(LaunchingBackend, self.backend).sample_later(hidden, rows))

    def _timed(self, sample: Callable[[], Sampled]) -> Sampled:
        started_at = self._clock()
        sampled = sample()
        self.backend_s += self._clock() - started_at
        return sampled

    def restart(self, request: Request) -> None:
        """Nothing to do: the state follows from the request's tokens."""

    def forget(self, request: Request) -> None:
        if self.speculation is not None:
            self.speculation.end(request)
        request.sampling = None

    def _sample(self, rows: Sequence[SampledRow], hidden: Hidden) -> dict[str, Commit]:
        # A registered sampler runs in Python on all logits of its row; every other row is sampled in the backend.
        plain = [(row, span) for row, span in rows if span.request.params.sampler is None]
        commits = self._sample_in_backend(plain, hidden) if plain else {}
        for row, span in rows:
            if span.request.params.sampler is not None:
                commits[span.request.id] = self._sample_by_function(span, hidden[row : row + 1])
        return commits

    def _sample_by_function(self, span: Span, hidden: Hidden) -> Commit:
        try:
            state = self._state(span.request)
            params = self.unused.masked(state.row(span.request, span.end))
        except BaseException as error:
            return failed_commit(span.request, CANNOT_PREPARE, error)
        sampled = sample_custom(self.backend, hidden, span, state, params)
        return sampled if isinstance(sampled, Commit) else commit_token(span, state, *sampled)

    def _sample_in_backend(self, sampled_rows: Sequence[SampledRow], hidden: Hidden) -> dict[str, Commit]:
        commits, ready, params = self._sampling_of(sampled_rows)
        if not ready:
            return commits
        rows = self._sample_rows(ready, params)
        sampled = self._timed(lambda: self.unused.sample(self.backend, hidden, rows))
        return commits | self._commits_by_id(ready, sampled)

    def _sampling_of(self, rows: Sequence[SampledRow]) -> tuple[dict[str, Commit], list[SampledRow], list[RowSampling]]:
        """What each choice depends on, and the ends of requests where that cannot be told."""
        commits: dict[str, Commit] = {}
        ready: list[SampledRow] = []
        params: list[RowSampling] = []
        for row, span in rows:
            request = span.request
            try:
                state = request.sampling or self._state(request)
                if span.num_drafts:
                    params += state.rows(request, span.token_ids[-span.num_drafts :])
                else:
                    params.append(state.row(request, span.end))
            except BaseException as error:
                commits[request.id] = failed_commit(request, CANNOT_PREPARE, error)
            else:
                ready.append((row, span))
        return commits, ready, params

    def _sample_rows(
        self, rows: Sequence[SampledRow], params: Sequence[RowSampling], *, masked: bool = False
    ) -> SampleRows:
        numbers = np.array([first + i for first, span in rows for i in range(1 + span.num_drafts)], np.int64)
        return self._row_params(numbers, [span.request for _, span in rows], params, masked=masked)

    def _row_params(
        self, rows: Int64, requests: Sequence[Request], params: Sequence[RowSampling], *, masked: bool = False
    ) -> SampleRows:
        """masked: the backend leaves out ids that no token has, as it is not asked twice."""
        wanted = [request.params.logprobs for request in requests if request.params.logprobs is not None]
        num_top = min(max(wanted, default=0), self._vocab_size)
        unused_mask = self.unused.mask if masked else None
        return SampleRows(rows.astype(np.int32), tuple(params), num_top, bool(wanted), unused_mask=unused_mask)

    def _commits_by_id(self, rows: Sequence[SampledRow], sampled: Sampled) -> dict[str, Commit]:
        """Of requests that have not ended while the step was under way."""
        starts = accumulate((1 + span.num_drafts for _, span in rows), initial=0)
        spans = [(i, span) for i, (_, span) in zip(starts, rows, strict=False) if not span.request.is_ended]
        return {commit.request.id: commit for commit in self.commits_of(spans, sampled)}

    def _span_ahead(self, request: Request, start: int) -> Span | None:
        """The token that a step under way chooses: the device has it, and all else of its row is known."""
        if not request.num_launched or start + 1 >= request.max_total_tokens:
            return None
        state: SamplingState | None = request.sampling
        is_known = state is not None and state.is_static  # without a state nothing is chosen: only the prompt is wanted
        return Span(request, start, (chosen_token(request.chosen_row),), (0,)) if is_known else None

    def _add_prompt_logprobs(self, spans: Sequence[Span], commits: Sequence[Commit], hidden: Hidden) -> list[Commit]:
        """Add prompt log-probabilities to the commits of requests that want them."""
        scored, first = [], 0
        for span, commit in zip(spans, commits, strict=True):
            end = first + len(span.outputs)
            if span.request.wants_prompt_logprobs and commit.error is None:
                logprobs = score_prompt(self.backend, hidden[first:end], span, self._vocab_size)
                is_broken = any(math.isnan(entry.logprob) for entry in logprobs)
                error = broken_logits(span) if is_broken else None
                scored.append(commit._replace(prompt_logprobs=logprobs, error=error))
            else:
                scored.append(commit)
            first = end
        return scored

    def _hand_over_states(
        self, speculation: Speculation, spans: Sequence[Span], commits: Sequence[Commit], hidden: Hidden
    ) -> None:
        """Give the states of positions that count to who guesses from them."""
        first = 0
        for span, commit in zip(spans, commits, strict=True):
            is_whole = len(span.outputs) == len(span.token_ids)
            if is_whole and commit.error is None and speculation.wants_states(span.request):
                speculation.take_states(span.request, span.start, hidden[first : first + commit.num_computed])
            first += len(span.outputs)

    def _state(self, request: Request) -> SamplingState:
        state: SamplingState | None = request.sampling
        if state is None:
            params, encode = request.params, self._encode
            has_breakers = params.dry_multiplier > 0
            breakers = breaker_tokens(encode, params.dry_sequence_breakers) if has_breakers and encode else ()
            state = request.sampling = SamplingState(request, self._defaults, self._eos_ids, breakers)
        return state


def _wants_tokens_alone(request: Request) -> bool:
    return request.params.sampler is None and not request.wants_prompt_logprobs


def _in_order(spans: Sequence[Span], commits: Mapping[str, Commit]) -> list[Commit]:
    """One commit for each span; those without one have computed their rows and chosen nothing."""
    return [commits.get(span.request.id) or Commit(span.request, len(span.token_ids)) for span in spans]


def _sampled_rows(spans: Sequence[Span]) -> list[SampledRow]:
    """Spans that reach the last token, each with the row of hidden that the next token is sampled from."""
    rows: list[SampledRow] = []
    num_rows = 0
    for span in spans:
        num_rows += len(span.outputs)
        if span.end >= len(span.request.token_ids) and not span.request.params.prefill_only:
            rows.append((num_rows - 1 - span.num_drafts, span))
    return rows
