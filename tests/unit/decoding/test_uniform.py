"""Canvases of random tokens on a tiny model with the reference backend: ends, events, refusals, what is freed."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarn.backends.batch import Batch
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.backends.reference.layers import Float32
from kvarn.diffusion import SparseConfig
from kvarn.errors import BrokenScores, InvalidParameter, PromptTooLong
from kvarn.structured.constraints import Regex
from kvarn.types import FinishReason
from tests.canvas_engines import CanvasModel, denoise
from tests.canvas_models import CANVASES, CONTEXT
from tests.diffusing import answer, run
from tests.submitting import submit

PROMPT = [7, 31, 12, 90, 44, 8, 101]
CANVAS = CANVASES[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CanvasModel:
    return CanvasModel(0, tmp_path_factory.mktemp("model"))


class Watched(ReferenceBackend):
    """Keeps the rows of every batch; whoever has token 150 - 1 in its text gets scores that are not numbers."""

    POISON = 149

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = []

    def forward(self, batch: Batch) -> Float32:
        hidden = super().forward(batch)
        self.rows.append(np.diff(batch.row_starts).tolist())
        assert batch.canvases is not None or not len(batch.output_rows)
        if batch.token_ids[0] == self.POISON:
            hidden[:] = np.nan
        return hidden


def test_the_last_canvas_is_computed_as_text_beside_the_next(model: CanvasModel) -> None:
    backend = Watched()
    answer(model.engine(backend=model.load(backend)), PROMPT, denoise(2 * CANVAS, steps=3))
    assert [row for (row,) in backend.rows] == [len(PROMPT) + CANVAS, CANVAS, CANVAS, 2 * CANVAS, CANVAS, CANVAS]


def test_canvases_are_cut_at_the_end_of_the_answer(model: CanvasModel) -> None:
    whole = answer(model.engine(), PROMPT, denoise(2 * CANVAS))
    assert answer(model.engine(), PROMPT, denoise(CANVAS + 3)) == whole[: CANVAS + 3]
    engine = model.engine(eos_ids=(whole[2],))
    request = submit(engine, PROMPT, denoise(2 * CANVAS, sampling={"ignore_eos": False}))
    (completion,) = run(engine, [request])
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids == whole[:3]
    assert engine.kv.num_free == engine.kv.num_blocks


def test_below_min_tokens_no_canvas_ends(model: CanvasModel) -> None:
    whole = answer(model.engine(), PROMPT, denoise(2 * CANVAS))
    engine = model.engine(eos_ids=(whole[2],))
    found = answer(engine, PROMPT, denoise(2 * CANVAS, sampling={"ignore_eos": False, "min_tokens": CANVAS}))
    assert len(found) >= CANVAS
    assert whole[2] not in found[:CANVAS]


def test_events_show_what_was_taken_and_then_the_answer(model: CanvasModel) -> None:
    engine, events = model.engine(), []
    (completion,) = run(engine, [submit(engine, PROMPT, denoise(2 * CANVAS, steps=5, events=True))], events)
    views = [event.canvas for event in events if event.canvas is not None]
    assert [view.step for view in views] == list(range(1, 11))
    assert [(view.block_start, view.block_end) for view in views] == [(0, CANVAS)] * 5 + [(CANVAS, 2 * CANVAS)] * 5
    assert views[4].token_ids == completion.token_ids[:CANVAS]
    assert views[-1].token_ids == completion.token_ids
    assert all(any(token is not None for token in view.token_ids[view.block_start :]) for view in views)
    streamed = [event.token_id for event in events if event.canvas is None]
    assert tuple(streamed) == completion.token_ids


@pytest.mark.parametrize(
    ("field", "sampling", "options"),
    [
        ("temperature", {"temperature": 0.7}, {}),
        ("logprobs", {"logprobs": 1}, {}),
        ("repetition_penalty", {"repetition_penalty": 1.1}, {}),
        ("constraint", {"constraint": Regex("a"), "ignore_eos": False}, {}),
        ("pinned", {}, {"pinned": {0: 5}}),
        ("cfg_scale", {}, {"cfg_scale": 1.0}),
        ("sparse", {}, {"sparse": SparseConfig()}),
        ("cache", {}, {"cache": "dual"}),
        ("canvas", {}, {"canvas": "fixed"}),
        ("policy", {}, {"policy": "threshold"}),
        ("alg_temp", {}, {"alg_temp": 0.5}),
        ("block_length", {}, {"block_length": 4}),
        ("sub_block_length", {}, {"sub_block_length": 4}),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(
    model: CanvasModel, field: str, sampling: dict[str, Any], options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidParameter) as refused:
        model.engine().decoder.bound(PROMPT, denoise(sampling=sampling, **options), 20)
    assert refused.value.field == field


def test_a_prompt_that_leaves_no_room_for_a_canvas_is_refused(model: CanvasModel) -> None:
    engine = model.engine()
    assert len(answer(engine, [5] * (CONTEXT - CANVAS), denoise(40, steps=1))) == CANVAS
    with pytest.raises(PromptTooLong, match=str(CONTEXT - CANVAS)):
        submit(engine, [5] * (CONTEXT - CANVAS + 1), denoise(40))


def test_nothing_is_held_after_any_end(model: CanvasModel) -> None:
    """Finished, cancelled within a canvas, preempted and cancelled, failed: what steps fed back is gone."""
    engine = model.engine(backend=model.load(Watched()))
    requests = [submit(engine, [first, *PROMPT], denoise(3 * CANVAS)) for first in (5, 6, 7)]
    for _ in range(2):
        engine.step()
    kept = [weakref.ref(request.denoising.feedback) for request in requests]
    assert all(one() is not None for one in kept)
    engine.scheduler.preempt(requests[1])
    assert requests[1].denoising is None
    for request in requests[:2]:
        request.is_cancel_requested = True
    run(engine, requests[2:])
    struck = submit(engine, [Watched.POISON, *PROMPT], denoise(CANVAS))
    while engine.has_work:
        engine.step()
    assert isinstance(struck.error, BrokenScores)
    gc.collect()
    assert [one() for one in kept] == [None] * 3
    assert all(request.denoising is None and request.sampling is None for request in (*requests, struck))
    assert engine.kv.num_free == engine.kv.num_blocks
    assert requests[0].finish_reason is FinishReason.CANCELLED


def test_blocks_run_out_and_everybody_still_gets_the_same(model: CanvasModel) -> None:
    params = denoise(4 * CANVAS, steps=2)
    prompts = [[first, *PROMPT] for first in (5, 6, 7)]
    expected = [answer(model.engine(), prompt, params) for prompt in prompts]
    engine = model.engine(num_blocks=6, prefix_cache=False)
    found = run(engine, [submit(engine, prompt, params) for prompt in prompts])
    assert [completion.token_ids for completion in found] == expected
    assert engine.scheduler.num_preemptions > 0


def test_a_step_smaller_than_a_canvas_still_denoises(model: CanvasModel) -> None:
    expected = answer(model.engine(), PROMPT, denoise(CANVAS))
    assert answer(model.engine(max_batch_tokens=3), PROMPT, denoise(CANVAS)) == expected


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    from kvarn.errors import FormatError, ModelError
    from kvarn.formats.open import open_weights
    from kvarn.models.describe import describe
    from tests.canvas_models import canvas_gguf

    entries: dict[str, Any] = {
        "diffusion.canvas_length": 0,
        "diffusion.eb_max_steps": 0,
        "diffusion.eb_t_min": 2.0,
        "diffusion.eb_t_max": float("nan"),
        "diffusion.eb_entropy_bound": -1.0,
        "diffusion.eb_stability_threshold": "often",
        "diffusion-gemma.feed_forward_length": 40,
        "diffusion-gemma.attention.sliding_window": 2**40,
        "diffusion-gemma.unheard_of": 1,
        "diffusion-gemma.attention.shared_kv_layers": 1,
        "diffusion.shift_logits": True,
        "diffusion.eb_unheard_of": 0.5,
    }
    for key, value in entries.items():
        with pytest.raises((FormatError, ModelError)):
            describe(open_weights(canvas_gguf(0, tmp_path, **{key: value})))
