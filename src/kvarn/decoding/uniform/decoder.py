"""Denoising of random tokens: a step computes what is new of the text, causally, and a canvas behind it.

Every row of a canvas gives a token and what the next step reads at its place; a canvas is committed whole when it is
done, and computed again as text with the first step of the next.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from kvarn.backends.batch import NO_TOKEN, CanvasScores, Int32, RowSampling, SampleRows
from kvarn.backends.protocol import Backend, Hidden
from kvarn.backends.unused_ids import NO_UNUSED_IDS
from kvarn.decoding.decoder import AnswerBounds, CanvasPart, Commit, CommittedToken, Reach, Span, failed_commit
from kvarn.decoding.denoise_config import check_supported
from kvarn.decoding.diffusion import broken_scores
from kvarn.decoding.position_sampling import PositionSampling
from kvarn.decoding.sampling_state import SamplingDefaults
from kvarn.decoding.speculation.speculation import Speculation
from kvarn.decoding.uniform.state import Renewal, UniformState
from kvarn.diffusion import DiffusionParams
from kvarn.errors import BrokenScores, InvalidParameter, PromptTooLong
from kvarn.models.diffusion.uniform import EntropyBound, UniformDiffusion
from kvarn.request import Request
from kvarn.types import SamplingParams

LEAST_CHUNK = 16  # rows of text that are worth a step
DEFAULTS = SamplingDefaults(top_p=1.0)  # of the published loop; its temperatures are those of the schedule
OWN_PARAMS = ("steps", "events")  # of DiffusionParams


class UniformDiffusionDecoder:
    """Span = text that is not computed yet, and the canvas; all rows of the canvas are outputs."""

    has_divisible_spans = False
    speculation: Speculation | None = None  # a canvas is denoised whole
    runs_ahead = False
    can_fork = False

    def __init__(
        self, backend: Backend, model: UniformDiffusion, vocab_size: int, eos_ids: tuple[int, ...], *, context: int
    ) -> None:
        """context: positions of text and canvas."""
        self.backend = backend
        self.unused = NO_UNUSED_IDS
        self.backend_s = 0.0
        self.num_denoise_steps = 0
        self._model = model
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._context = context

    def bound(self, prompt_ids: Sequence[int], params: SamplingParams, max_tokens: int) -> AnswerBounds:
        check_supported(params)
        _check_own(params, self._model)
        num_prompt, canvas = len(prompt_ids), self._model.canvas
        room = (self._context - num_prompt) // canvas * canvas
        if room < canvas:
            raise PromptTooLong(num_prompt, max(0, self._context - canvas))
        max_tokens = min(max_tokens, room)
        return AnswerBounds(max_tokens, (num_prompt + -(-max_tokens // canvas) * canvas,))

    def slots_to_start(self, request: Request) -> tuple[int, ...]:
        return self.slots_to_continue(request)

    def slots_to_continue(self, request: Request) -> tuple[int, ...]:
        return (self._state(request).end,)

    def least_rows(self, request: Request) -> int:
        num_text = len(request.token_ids) - request.num_computed
        return min(num_text, LEAST_CHUNK) if num_text else self._model.canvas

    def span(self, request: Request, budget: int) -> Span | None:
        state, start = self._state(request), request.num_computed
        text, canvas = request.token_ids[start:], state.token_ids.tolist()
        if len(text) + len(canvas) > budget:
            end = min(start + budget, state.start)
            return Span(request, start, text[:budget], (), Reach(request.id, end)) if end > start else None
        outputs = tuple(range(len(text), len(text) + len(canvas)))
        reach = Reach(request.id, state.end, canvas=CanvasPart(state.start, state.feedback))
        return Span(request, start, [*text, *canvas], outputs, reach)

    def commit(self, spans: Sequence[Span], hidden: Hidden) -> list[Commit]:
        denoising = [span for span in spans if span.outputs]
        sampled = iter(self._sample(denoising, hidden) if denoising else ())
        renewals = [self._decide(span, *next(sampled)) if span.outputs else None for span in spans]
        # Nothing has changed up to here: a step that fails in the backend is computed again.
        return [self._apply_alone(span, renewal) for span, renewal in zip(spans, renewals, strict=True)]

    def restart(self, request: Request) -> None:
        request.denoising = None

    def forget(self, request: Request) -> None:
        request.denoising = request.sampling = None

    def _sample(self, spans: Sequence[Span], hidden: Hidden) -> list[tuple[Int32, CanvasScores]]:
        """The tokens drawn for each canvas, and its scores."""
        params = [row for span in spans for row in self._params(span.request)]
        starts = np.array([0, *accumulate(len(span.outputs) for span in spans)], np.int32)
        rows = SampleRows(np.arange(len(params), dtype=np.int32), tuple(params), canvas_starts=starts)
        started_at = time.perf_counter()
        sampled = self.unused.sample(self.backend, hidden, rows)
        self.backend_s += time.perf_counter() - started_at
        return list(zip(np.split(sampled.token_ids, starts[1:-1]), sampled.canvases, strict=True))

    def _params(self, request: Request) -> list[RowSampling]:
        state = self._state(request)
        sampling: PositionSampling | None = request.sampling
        if sampling is None:
            sampling = request.sampling = PositionSampling(request, DEFAULTS, eos_ids=self._eos_ids)
        return list(sampling.rows(range(state.start, state.end), state.step, temperature=state.temperature))

    def _decide(self, span: Span, drawn: Int32, scores: CanvasScores) -> Renewal | BrokenScores:
        if (drawn == NO_TOKEN).any():
            return broken_scores(span)
        return self._state(span.request).decide(drawn, scores)

    def _apply_alone(self, span: Span, renewal: Renewal | BrokenScores | None) -> Commit:
        """Other requests of the step have changed by now: whatever fails here ends this one."""
        try:
            return self._apply(span, renewal)
        except BaseException as error:
            return failed_commit(span.request, "this answer's canvas could not be denoised", error)

    def _apply(self, span: Span, renewal: Renewal | BrokenScores | None) -> Commit:
        request = span.request
        if renewal is None:
            return Commit(request, span.end - request.num_computed)
        if isinstance(renewal, BrokenScores):
            return Commit(request, 0, error=renewal)
        state = self._state(request)
        state.apply(renewal)
        self.num_denoise_steps += 1
        diffusion, num_text = request.params.diffusion, state.start - request.num_computed
        view = state.view() if diffusion is not None and diffusion.events else None
        if not renewal.is_last:
            return Commit(request, num_text, canvas=view)
        tokens = tuple(CommittedToken(token_id) for token_id in renewal.token_ids.tolist())
        return Commit(request, num_text, tokens, canvas=view)

    def _state(self, request: Request) -> UniformState:
        state: UniformState | None = request.denoising
        if state is None:
            schedule = _schedule_of(request.params.diffusion, self._model.schedule)
            state = request.denoising = UniformState(request, schedule, self._model.canvas, self._vocab_size)
        elif len(request.token_ids) > state.start:  # the last canvas is text now
            state.begin_canvas()
        return state


def _schedule_of(params: DiffusionParams | None, schedule: EntropyBound) -> EntropyBound:
    steps = None if params is None else params.steps
    return schedule if steps is None else replace(schedule, max_steps=steps)


def _check_own(params: SamplingParams, model: UniformDiffusion) -> None:
    """Refuse by name what only autoregressive models or masks have."""
    for name in ("temperature", "logprobs"):
        if getattr(params, name) is not None:
            raise InvalidParameter(
                f"{name} cannot be honoured: each step of this model's canvases has a temperature of its own, and what "
                "is most probable in the last one is the answer; leave it out",
                field=name,
            )
    given, usual = params.diffusion or DiffusionParams(), DiffusionParams()
    allowed = {"block_length": (None, model.canvas), "canvas": (None, "grow"), "cache": (None, "block")}
    for name in DiffusionParams.__dataclass_fields__:
        value = getattr(given, name)
        if name not in OWN_PARAMS and value not in allowed.get(name, (getattr(usual, name),)):
            raise InvalidParameter(
                f"{name} cannot be honoured: this model denoises canvases of {model.canvas} random tokens as a whole, "
                f"with a schedule of its own; leave it out, or give {' or '.join(OWN_PARAMS)}",
                field=name,
            )
