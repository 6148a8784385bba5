"""The torch backend on the CPU under the engine: the same bytes in every company, and the reference's answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvarn import LLM, Completion, DiffusionParams, SamplingParams, SparseConfig
from kvarn.config import EngineConfig
from kvarn.engine.engine import Engine
from kvarn.errors import DeviceLost
from kvarn.hub import resolve
from tests.assets import qwen_coder, smollm2
from tests.parity.test_same_bytes import GREEDY, SAMPLED, TinyModel, alone, prompts, run, same
from tests.submitting import submit
from tests.torch_backend import torch_cpu


@pytest.fixture(scope="module", params=["gemma2", "qwen3moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(request.param, tmp_path_factory.mktemp("model"), torch_cpu)


KINDS = pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, SAMPLED.replace(repetition_penalty=1.0)], ids=["greedy", "penalised", "sampled"]
)
AHEAD = pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "runs-ahead"])


@AHEAD
@KINDS
@pytest.mark.parametrize("chunk", [16, 100])
def test_neighbours_and_chunks_change_nothing(
    model: TinyModel, params: SamplingParams, chunk: int, runs_ahead: bool
) -> None:
    mine, others = prompts(2, 1), prompts(4, 1001)
    expected = [alone(model, prompt, params) for prompt in mine]
    engine = model.engine(chunk=chunk, runs_ahead=runs_ahead)
    submit(engine, others[0], params.replace(max_tokens=9))
    engine.step()
    requests = [submit(engine, mine[0], params)]
    for other in others[1:]:
        submit(engine, other, params.replace(max_tokens=3, seed=5))
    engine.step()
    requests.append(submit(engine, mine[1], params))
    assert same(run(engine, requests), expected)
    assert engine.stats().retried_steps == 0


@AHEAD
@KINDS
def test_preempted_requests_resume_with_the_same_answer(
    model: TinyModel, params: SamplingParams, runs_ahead: bool
) -> None:
    mine = prompts(4, 2, low=20, high=31)
    expected = [alone(model, prompt, params) for prompt in mine]
    engine = model.engine(num_blocks=8, chunk=40, runs_ahead=runs_ahead)
    requests = [submit(engine, prompt, params) for prompt in mine]
    assert same(run(engine, requests), expected)
    assert sum(request.num_preemptions for request in requests) > 0
    assert engine.stats().retried_steps == 0


@AHEAD
@KINDS
def test_forks_and_shared_prefixes_change_nothing(model: TinyModel, params: SamplingParams, runs_ahead: bool) -> None:
    (prompt,) = prompts(1, seed=5, low=40)
    expected = [alone(model, prompt, params, choice) for choice in range(3)]
    engine = model.engine(num_blocks=16, runs_ahead=runs_ahead)
    first = submit(engine, prompt, params)
    forks = [submit(engine, prompt, params, choice=choice, fork_of=first) for choice in (1, 2)]
    assert same(run(engine, [first, *forks]), expected)
    (again,) = run(engine, [submit(engine, prompt, params)])
    assert same([again], expected[:1])
    assert again.usage.cached_tokens >= 32
    assert engine.stats().retried_steps == 0


@pytest.mark.model
@pytest.mark.parametrize("find", [smollm2, pytest.param(qwen_coder, marks=pytest.mark.long)])
def test_greedy_text_of_a_real_model_is_the_references(find: object) -> None:
    path = str(find())  # type: ignore[operator]
    prompt, params = "The capital of France is", GREEDY.replace(max_tokens=5, logprobs=None)
    found = [_answer(backend, path, prompt, params) for backend in ("torch", "reference")]
    assert found[0].text == found[1].text
    assert "Paris" in found[0].text


WAYS = {"full": {"cache": "none"}, "dual": {"cache": "dual"}, "sparse": {"sparse": SparseConfig(retention_ratio=0.5)}}


@pytest.mark.parametrize("way", WAYS)
def test_the_included_diffusion_model_writes_what_the_reference_writes(way: str) -> None:
    path = str(resolve("tiny-diffusion"))
    params = SamplingParams(temperature=0.0, max_tokens=16, diffusion=DiffusionParams(steps=4, **WAYS[way]))  # type: ignore[arg-type]
    found = [_answer(backend, path, "Once upon a time", params) for backend in ("torch", "reference")]
    assert found[0].token_ids == found[1].token_ids


def _answer(backend: str, path: str, prompt: str, params: SamplingParams) -> Completion:
    config = EngineConfig(backend=backend, context=128, kv_dtype="f32", threads=1)
    with LLM(path, config=config) as llm:
        return llm.generate(prompt, params)


def test_a_pool_of_texts_is_embedded_as_the_reference_does(tmp_path: Path) -> None:
    from kvarn.backends.reference.backend import ReferenceBackend
    from tests.parity.test_torch_reference import _ids, _loaded, _table
    from tests.running import batch_of
    from tests.tiny_models import tiny_model

    path, ids, vectors = tiny_model("bert", tmp_path), _ids(30), []
    for backend in (torch_cpu(), ReferenceBackend()):
        batch = batch_of([(ids, 0)], _table())
        vectors.append(_loaded(backend, path).pool(backend.forward(batch), batch.row_starts, "mean"))
    assert abs(vectors[0] - vectors[1]).max() < 1e-5


class Failing:
    """Operations that fail once as a device does."""

    def __init__(self, ops: Any, error: Exception, at: int) -> None:
        self._ops, self._error, self._left = ops, error, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, *args: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise self._error
        return self._ops.linear(*args)


@AHEAD
def test_a_step_without_memory_is_computed_request_by_request(model: TinyModel, runs_ahead: bool) -> None:
    import torch

    mine = prompts(3, 1)
    expected = [alone(model, prompt, GREEDY) for prompt in mine]
    engine = model.engine(runs_ahead=runs_ahead)
    _fail(engine, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), at=30)
    assert same(run(engine, [submit(engine, prompt, GREEDY) for prompt in mine]), expected)
    assert engine.stats().retried_steps == 1


@pytest.mark.parametrize(
    "text", ["CUDA error: an illegal memory access", "Triton Error [CUDA]: unspecified launch failure"]
)
def test_a_lost_device_is_told_apart_from_a_failed_step(model: TinyModel, text: str) -> None:
    engine = model.engine()
    _fail(engine, RuntimeError(text), at=1)
    submit(engine, prompts(1, 1)[0], GREEDY)
    backend: Any = engine.backend
    plan = engine.scheduler.plan()
    with pytest.raises(DeviceLost, match=r"the device is lost.*restart the process"):
        backend.forward(plan.batch)


def _fail(engine: Engine, error: Exception, at: int) -> None:
    backend: Any = engine.backend
    backend._model = replace(backend._model, ops=Failing(backend._model.ops, error, at))
