"""Models that denoise canvases of random tokens: the reference against transformers, the backends against it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.batch import RowSampling, SampleRows
from kvarn.backends.native import _native
from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.protocol import Backend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from tests.canvas_models import CANVASES, TEXT, VOCAB, canvas_batch, canvas_folder, canvas_gguf
from tests.running import layout_of, scattered_table
from tests.torch_backend import torch_cpu

torch = pytest.importorskip("torch")

Float32 = npt.NDArray[np.float32]

SHAPES = range(len(TEXT))
PROMPTS = (2, 23)  # shorter and longer than any window
TEMPERATURES = (0.8, 0.6, 0.4)
TOLERANCE = 1e-3  # measured: 4e-5 at most


def prompt_of(length: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(length).integers(3, VOCAB, length)]


def canvases_of(shape: int, count: int = 3) -> list[list[int]]:
    drawn = np.random.default_rng(7 + shape).integers(0, VOCAB, (count, CANVASES[shape]))
    return [[int(i) for i in row] for row in drawn]


class Made:
    """The models of this run: made once, used by all tests."""

    def __init__(self, folder: Path) -> None:
        self.made = cache(lambda shape: canvas_folder(shape, folder))
        self.gguf = cache(lambda shape: canvas_gguf(shape, folder))
        self.published = cache(self._published)
        self.reference = cache(lambda shape, length: run_steps(ReferenceBackend(), self.made(shape)[1], shape, length))

    def _published(self, shape: int, length: int) -> list[Float32]:
        """Logits of three steps of each of two canvases, the first of which becomes text."""
        model, text, found = self.made(shape)[0], prompt_of(length), []
        for _ in range(2):
            fed, canvases = None, canvases_of(shape)
            for canvas, t in zip(canvases, TEMPERATURES, strict=True):
                with torch.no_grad():
                    logits = model(
                        input_ids=torch.tensor([text]),
                        decoder_input_ids=torch.tensor([canvas]),
                        self_conditioning_logits=fed,
                    ).logits
                found.append(logits[0].numpy())
                fed = logits / t
            text = text + canvases[-1]
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("canvases"))


def run_steps(backend: Backend, path: Path, shape: int, length: int) -> list[Float32]:
    """The same through a paged cache: a step has what is new of the text, and the canvas."""
    described = describe(open_weights(path))
    assert backend.unsupported(described.spec) == []
    backend.load(described.spec, described.weights)
    layout = layout_of(described.spec)
    backend.reserve_kv(layout, 8 * layout.block_bytes)
    text, found, table = prompt_of(length), [], scattered_table(8, 4)
    num_computed = 0
    for _ in range(2):
        feedback, canvases = None, canvases_of(shape)
        for canvas, t in zip(canvases, TEMPERATURES, strict=True):
            batch = canvas_batch(text, canvas, table, first=num_computed, feedback=feedback)
            hidden = backend.forward(batch)
            found.append(np.array(backend.logits(hidden)))
            feedback = backend.sample(hidden, rows_of(len(canvas), t)).canvases[0].feedback
            num_computed = len(text)
        text = text + canvases[-1]
    return found


def rows_of(count: int, temperature: float, **more: Any) -> SampleRows:
    params = tuple(RowSampling(temperature=temperature, seed=5, position=i, **more) for i in range(count))
    return SampleRows(np.arange(count, dtype=np.int32), params, canvas_starts=np.array([0, count], np.int32))


@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_computes_what_transformers_computes(made: Made, shape: int, length: int) -> None:
    for ours, theirs in zip(made.reference(shape, length), made.published(shape, length), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_files_are_read_as_folders(made: Made, shape: int) -> None:
    from_gguf = run_steps(ReferenceBackend(), made.gguf(shape), shape, PROMPTS[1])
    for ours, theirs in zip(from_gguf, made.reference(shape, PROMPTS[1]), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


def test_what_a_step_feeds_back_shows_in_the_logits(made: Made) -> None:
    """Guards the tests above: with the feedback left out they would fail."""
    first, second = made.reference(0, 23)[:2]
    assert np.abs(first - second).max() > 1


@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_computes_what_the_reference_computes(made: Made, shape: int, length: int) -> None:
    for ours, theirs in zip(
        run_steps(torch_cpu(), made.made(shape)[1], shape, length), made.reference(shape, length), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("isa", _native.isa_names())
@pytest.mark.parametrize("shape", SHAPES)
def test_native_computes_what_the_reference_computes(made: Made, shape: int, isa: str) -> None:
    for length in PROMPTS:
        found = run_steps(NativeBackend(2, isa), made.made(shape)[1], shape, length)
        for ours, theirs in zip(found, made.reference(shape, length), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)
