"""Denoising: a step computes a block of masked tokens or the whole canvas, and fills some positions.

Tokens are committed at the end of their block, so committed text never changes. Logits are computed only at the
positions that a policy may fill.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvarn.backends.batch import NO_TOKEN, RowSampling, Sampled, SampleRows
from kvarn.backends.protocol import Backend, Hidden
from kvarn.backends.unused_ids import NO_UNUSED_IDS
from kvarn.decoding.decoder import AnswerBounds, Commit, KeptPart, Reach, Span, failed_commit
from kvarn.decoding.denoise_config import (
    DEFAULT_TOKENS,
    DenoiseConfig,
    check_pinned,
    check_supported,
    make_denoise_config,
)
from kvarn.decoding.denoise_state import DenoiseState, Filling
from kvarn.decoding.position_sampling import PositionSampling
from kvarn.decoding.sampling_state import SamplingDefaults
from kvarn.decoding.speculation.speculation import Speculation
from kvarn.decoding.windows import Window, block_window, full_attention_window, sequence_lengths
from kvarn.errors import BrokenScores
from kvarn.models.spec import MaskedDiffusion
from kvarn.request import Request
from kvarn.types import SamplingParams

GUIDE, KEPT = "/guide", "/kept"  # suffixes of the ids of a request's further KV sequences


class DiffusionDecoder:
    """Span = what the cache kind recomputes; the rows of masked positions give tokens and confidences."""

    has_divisible_spans = False
    speculation: Speculation | None = None  # a block is denoised whole
    runs_ahead = False
    can_fork = False

    def __init__(
        self,
        backend: Backend,
        model: MaskedDiffusion,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        *,
        defaults: SamplingDefaults,
        context: int,
    ) -> None:
        """context: positions a canvas may have."""
        self.backend = backend
        self.unused = NO_UNUSED_IDS
        self._model = model
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._defaults = defaults
        self._context = context
        self._shift = int(model.shift)
        self.backend_s = 0.0
        self.num_denoise_steps = 0

    def bound(self, prompt_ids: Sequence[int], params: SamplingParams, max_tokens: int) -> AnswerBounds:
        check_supported(params)
        config = make_denoise_config(params.diffusion, self._model)
        if params.max_tokens is None and config.is_fixed:
            max_tokens = min(max_tokens, max(DEFAULT_TOKENS, params.min_tokens))
        check_pinned(config.params, max_tokens)
        shape = config.shape(len(prompt_ids), len(prompt_ids) + max_tokens, self._context)
        return AnswerBounds(max_tokens, sequence_lengths(config, shape.length, self._shift))

    def slots_to_start(self, request: Request) -> tuple[int, ...]:
        return self.slots_to_continue(request)

    def slots_to_continue(self, request: Request) -> tuple[int, ...]:
        state = self._state(request)
        return sequence_lengths(state.config, state.length, self._shift)

    def least_rows(self, request: Request) -> int:
        state = self._state(request)
        if state.config.is_aligned and request.num_computed < state.block.start and state.config.cache == "block":
            return state.config.block_length
        return self._window(request, state).num_rows * (2 if state.config.is_guided else 1)

    def span(self, request: Request, budget: int) -> Span | None:
        state = self._state(request)
        window = self._window(request, state)
        if window.num_rows > budget and state.config.cache == "block":
            return self._prefill_chunk(request, state, budget)
        span = self._denoising_span(request, state, window)
        if state.config.is_guided:
            assert span.reach is not None
            guide = self._denoising_span(request, state, window, is_guide=True)
            span = span._replace(reach=replace(span.reach, companion=guide))
        return span if span.num_rows <= budget else None

    def commit(self, spans: Sequence[Span], hidden: Hidden) -> list[Commit]:
        parts = self._sample(spans, hidden)
        fillings = [self._decide(span, part) for span, part in zip(spans, parts, strict=True)]
        # Nothing has changed up to here: a step that fails in the backend is computed again.
        return [self._apply_alone(span, filling) for span, filling in zip(spans, fillings, strict=True)]

    def restart(self, request: Request) -> None:
        request.denoising = None

    def forget(self, request: Request) -> None:
        request.denoising = request.sampling = None

    def _window(self, request: Request, state: DenoiseState) -> Window:
        part, shift = state.active_part, self._shift
        if state.config.is_aligned:
            is_first = state.is_first_alone
            return block_window(
                state.block, request.num_computed, is_first_alone=is_first, shift=shift, active_part=part
            )
        return full_attention_window(state.config, state.block, state.num_passes, state.length, shift, active_part=part)

    def _prefill_chunk(self, request: Request, state: DenoiseState, budget: int) -> Span | None:
        """Whole blocks of known text, from which nothing is sampled."""
        start, length = request.num_computed, state.config.block_length
        end = min(state.block.start, (start + budget) // length * length)
        if end <= start:
            return None
        return Span(request, start, state.canvas.token_ids[start:end].tolist(), (), Reach(request.id, end))

    def _denoising_span(self, request: Request, state: DenoiseState, window: Window, *, is_guide: bool = False) -> Span:
        start, end = window.start, window.end
        tokens = state.canvas.without_given(start, end) if is_guide else state.canvas.token_ids[start:end]
        outputs = tuple((state.candidates() - self._shift - start).tolist())
        sequence = request.id + GUIDE if is_guide else request.id
        keep = self._keep(state, window.num_kept, sequence + KEPT) if window.num_kept else None
        reach = Reach(sequence + KEPT if window.reads_kept else sequence, window.num_slots, window.slot_shift, keep)
        return Span(request, start, tokens.tolist(), outputs, reach)

    def _keep(self, state: DenoiseState, num_kept: int, sequence: str) -> KeptPart:
        start, end, sparse = state.block.start - self._shift, state.block.end, state.config.sparse
        return KeptPart(sequence, num_kept + end - start, start, end, num_kept, sparse.head_select, sparse.pool_kernel)

    def _sample(self, spans: Sequence[Span], hidden: Hidden) -> list[Sampled]:
        """Sample the output rows of each span."""
        rows: list[int] = []
        guide_rows: list[int] = []
        params: list[RowSampling] = []
        num_rows = 0
        for span in spans:
            num_outputs, has_guide = len(span.outputs), span.reach is not None and span.reach.companion is not None
            span_rows = range(num_rows, num_rows + num_outputs)
            rows += span_rows
            guide_rows += [row + num_outputs if has_guide else -1 for row in span_rows]
            params += self._params(span)
            num_rows += num_outputs * (2 if has_guide else 1)
        num_top = max(self._num_top(span.request) for span in spans)
        guides = np.array(guide_rows, np.int32) if max(guide_rows, default=-1) >= 0 else None
        batch_rows = SampleRows(np.array(rows, np.int32), tuple(params), min(num_top, self._vocab_size), True, guides)
        started_at = time.perf_counter()
        sampled = self.unused.sample(self.backend, hidden, batch_rows)
        self.backend_s += time.perf_counter() - started_at
        return _split_by_span(sampled, [len(span.outputs) for span in spans])

    def _num_top(self, request: Request) -> int:
        return max(request.params.logprobs or 0, 2 if self._state(request).config.rule.needs_margin else 0)

    def _params(self, span: Span) -> list[RowSampling]:
        request, state = span.request, self._state(span.request)
        sampling: PositionSampling | None = request.sampling
        if sampling is None:
            scale = state.config.params.cfg_scale
            sampling = request.sampling = PositionSampling(
                request, self._defaults, eos_ids=self._eos_ids, mask_id=self._model.mask_id, cfg_scale=scale
            )
        first = span.start + self._shift
        rows = sampling.rows((first + offset for offset in span.outputs), state.step)
        return [state.slots.masked(row) for row in rows] if state.slots else list(rows)

    def _decide(self, span: Span, sampled: Sampled) -> Filling | BrokenScores | None:
        """The filling of a span; None: it was known text."""
        if not span.outputs:
            return None
        if (sampled.token_ids == NO_TOKEN).any():
            return broken_scores(span)
        return self._state(span.request).decide(sampled)

    def _apply_alone(self, span: Span, filling: Filling | BrokenScores | None) -> Commit:
        """Other requests of the step have changed by now: whatever fails here ends this one."""
        try:
            return self._apply(span, filling)
        except BaseException as error:
            return failed_commit(span.request, "this answer's canvas could not be filled", error)

    def _apply(self, span: Span, filling: Filling | BrokenScores | None) -> Commit:
        request = span.request
        if filling is None:
            return Commit(request, span.end - request.num_computed)
        if isinstance(filling, BrokenScores):
            return Commit(request, 0, error=filling)
        state = self._state(request)
        num_before = state.block.start
        tokens = state.apply(filling)
        self.num_denoise_steps += 1
        num_final = num_before if state.config.is_aligned else len(request.token_ids) + len(tokens)
        # Without a cache nothing stays computed. With full attention nothing is ever final in the cache: there,
        # computed means that the text is known.
        stays_computed = not (state.config.is_aligned and state.config.cache == "none")
        num_computed = num_final - request.num_computed if stays_computed else 0
        return Commit(request, num_computed, tokens, canvas=state.view() if state.config.params.events else None)

    def _state(self, request: Request) -> DenoiseState:
        state: DenoiseState | None = request.denoising
        if state is None:
            config: DenoiseConfig = make_denoise_config(request.params.diffusion, self._model)
            shape = config.shape(request.num_prompt, request.max_total_tokens, self._context)
            stop_ids = {*(() if request.params.ignore_eos else self._eos_ids), *request.params.stop_token_ids}
            state = request.denoising = DenoiseState(request, config, shape, self._model.mask_id, stop_ids)
        return state


def _split_by_span(sampled: Sampled, lengths: Sequence[int]) -> list[Sampled]:
    """Split the rows of a step by span."""
    parts, first = [], 0
    for length in lengths:
        part = slice(first, first + length)
        ids, logprobs, entropy = sampled.token_ids[part], sampled.logprobs[part], sampled.entropy[part]
        parts.append(Sampled(ids, logprobs, entropy, sampled.top_ids[part], sampled.top_logprobs[part]))
        first += length
    return parts


def broken_scores(span: Span) -> BrokenScores:
    """Why a request ends whose logits are no numbers."""
    return BrokenScores(
        f"the model's scores at positions {span.start:,} to {span.end - 1:,} are not numbers; "
        "the model file may be damaged: fetch it again or try another quantisation"
    )
