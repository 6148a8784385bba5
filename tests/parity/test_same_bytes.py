"""Same request, same bytes: an answer does not depend on neighbours, chunks, preemption, forks, prefixes or threads.

Tokens and their log-probabilities are compared bit by bit with those of the request alone, greedy and sampled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvarn import LLM, Completion, EngineConfig, SamplingParams
from kvarn.backends.batch import Batch, Float32
from kvarn.backends.native import _native
from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.protocol import Backend
from kvarn.decoding.autoregressive import AutoregressiveDecoder
from kvarn.decoding.sampling_state import SamplingDefaults
from kvarn.engine.admission import Admission
from kvarn.engine.engine import Engine
from kvarn.engine.scheduling import scheduler
from kvarn.engine.stream import Stream
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.kv.cache import KVCache
from kvarn.models.describe import describe
from kvarn.request import Request
from tests.assets import smollm2
from tests.family_gguf import WITHOUT_GGUF, family_gguf
from tests.running import layout_of
from tests.submitting import submit
from tests.tiny_families import FAMILIES, family_folder
from tests.tiny_families import VOCAB as FAMILY_VOCAB  # the smaller one
from tests.tiny_models import DECODERS, tiny_model

if TYPE_CHECKING:
    from tests.conftest import Size

CONTEXT = 128
UNPACED: dict[str, Any] = {"max_stretch": 1000.0, "prefill_ms": 1e6}  # who runs beside whom depends on no clock
Answers = Callable[[bool], list[Completion]]  # whether sampled -> one for each of TEXTS
GREEDY = SamplingParams(temperature=0.0, logprobs=2, ignore_eos=True, max_tokens=20)
SAMPLED = GREEDY.replace(temperature=1.1, top_p=0.9, seed=7, repetition_penalty=1.2, min_p=0.01)
# Of every kind of layer that the tiny models of tests/tiny_models.py have not.
NEW_KINDS = (
    *("qwen3_next", "qwen3_5_text", "lfm2", "gpt_oss", "ministral3", "cohere2", "granite", "glm4_moe", "bloom"),
    *("gemma3n_text", "gemma4_text", "deepseek_v3", "llama4_text", "phimoe"),
    *("mamba2", "mamba", "falcon_h1", "nemotron_h", "granitemoehybrid", "lfm3"),
)
ISAS = [*_native.isa_names(), *_native.kernels.emulated_tables()]
KINDS = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


class NoText:
    """Tiny models have no tokeniser."""

    def __init__(self, _starts_text: bool, _visible_ids: frozenset[int]) -> None: ...

    def push(self, token_id: int) -> str:
        return ""

    def push_all(self, token_ids: Iterable[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class TinyModel:
    """One tiny model, from which engines of any shape are made."""

    def __init__(self, arch: str, folder: Path, make: Callable[[int], Backend] = NativeBackend) -> None:
        if arch in FAMILIES:
            self.path = family_folder(arch, 0, folder)[1]
            if (arch, 0) not in WITHOUT_GGUF:
                self.path = family_gguf(self.path, TensorType.Q4_0)
        else:
            self.path = tiny_model(arch, folder, "gguf", type=TensorType.Q4_0)
        self._make = make
        self.answers_alone: dict[str, Completion] = {}  # what was asked: what was said

    def engine(
        self,
        *,
        threads: int = 1,
        chunk: int = 512,
        num_blocks: int = 64,
        kv_dtype: str = "f16",
        runs_ahead: bool = False,
        max_running: int = 64,
        hash_key: bytes | None = None,
    ) -> Engine:
        description = describe(open_weights(self.path))
        backend = self._make(threads)
        backend.runs_ahead = runs_ahead
        backend.load(description.spec, description.weights)
        layout = layout_of(description.spec, kv_dtype)
        num_states = 4 * (max_running + 1) if layout.states else 0
        layout = replace(layout, num_states=num_states)
        num_blocks = backend.reserve_kv(layout, num_blocks * layout.block_bytes)
        kv = KVCache(num_blocks, layout.block_size, hash_key=hash_key, num_states=num_states)
        vocab_size = description.spec.vocab_size
        decoder = AutoregressiveDecoder(backend, vocab_size, (), SamplingDefaults())
        admission = Admission(vocab_size, min(CONTEXT, kv.max_tokens), decoder, kv)
        config = EngineConfig(max_batch_tokens=chunk, kv_dtype=kv_dtype, max_running=max_running, **UNPACED)
        return Engine(backend, decoder, kv, stream=Stream(NoText, ()), admission=admission, config=config)


@pytest.fixture(scope="module", params=[*DECODERS, *NEW_KINDS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(request.param, tmp_path_factory.mktemp("model"))


def prompts(count: int, seed: int, low: int = 3, high: int = 70) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, FAMILY_VOCAB, rng.integers(low, high)).tolist() for _ in range(count)]


def run(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Step to the end, checking the cache; the completions of these requests, in order."""
    found = {}
    while engine.has_work:
        for event in engine.step():
            if event.completion is not None:
                found[event.request_id] = event.completion
        engine.kv.check()
    return [found[request.id] for request in requests]


