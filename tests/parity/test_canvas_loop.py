"""The published loop over canvases, with its random numbers replaced by ours: the engine gives the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarn.backends.batch import RowSampling
from kvarn.decoding.uniform.state import within_bound
from kvarn.sampling.philox import FIRST_CANVAS, RENEWAL, uniform
from kvarn.sampling.sampler import choose
from tests.canvas_engines import CanvasModel, denoise
from tests.canvas_models import VOCAB, transformers_model
from tests.diffusing import answer

torch = pytest.importorskip("torch")

SEED = 3
PROMPT = [5, 6, 7, 8, 9, 10, 11]


class OurNumbers:
    """Stands between the published loop and torch's generator."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.models.diffusion_gemma import generation_diffusion_gemma as published

        self.start, self.step, self.num_steps = len(PROMPT), -1, 0  # of the canvas that is made next
        self._length = model.config.canvas_length
        inner = model._denoising_step

        def denoising_step(**given: Any) -> Any:
            self.num_steps += 1
            self.step += 1
            return inner(**given)

        def prepare(**given: Any) -> Any:
            self.start, self.step = given["past_key_values"].get_seq_length(1), -1
            return prepared(**given)

        prepared = model._prepare_denoiser_inputs
        monkeypatch.setattr(model, "_denoising_step", denoising_step)
        monkeypatch.setattr(model, "_prepare_denoiser_inputs", prepare)
        monkeypatch.setattr(published.EntropyBoundSampler, "initialize_canvas", self._canvas)
        monkeypatch.setattr(torch, "multinomial", self._draw)

    def _canvas(self, *_: object, **__: object) -> Any:
        purpose, step = (FIRST_CANVAS, 0) if self.step < 0 else (RENEWAL, self.step)
        drawn = [uniform(SEED, self.start + i, 0, purpose, step) for i in range(self._length)]
        return torch.tensor([[int(u * VOCAB) for u in drawn]])

    def _draw(self, probs: Any, num_samples: int) -> Any:
        rows = [RowSampling(1.0, seed=SEED, position=self.start + i, draw=self.step) for i in range(len(probs))]
        logs = np.log(probs.numpy().astype(np.float64) + 1e-300).astype(np.float32)
        return torch.tensor([[choose(one, row)] for one, row in zip(logs, rows, strict=True)])


@pytest.mark.parametrize(("shape", "steps"), [(0, 12), (1, 7), (2, 9)])
def test_the_published_loop_gives_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: int, steps: int
) -> None:
    num_steps = compare_loops(tmp_path, monkeypatch, shape, max_denoising_steps=steps)
    assert num_steps == 3 * steps


@pytest.mark.parametrize(("shape", "stability"), [(0, 1), (1, 0), (2, 2)])
def test_canvases_end_where_those_of_the_published_loop_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: int, stability: int
) -> None:
    sure = {"t_min": 0.01, "t_max": 0.1, "confidence_threshold": 0.4, "stability_threshold": stability}
    num_steps = compare_loops(tmp_path, monkeypatch, shape, scale=3.0, max_denoising_steps=40, **sure)
    assert 3 * (stability + 1) <= num_steps < 3 * 40


def compare_loops(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shape: int, *, scale: float = 1.0, **schedule: Any
) -> int:
    """Three canvases of both; the steps they took."""
    model = transformers_model(shape, scale)
    named = {"max_denoising_steps": "eb_max_steps"}
    entries = {f"diffusion.{named.get(key, f'eb_{key}')}": value for key, value in schedule.items()}
    engine = CanvasModel(shape, folder, scale=scale, **entries).engine()
    num_tokens = 3 * model.config.canvas_length
    tokens = answer(engine, PROMPT, denoise(num_tokens, steps=None))
    numbers = OurNumbers(model, monkeypatch)
    published = model.generate(torch.tensor([PROMPT]), max_new_tokens=num_tokens, **schedule)
    assert published.sequences[0, len(PROMPT) :].tolist() == list(tokens)
    assert numbers.num_steps == engine.decoder.num_denoise_steps
    return numbers.num_steps


def test_positions_are_taken_from_the_least_entropy_on() -> None:
    entropy = np.array([0.05, 0.0, 0.04, 0.05, 0.9, 0.02], np.float32)
    assert within_bound(entropy, 0.1).tolist() == [True, True, True, False, False, True]  # of two equal ones the left


def test_one_position_is_always_taken() -> None:
    assert within_bound(np.array([3.0, 2.0, 4.0], np.float32), 0.1).tolist() == [False, True, False]
