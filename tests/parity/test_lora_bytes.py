"""Same request, same bytes, with adapters: beside others, in chunks, preempted, forked, from a shared prefix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvarn import Completion, SamplingParams
from kvarn.adapters.pool import AdapterPool
from kvarn.engine.engine import Engine
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from kvarn.request import Request
from tests.lora_files import LINEARS, random_pairs, write_peft
from tests.parity.test_same_bytes import GREEDY, KINDS, TinyModel, prompts, run, same
from tests.submitting import submit
from tests.tiny_models import CONFIGS, random_tensors, tiny_model

NAMES = ("first", "second", "third")
ARCHS = ("llama", "qwen2")


class Adapted:
    """A tiny model with three adapters, of which the last also changes embedding and head."""

    def __init__(self, arch: str, folder: Path) -> None:
        self.model = TinyModel(arch, folder)
        self.model.path = tiny_model(arch, folder, "gguf", type=TensorType.Q4_0)
        self.tensors = random_tensors(arch, CONFIGS[arch])
        self.folder = folder
        for i, name in enumerate(NAMES):
            parts = (*LINEARS, "embed_tokens", "lm_head") if name == "third" else LINEARS
            write_peft(folder / name, random_pairs(self.tensors, parts, 2 + 5 * i, seed=i), r=2 + 5 * i)
        self.answers: dict[str, Completion] = {}

    def engine(self, **options: int) -> tuple[Engine, AdapterPool]:
        engine = self.model.engine(**options)
        pool = AdapterPool(describe(open_weights(self.model.path)).spec, engine.backend, 1 << 30)
        for name in NAMES:
            pool.load(self.folder / name)
        return engine, pool

    def alone(self, prompt: Sequence[int], params: SamplingParams, lora: str | None, choice: int = 0) -> Completion:
        key = repr((prompt, params, lora, choice))
        if key not in self.answers:
            engine, pool = self.engine()
            request = submit(engine, prompt, params, adapters=pool.uses(lora), choice=choice)
            (self.answers[key],) = run(engine, [request])
        return self.answers[key]


@pytest.fixture(scope="module", params=ARCHS)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(request.param, tmp_path_factory.mktemp("adapted"))


def submit_each(
    engine: Engine, pool: AdapterPool, work: Sequence[tuple[list[int], str | None]], params: SamplingParams
) -> list[Request]:
    return [submit(engine, prompt, params, adapters=pool.uses(lora)) for prompt, lora in work]


@KINDS
@pytest.mark.parametrize(("threads", "chunk"), [(1, 16), (2, 100), (2, 512)])
def test_neighbours_on_other_adapters_change_nothing(
    adapted: Adapted, params: SamplingParams, threads: int, chunk: int
) -> None:
    work = list(zip(prompts(8, seed=chunk), [*NAMES, None] * 2, strict=True))
    expected = [adapted.alone(prompt, params, lora) for prompt, lora in work]
    engine, pool = adapted.engine(threads=threads, chunk=chunk)
    requests = submit_each(engine, pool, work[:3], params)
    engine.step()
    requests += submit_each(engine, pool, work[3:], params)
    assert same(run(engine, requests), expected)


@KINDS
def test_preempted_requests_resume_on_their_adapter(adapted: Adapted, params: SamplingParams) -> None:
    work = list(zip(prompts(4, seed=2, low=20, high=31), [*NAMES, None], strict=True))
    expected = [adapted.alone(prompt, params, lora) for prompt, lora in work]
    engine, pool = adapted.engine(num_blocks=8, threads=2, chunk=40)
    requests = submit_each(engine, pool, work, params)
    assert same(run(engine, requests), expected)
    assert sum(request.num_preemptions for request in requests) > 0


@KINDS
def test_forked_choices_keep_the_adapter(adapted: Adapted, params: SamplingParams) -> None:
    (prompt,) = prompts(1, seed=5, low=40)
    expected = [adapted.alone(prompt, params, "third", choice) for choice in range(3)]
    engine, pool = adapted.engine(threads=2)
    first = submit(engine, prompt, params, adapters=pool.uses("third"))
    forks = [submit(engine, prompt, params, choice=i, fork_of=first, adapters=first.adapters) for i in (1, 2)]
    assert same(run(engine, [first, *forks]), expected)


@KINDS
def test_one_prompt_on_several_adapters_shares_blocks_with_its_own_only(
    adapted: Adapted, params: SamplingParams
) -> None:
    (prompt,) = prompts(1, seed=9, low=60)
    loras = (*NAMES, None)
    expected = [adapted.alone(prompt, params, lora) for lora in loras]
    assert len({completion.token_ids for completion in expected}) > 1
    engine, pool = adapted.engine(threads=2)
    first = run(engine, submit_each(engine, pool, [(prompt, lora) for lora in loras], params))
    again = run(engine, submit_each(engine, pool, [(prompt, lora) for lora in loras], params))
    assert same(first, expected)
    assert same(again, expected)
    assert [completion.usage.cached_tokens for completion in first] == [0] * 4
    assert all(completion.usage.cached_tokens >= 48 for completion in again)


def test_the_same_name_with_new_bytes_finds_no_old_block(adapted: Adapted, tmp_path: Path) -> None:
    (prompt,) = prompts(1, seed=9, low=60)
    engine, pool = adapted.engine()
    (old,) = run(engine, submit_each(engine, pool, [(prompt, "first")], GREEDY))
    pool.load(write_peft(tmp_path / "new", random_pairs(adapted.tensors, seed=77)), "first")
    (new,) = run(engine, submit_each(engine, pool, [(prompt, "first")], GREEDY))
    assert new.usage.cached_tokens == 0
    assert new.logprobs != old.logprobs
    pool.load(adapted.folder / "first")
    (back,) = run(engine, submit_each(engine, pool, [(prompt, "first")], GREEDY))
    assert back.usage.cached_tokens >= 48
    assert same([back], [old])
    half = submit(engine, prompt, GREEDY, adapters=pool.uses({"first": 0.5}))
    (scaled,) = run(engine, [half])
    assert scaled.usage.cached_tokens == 0
    assert scaled.logprobs != old.logprobs


def test_an_adapter_of_zeros_gives_the_bytes_of_the_base(adapted: Adapted, tmp_path: Path) -> None:
    pairs = random_pairs(adapted.tensors, (*LINEARS, "embed_tokens", "lm_head"))
    zeros = {module: (a, np.zeros_like(b)) for module, (a, b) in pairs.items()}
    engine, pool = adapted.engine(threads=2)
    pool.load(write_peft(tmp_path / "zeros", zeros))
    mine = prompts(3, seed=11)
    expected = [adapted.alone(prompt, GREEDY, None) for prompt in mine]
    assert same(run(engine, submit_each(engine, pool, [(prompt, "zeros") for prompt in mine], GREEDY)), expected)


def test_an_adapter_unloaded_in_the_middle_of_answers_stays_with_them(adapted: Adapted, tmp_path: Path) -> None:
    work = list(zip(prompts(4, seed=21), ["first", "first", "second", None], strict=True))
    expected = [adapted.alone(prompt, GREEDY, lora) for prompt, lora in work]
    engine, pool = adapted.engine(num_blocks=12)
    requests = submit_each(engine, pool, work, GREEDY)
    engine.step()
    held = pool.num_bytes
    pool.unload("first")
    pool.load(write_peft(tmp_path / "new", random_pairs(adapted.tensors, seed=77)), "first")
    assert pool.num_bytes > held
    engine.step()
    pool.unload("first")
    assert same(run(engine, requests), expected)
    del requests
    assert pool.num_bytes < held


def test_thirty_two_adapters_in_one_batch_answer_as_each_alone(adapted: Adapted, tmp_path: Path) -> None:
    params = GREEDY.replace(max_tokens=4)
    mine = prompts(32, seed=31, low=3, high=20)
    engine, pool = adapted.engine(num_blocks=128, threads=2)
    for i in range(32):
        pool.load(write_peft(tmp_path / f"user{i}", random_pairs(adapted.tensors, rank=1 + i % 9, seed=i), r=1 + i % 9))
    work = [(prompt, f"user{i}") for i, prompt in enumerate(mine)]
    together = run(engine, submit_each(engine, pool, work, params))
    engine, again = adapted.engine(num_blocks=128)
    for i in range(32):
        again.load(tmp_path / f"user{i}")
    alone = [run(engine, submit_each(engine, again, [one], params))[0] for one in work]
    assert same(together, alone)
    assert len(pool.loras) == 35