def alone(model: TinyModel, prompt: Sequence[int], params: SamplingParams, choice: int = 0) -> Completion:
    """The answer of an engine that never had anything else to do, asked once."""
    key = repr((prompt, params, choice))
    if key not in model.answers_alone:
        engine = model.engine()
        (model.answers_alone[key],) = run(engine, [submit(engine, prompt, params, choice=choice)])
    return model.answers_alone[key]


def same(found: Sequence[Completion], expected: Sequence[Completion]) -> bool:
    """Equal tokens and equal bits of their log-probabilities."""
    assert all(completion.token_ids and completion.logprobs for completion in expected)
    return [(c.token_ids, c.logprobs) for c in found] == [(c.token_ids, c.logprobs) for c in expected]


@KINDS
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk", [16, 100, 512])
def test_neighbours_chunks_and_threads_change_nothing(
    model: TinyModel, params: SamplingParams, threads: int, chunk: int, size: Size
) -> None:
    for seed in range(size(3, 30)):
        mine, others = prompts(2, seed), prompts(5, seed + 1000)
        expected = [alone(model, prompt, params) for prompt in mine]
        engine = model.engine(threads=threads, chunk=chunk)
        submit(engine, others[0], params.replace(max_tokens=9))
        engine.step()
        requests = [submit(engine, mine[0], params)]
        for other in others[1:4]:
            submit(engine, other, params.replace(max_tokens=1 + seed, seed=seed))
        engine.step()
        requests.append(submit(engine, mine[1], params))
        submit(engine, others[4], params)
        assert same(run(engine, requests), expected)


@KINDS
def test_preempted_requests_resume_with_the_same_answer(model: TinyModel, params: SamplingParams, size: Size) -> None:
    for seed in range(size(3, 30)):
        mine = prompts(4, seed, low=20, high=31)  # two blocks each, which grow to four
        expected = [alone(model, prompt, params) for prompt in mine]
        engine = model.engine(num_blocks=8, threads=2, chunk=40)
        requests = [submit(engine, prompt, params) for prompt in mine]
        assert same(run(engine, requests), expected)
        assert sum(request.num_preemptions for request in requests) > 0


@KINDS
def test_forked_choices_are_what_each_would_be_alone(model: TinyModel, params: SamplingParams) -> None:
    (prompt,) = prompts(1, seed=5, low=40)
    expected = [alone(model, prompt, params, choice) for choice in range(4)]
    for num_blocks in (64, 8):
        engine = model.engine(num_blocks=num_blocks, threads=2)
        first = submit(engine, prompt, params)
        forks = [submit(engine, prompt, params, choice=choice, fork_of=first) for choice in range(1, 4)]
        assert same(run(engine, [first, *forks]), expected)
    assert (len({completion.token_ids for completion in expected}) > 1) == (params.temperature != 0.0)


@KINDS
def test_a_shared_prefix_gives_the_same_answer(model: TinyModel, params: SamplingParams) -> None:
    shared, *tails = prompts(4, seed=9, low=50)
    mine = [shared, *([*shared, *tail[:20]] for tail in tails), shared]
    expected = [alone(model, prompt, params) for prompt in mine]
    engine = model.engine(threads=2)
    first = run(engine, [submit(engine, mine[0], params)])
    later = run(engine, [submit(engine, prompt, params) for prompt in mine[1:]])
    assert same([*first, *later], expected)
    assert all(completion.usage.cached_tokens >= 32 for completion in later)


@KINDS
@pytest.mark.parametrize("max_running", [1, 2])
def test_with_few_slots_for_states_answers_stay_the_same(
    params: SamplingParams, max_running: int, tmp_path: Path
) -> None:
    model = TinyModel("qwen3_5_text", tmp_path)
    shared, *tails = prompts(5, seed=4, low=33, high=60)
    mine = [*([*shared, *tail[:9]] for tail in tails), shared, *([*shared, *tail[:9]] for tail in tails)]
    expected = [alone(model, prompt, params) for prompt in mine]
    engine = model.engine(max_running=max_running, chunk=24, num_blocks=16)
    found = run(engine, [submit(engine, prompt, params) for prompt in mine])
    assert same(found, expected)
    assert any(completion.usage.cached_tokens >= 16 for completion in found)


class FailingBackend(NativeBackend):
    """Every third step of several requests fails after it has written everything."""

    num_calls = 0

    def forward(self, batch: Batch) -> Float32:
        hidden = super().forward(batch)
        self.num_calls += len(batch.context_lens) > 1
        if self.num_calls % 3 == 2 and len(batch.context_lens) > 1:
            raise RuntimeError("after the fact")
        return hidden


