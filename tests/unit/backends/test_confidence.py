"""The most probable token but the mask token, how probable, and the entropy: the definition, and the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvarn import LLM, DiffusionParams, EngineConfig, SamplingParams
from kvarn.backends.batch import NO_TOKEN, RowSampling, SampleRows
from kvarn.sampling.sampler import BANNED
from tests.diffusing import write_talking_model

torch = pytest.importorskip("torch")

from kvarn.backends.torch.denoising.confidence import (  # noqa: E402
    CONFIDENT_ROWS,
    asks_for_confidence,
    confident_rows,
    most_confident,
)
from kvarn.backends.torch.sampling import sample_rows  # noqa: E402

MASK_ID = 7
# Rows over more than one part of a kernel; ties, a mask token that is largest, and a logit that is not finite.
MADE = """
import torch
logits = 3 * torch.randn(6, 9001, generator=torch.Generator().manual_seed(0))
logits[0, 7] = 50.0
logits[1, [4100, 8999]] = 40.0
logits[2, 5000] = float("nan")
logits[3] = 0.0
logits[4, 9000] = 1e4
"""
KERNEL = (
    MADE
    + """
from kvarn.backends.torch.denoising.confidence import most_confident as plain
from kvarn.backends.torch.cuda.confidence import most_confident
found, wanted = most_confident(logits, 7), plain(logits, 7)
assert torch.equal(found[0], wanted[0]), (found[0], wanted[0])
for mine, theirs in zip(found[1:], wanted[1:]):
    torch.testing.assert_close(mine, theirs, rtol=2e-7, atol=1e-7)
alone = most_confident(logits[5:], 7)
assert all(torch.equal(one[5:], other) for one, other in zip(found, alone))
"""
)


def rows_of(count: int, **changes: object) -> SampleRows:
    ban = {"bias_ids": np.array([MASK_ID], np.int32), "bias_values": np.array([BANNED], np.float32)}
    row = RowSampling(**(ban | changes))  # type: ignore[arg-type]
    return SampleRows(np.arange(count, dtype=np.int32), (row,) * count, want_logprobs=True)


def made_logits() -> torch.Tensor:
    names: dict[str, torch.Tensor] = {}
    exec(MADE, names)
    return names["logits"]


def test_it_is_what_sampling_gives() -> None:
    logits, rows = made_logits(), rows_of(6)
    sampled = sample_rows(lambda wanted: logits[wanted], rows, logits.device)
    token_ids, logprobs, entropy = most_confident(logits, MASK_ID)
    assert token_ids.tolist() == sampled.token_ids.tolist()
    assert token_ids[[1, 2, 3]].tolist() == [4100, NO_TOKEN, 0]
    np.testing.assert_array_equal(logprobs.numpy(), sampled.logprobs)
    np.testing.assert_array_equal(entropy.numpy(), sampled.entropy)


def test_many_rows_are_those_alone() -> None:
    logits = torch.randn(CONFIDENT_ROWS + 3, 50)
    together = confident_rows(lambda some: logits[some], len(logits), most_confident, MASK_ID)
    wanted = SampleRows(np.array([CONFIDENT_ROWS + 1, 5], np.int32), rows_of(2).params, want_logprobs=True)
    drawn = together.drawn(wanted)
    alone = [most_confident(logits[row : row + 1], MASK_ID) for row in wanted.rows]
    for column, found in enumerate((drawn.token_ids, *drawn.scores[:2])):
        assert found.tolist() == [one[column].item() for one in alone]


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.5},
        {"bias_ids": np.array([3], np.int32)},
        {"bias_values": np.array([-5], np.float32)},
        {"bias_ids": np.array([MASK_ID, 3], np.int32), "bias_values": np.array([BANNED, 1], np.float32)},
        {"mask": np.ones(2, np.uint32)},
    ],
)
def test_rows_that_ask_for_more_are_sampled(changes: dict[str, object]) -> None:
    assert asks_for_confidence(rows_of(2), MASK_ID)
    assert not asks_for_confidence(rows_of(2, **changes), MASK_ID)


def test_a_request_that_is_sampled_gets_the_same_answer(tmp_path: Path) -> None:
    path, config = (
        write_talking_model(tmp_path / "tiny.gguf"),
        EngineConfig(backend="torch", device="cpu", threads=1, context=64),
    )
    with LLM(path, config=config) as llm:
        for policy in ("low_confidence", "entropy", "threshold"):
            diffusion = DiffusionParams(block_length=4, policy=policy)
            answers = [
                llm.generate("hello", SamplingParams(max_tokens=8, logit_bias=bias, diffusion=diffusion)).token_ids
                for bias in ({}, {3: 0.0})  # a bias of nothing: not a plain row any more
            ]
            assert answers[0] == answers[1]


def test_the_kernels_agree_with_the_definition() -> None:
    pytest.importorskip("triton")
    interpreted = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KERNEL]
    done = subprocess.run(command, env=interpreted, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_steps_for_warming_up_are_sound_and_have_the_usual_sizes() -> None:
    pytest.importorskip("triton")
    from kvarn.backends.torch.cuda.steps.graphs import DENOISING_OUTPUTS, DENOISING_ROWS
    from kvarn.backends.torch.cuda.steps.warm_up import denoising_warm_up_batches

    batches = denoising_warm_up_batches(64, 64, 4096)
    for batch in batches:
        tables, contexts = batch.block_tables, batch.context_lens
        assert np.array_equal(np.diff(batch.row_starts), contexts)
        assert len(np.unique(tables)) == tables.size
        assert tables.shape[1] * 64 >= contexts.max()
        assert 0 <= batch.output_rows.min() <= batch.output_rows.max() < len(batch.token_ids)
        assert np.all(np.diff(batch.output_rows) > 0)
    assert {len(batch.token_ids) for batch in batches} >= set(DENOISING_ROWS)
    assert {len(batch.output_rows) for batch in batches} == set(DENOISING_OUTPUTS)


def test_a_full_step_of_the_engine_is_captured_and_warmed_up() -> None:
    pytest.importorskip("triton")
    from kvarn.backends.torch.cuda.steps.graphs import MAX_ROWS, PROMPT_ROWS, prompt_rows
    from kvarn.backends.torch.cuda.steps.warm_up import warm_up_batches

    assert prompt_rows(512) == prompt_rows(MAX_ROWS + 1) == PROMPT_ROWS
    assert prompt_rows(8190) == (*PROMPT_ROWS, 8192)
    full = [batch for batch in warm_up_batches(64, 1024, 4096, 8192) if len(batch.token_ids) == 8192]
    assert sorted(len(batch.context_lens) for batch in full) == [16, 32]
    assert not any(len(batch.token_ids) == 8192 for batch in warm_up_batches(64, 1024, 4096, 512))
