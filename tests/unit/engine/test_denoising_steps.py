"""Diffusion requests in the engine: faults, interrupts, cancellation, shared prefixes, and who gets which rows."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn import InvalidParameter
from kvarn.backends.batch import Batch
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.backends.reference.layers import Float32
from kvarn.errors import BrokenScores
from tests.diffusing import DiffusionModel, answer, denoise, run
from tests.submitting import submit

PROMPT = [7, 31, 12, 90, 44, 8, 101]


class Watched(ReferenceBackend):
    """Keeps the rows and contexts of every batch; fails once, in a step of one's choice."""

    def __init__(self, fault: BaseException | None = None, step: int = 0) -> None:
        super().__init__()
        self.rows: list[list[int]] = []  # of each sequence
        self._fault = fault
        self._step = step

    def forward(self, batch: Batch) -> Float32:
        self.rows.append((batch.row_starts[1:] - batch.row_starts[:-1]).tolist())
        if self._fault is not None and len(self.rows) == self._step:
            raise self._fault
        return super().forward(batch)


class Poisoned(ReferenceBackend):
    """Whoever has this token gets scores that are not numbers."""

    TOKEN = 150

    def forward(self, batch: Batch) -> Float32:
        hidden = super().forward(batch)
        sequences = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.row_starts))
        struck = set(sequences[batch.token_ids == self.TOKEN].tolist())
        hidden[[sequence in struck for sequence in sequences[batch.output_rows].tolist()]] = np.nan
        return hidden


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> DiffusionModel:
    return DiffusionModel("llada-tied", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> DiffusionModel:
    return DiffusionModel("sdar", tmp_path_factory.mktemp("model"))


def test_a_step_computes_what_its_cache_does_not_hold(llada: DiffusionModel) -> None:
    expected = {"none": [15] * 8, "prefix": [15, 8, 8, 8, 15, 4, 4, 4], "dual": [15, 4, 4, 4] * 2}
    for cache, rows in expected.items():
        backend = Watched()
        answer(llada.engine(backend=llada.load(backend)), PROMPT, denoise(8, block_length=4, cache=cache))
        assert [row for (row,) in backend.rows] == rows


def test_block_diffusion_computes_each_block_once_more_beside_the_next(sdar: DiffusionModel) -> None:
    backend = Watched()
    answer(sdar.engine(backend=sdar.load(backend)), [*PROMPT, 3], denoise(8))
    assert [row for (row,) in backend.rows] == [12, 4, 4, 4, 8, 4, 4, 4]


def test_a_step_that_fails_once_is_computed_again(llada: DiffusionModel) -> None:
    params = denoise(8, block_length=4)
    expected = answer(llada.engine(), PROMPT, params)
    for step in (1, 3, 5):
        backend = llada.load(Watched(RuntimeError("once"), step))
        assert answer(llada.engine(backend=backend), PROMPT, params) == expected


def test_scores_that_are_not_numbers_end_their_own_request(llada: DiffusionModel) -> None:
    params = denoise(8, block_length=4)
    expected = answer(llada.engine(), PROMPT, params)
    engine = llada.engine(backend=llada.load(Poisoned()))
    healthy, struck = submit(engine, PROMPT, params), submit(engine, [*PROMPT, Poisoned.TOKEN], params)
    assert run(engine, [healthy])[0].token_ids == expected
    assert isinstance(struck.error, BrokenScores)
    assert engine.kv.num_free == engine.kv.num_blocks


def test_an_interrupted_step_changes_nothing(llada: DiffusionModel, sdar: DiffusionModel) -> None:
    for model in (llada, sdar):
        params = denoise(8)
        expected = answer(model.engine(), PROMPT, params)
        for step in (1, 3, 6):
            engine = model.engine(backend=model.load(Watched(KeyboardInterrupt(), step)))
            request = submit(engine, PROMPT, params)
            with pytest.raises(KeyboardInterrupt):
                run(engine, [request])
            engine.kv.check()
            assert run(engine, [request])[0].token_ids == expected


def test_a_cancelled_request_gives_all_its_sequences_back(llada: DiffusionModel) -> None:
    engine = llada.engine()
    request = submit(engine, PROMPT, denoise(16, block_length=8, cache="sparse", cfg_scale=1.0))
    for _ in range(4):
        engine.step()
    assert engine.kv.num_free < engine.kv.num_blocks
    request.is_cancel_requested = True
    engine.step()
    engine.kv.check()
    assert engine.kv.num_free == engine.kv.num_blocks


def test_a_finished_block_serves_the_next_request_with_the_same_beginning(sdar: DiffusionModel) -> None:
    engine = sdar.engine()
    prompt = PROMPT * 6  # two blocks of the cache and some
    first = run(engine, [submit(engine, prompt, denoise(30))])[0]
    longer = [*prompt, *first.token_ids]
    again = run(engine, [submit(engine, longer, denoise(6))])[0]
    assert first.usage.cached_tokens == 0
    assert again.usage.cached_tokens >= 48
    assert again.token_ids == answer(sdar.engine(), longer, denoise(6))


def test_what_sees_both_ways_is_never_shared(llada: DiffusionModel) -> None:
    engine = llada.engine()
    for _ in range(2):
        completion = run(engine, [submit(engine, PROMPT * 6, denoise(8))])[0]
        assert completion.usage.cached_tokens == 0
    assert engine.kv.num_free == engine.kv.num_blocks


def test_a_canvas_that_never_fits_is_refused_with_the_numbers(llada: DiffusionModel) -> None:
    engine = llada.engine(num_blocks=3)
    assert len(answer(engine, PROMPT, denoise(32))) == 32
    with pytest.raises(InvalidParameter, match=r"96 tokens of KV cache, which holds 48"):
        submit(engine, PROMPT, denoise(32, cfg_scale=1.0))


def test_refreshes_of_several_requests_take_turns(llada: DiffusionModel) -> None:
    backend = Watched()
    engine = llada.engine(backend=llada.load(backend), max_batch_tokens=32)
    requests = [submit(engine, PROMPT, denoise(16, block_length=4)) for _ in range(4)]
    run(engine, requests)
    assert max(map(sum, backend.rows)) <= 32
    assert any(sorted(rows) == [4, 23] for rows in backend.rows)  # a refresh beside a reuse
    assert {request.num_preemptions for request in requests} == {0}
