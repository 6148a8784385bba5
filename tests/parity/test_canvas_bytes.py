"""An answer of canvases does not depend on neighbours, chunks, preemption, faults or a shared prefix: bit for bit, in
what it feeds back as well."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvarn.backends.batch import Batch, Sampled, SampleRows
from kvarn.backends.protocol import Backend, Hidden
from kvarn.decoding.uniform.state import Renewal, UniformState
from kvarn.engine.engine import Engine
from kvarn.formats.weights import TensorType
from kvarn.request import Request
from kvarn.types import SamplingParams
from tests.canvas_engines import CanvasModel, denoise
from tests.canvas_models import VOCAB, WIDE
from tests.diffusing import run
from tests.submitting import submit

Trace = dict[tuple[int, int], str]  # by canvas and step
PARAMS = denoise(30, steps=4)
BACKENDS = ("native", "torch")  # NumPy's products depend on how many rows there are


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CanvasModel:
    return CanvasModel(WIDE, tmp_path_factory.mktemp("model"), TensorType.Q4_0, scale=0.1)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> dict[int, Trace]:
    """What every step of every request gave, by the number of its prompt."""
    found: dict[int, Trace] = {}
    apply = UniformState.apply

    def traced(self: UniformState, renewal: Renewal) -> None:
        scores = renewal.scores
        parts = (renewal.token_ids, scores.best_ids, scores.entropy, np.asarray(scores.feedback))
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()
        trace = found.setdefault(hash(self._request.prompt_ids), {})
        assert trace.setdefault((self.start, self.step), digest) == digest
        apply(self, renewal)

    monkeypatch.setattr(UniformState, "apply", traced)
    return found


def prompts(count: int = 3) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, VOCAB, length).tolist() for length in (3, 40, 21)[:count]]


def finish(engine: Engine, requests: Sequence[Request], preempted_in: Sequence[int] = ()) -> None:
    step = 0
    while engine.has_work:
        engine.step()
        engine.kv.check()
        step += 1
        if step in preempted_in:
            for request in requests:
                if request.id in engine.scheduler._live.running:
                    engine.scheduler.preempt(request)
    assert all(request.error is None and request.denoising is None for request in requests)


def alone(model: CanvasModel, name: str) -> list[tuple[int, ...]]:
    found = []
    for prompt in prompts():
        engine = model.engine(name, prefix_cache=False)
        found.append(run(engine, [submit(engine, prompt, PARAMS)])[0].token_ids)
    return found


def together(engine: Engine, preempted_in: Sequence[int] = ()) -> list[tuple[int, ...]]:
    requests = [submit(engine, prompt, PARAMS) for prompt in prompts()]
    finish(engine, requests, preempted_in)
    assert (engine.scheduler.num_preemptions > 0) == bool(preempted_in)
    return [tuple(request.output_ids) for request in requests]


class FailsOnce:
    """A backend whose sample() or forward() fails once, after it has computed."""

    def __init__(self, backend: Backend, method: str, step: int) -> None:
        self._backend, self._method, self._left = backend, method, step

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def forward(self, batch: Batch) -> Hidden:
        return self._counted("forward", lambda: self._backend.forward(batch))

    def sample(self, hidden: Hidden, rows: SampleRows) -> Sampled:
        return self._counted("sample", lambda: self._backend.sample(hidden, rows))

    def _counted(self, method: str, compute: Callable[[], Sampled]) -> Sampled:
        found = compute()
        self._left -= method == self._method
        if self._left == 0 and method == self._method:
            raise RuntimeError("once")
        return found


@pytest.mark.parametrize("name", BACKENDS)
def test_an_answer_depends_on_nothing_but_itself(model: CanvasModel, name: str, traces: dict[int, Trace]) -> None:
    expected = alone(model, name)
    assert len(set(expected)) == 3
    assert together(model.engine(name)) == expected  # batched
    assert together(model.engine(name, max_batch_tokens=19)) == expected  # prompts in chunks, canvases alone
    assert together(model.engine(name), preempted_in=(2, 3, 7)) == expected  # within a canvas
    for method in ("forward", "sample"):
        failing = FailsOnce(model.backend(name), method, 3)
        assert together(model.engine(name, backend=failing)) == expected  # type: ignore[arg-type]
    assert len(traces) == 3
    assert all(len(trace) == 2 * 4 for trace in traces.values())  # two canvases of four steps


@pytest.mark.parametrize("name", BACKENDS)
def test_a_shared_prefix_changes_nothing(model: CanvasModel, name: str, traces: dict[int, Trace]) -> None:
    expected, engine = alone(model, name), model.engine(name)
    assert together(engine) == expected
    assert together(engine) == expected  # on the blocks of the first round, those of answers included
    assert engine.kv.stats().hit_tokens >= 32
    answer = prompts()[1] + list(expected[1])
    longer = submit(engine, answer, PARAMS)
    finish(engine, [longer])
    fresh = model.engine(name, prefix_cache=False)
    assert run(fresh, [submit(fresh, answer, PARAMS)])[0].token_ids == longer.output_ids
    assert len(traces) == 4


def test_native_answers_do_not_depend_on_threads(model: CanvasModel, traces: dict[int, Trace]) -> None:
    from kvarn.backends.native.backend import NativeBackend

    expected = alone(model, "native")
    assert together(model.engine("native", backend=model.load(NativeBackend(2)))) == expected
    assert len(traces) == 3


def test_several_choices_are_told_apart_by_their_number(model: CanvasModel) -> None:
    def answers(params: SamplingParams) -> list[tuple[int, ...]]:
        engine = model.engine("native")
        requests = [submit(engine, prompts()[1], params)]
        requests += [submit(engine, prompts()[1], params, choice=i, fork_of=requests[0]) for i in (1, 2)]
        return [completion.token_ids for completion in run(engine, requests)]

    found = answers(PARAMS)
    assert len(set(found)) == 3
    assert answers(PARAMS) == found
    assert found[0] == alone(model, "native")[1]