@KINDS
def test_a_step_that_fails_after_it_has_written_is_repeated_with_the_same_answer(
    params: SamplingParams, tmp_path: Path
) -> None:
    sound = TinyModel("qwen3_5_text", tmp_path)
    mine = prompts(4, seed=8, low=20)
    expected = [alone(sound, prompt, params) for prompt in mine]
    engine = TinyModel("qwen3_5_text", tmp_path / "again", FailingBackend).engine(chunk=30)
    assert same(run(engine, [submit(engine, prompt, params) for prompt in mine]), expected)


@pytest.mark.parametrize("arch", ["qwen3_5_text", "llama"])
def test_a_plan_or_a_step_that_is_interrupted_counts_for_nothing(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TinyModel(arch, tmp_path)
    prompt = prompts(1, seed=6, low=50)[0]
    mine = [prompt, [*prompt[:36], 7, 7, 7], prompt]
    expected = [alone(model, one, GREEDY) for one in mine]
    engine = model.engine(chunk=40)
    found = []
    for number, one in enumerate(mine):
        request = submit(engine, one, GREEDY)
        places: tuple[tuple[Any, str], ...] = ((scheduler, "make_plan"), (engine.backend, "forward"))
        for place, name in places:  # while it is planned, and when it is to be computed
            with monkeypatch.context() as patched:
                patched.setattr(place, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
            if number:
                engine.step()
        found += run(engine, [request])
    assert same(found, expected)


def interrupted(*_arguments: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kv_dtype", ["f32", "q8_0"])
@KINDS
def test_every_type_of_cache_keeps_the_promise(params: SamplingParams, kv_dtype: str, tmp_path: Path) -> None:
    check_cuts(TinyModel("llama", tmp_path), params, kv_dtype)


@pytest.mark.parametrize("isa", [name for name in ISAS if "amx" in name])
@KINDS
def test_tables_with_tiles_keep_the_promise(params: SamplingParams, isa: str, tmp_path: Path) -> None:
    for arch in ("llama", "deepseek_v3"):  # the second has products with matrices of each head, and experts
        check_cuts(TinyModel(arch, tmp_path / arch, lambda threads: NativeBackend(threads, isa)), params, "f16")


def check_cuts(model: TinyModel, params: SamplingParams, kv_dtype: str) -> None:
    """Prompts alone and together, in chunks of several sizes, on one and two threads."""
    mine = prompts(4, seed=3, low=30, high=90)
    expected = []
    for prompt in mine:
        engine = model.engine(kv_dtype=kv_dtype)
        expected += run(engine, [submit(engine, prompt, params)])
    for num_blocks, threads, chunk in [(64, 2, 16), (8, 1, 100)]:
        engine = model.engine(num_blocks=num_blocks, threads=threads, chunk=chunk, kv_dtype=kv_dtype)
        assert same(run(engine, [submit(engine, prompt, params) for prompt in mine]), expected)


KV_TOKEN_BYTES = 23_040  # of SmolLM2, f16
SAGA = "The mill stood by the river, and every morning the miller opened the gate and listened to the water. "
TEXTS = ["One, two,", SAGA * 5, "The sun", "def add(a, b):", SAGA * 2 + "Then", "Once upon a time there was", SAGA * 8]


@pytest.fixture(scope="module")
def answers(size: Size) -> Iterator[Answers]:
    """What SmolLM2 answers to each text alone, one after the other, without any cached prefix."""
    with LLM(str(smollm2()), backend="native", context=1024, threads=2) as llm:

        @functools.cache
        def ask(is_sampled: bool) -> list[Completion]:
            params = real_params(is_sampled, size).replace(reuse_cache=False)
            return [llm.generate(text, params) for text in TEXTS]

        yield ask


def real_params(is_sampled: bool, size: Size) -> SamplingParams:
    kind = SAMPLED if is_sampled else GREEDY
    return kind.replace(max_tokens=size(20, 64))


WAYS = {
    "one thread, chunks of 16": {"threads": 1, "max_batch_tokens": 16},
    "chunks of 100": {"threads": 2, "max_batch_tokens": 100},
    "preempted": {"threads": 1, "context": 256, "kv_bytes": 256 * KV_TOKEN_BYTES},
    "all at once": {"threads": 2},
}


@pytest.mark.model
@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("way", WAYS)
def test_a_real_model_keeps_the_promise(answers: Answers, is_sampled: bool, way: str, size: Size) -> None:
    params, expected = real_params(is_sampled, size), answers(is_sampled)
    config = EngineConfig(**{"kv_bytes": 8192 * KV_TOKEN_BYTES} | UNPACED | WAYS[way])
    with LLM(str(smollm2()), config=config) as llm:
        for _ in range(2):  # the second time every prompt finds itself in the cache
            handles = [llm.submit(text, params.replace(n=1 + (i == 4))) for i, text in enumerate(TEXTS)]
            neighbours = [llm.submit(text[::-1], params.replace(seed=i)) for i, text in enumerate(TEXTS[:3])]
            assert same([handle.result(300) for handle in handles], expected)
            assert all(handle.result(300).token_ids for handle in neighbours)
        stats = llm.stats()
        assert stats.prefix_hit_tokens > 0
        assert (stats.preemptions > 0) == (way == "preempted")
