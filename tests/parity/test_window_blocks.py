"""Layers that keep a window only give the same bytes as if all were kept: chunked, preempted, forked, from a prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvarn import Completion, EngineConfig, SamplingParams
from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.protocol import Backend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.decoding.autoregressive import AutoregressiveDecoder
from kvarn.decoding.sampling_state import SamplingDefaults
from kvarn.engine.admission import Admission
from kvarn.engine.embed_score import score_tokens
from kvarn.engine.engine import Engine
from kvarn.engine.stream import Stream
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.kv.cache import KVCache
from kvarn.kv.group import WindowShape
from kvarn.models.cache_cost import KEY_TILE, windowed_layers
from kvarn.models.describe import describe
from kvarn.models.recurrent import attentions
from tests.family_gguf import WITHOUT_GGUF, family_gguf
from tests.parity.test_same_bytes import UNPACED, NoText, same
from tests.running import layout_of
from tests.submitting import submit
from tests.tiny_families import FAMILIES, VOCAB, family_folder
from tests.tiny_models import tiny_model
from tests.torch_backend import torch_cpu

CONTEXT = 320
PARAMS = SamplingParams(temperature=1.1, top_p=0.9, seed=7, logprobs=2, ignore_eos=True, max_tokens=40)
GREEDY = PARAMS.replace(temperature=0.0)
SHORT = PARAMS.replace(max_tokens=4)
# Some layers with windows, with sinks, on the keys of another such layer, a model of which every layer has one, and one
# that has recurrent layers, too: it keeps everything, windows and states.
MODELS = ("gemma3", "gpt_oss", "gemma3n_text", "phi3", "llama4_text", "lfm3")
KINDS = pytest.mark.parametrize("params", [GREEDY, PARAMS], ids=["greedy", "sampled"])


class WindowedModel:
    """A tiny model, with a cache that keeps all or frees what lies before windows."""

    def __init__(self, arch: str, make: Callable[[int], Backend], folder: Path) -> None:
        if arch in FAMILIES:
            path = family_folder(arch, 0, folder)[1]
            path = path if (arch, 0) in WITHOUT_GGUF else family_gguf(path, TensorType.Q4_0)
        else:
            path = tiny_model(arch, folder, "gguf", type=TensorType.Q4_0)
        self._description = describe(open_weights(path))
        assert any(windowed_layers(self._description.spec))
        self._make = make

    def engine(self, num_window_blocks: int = 0, *, chunk: int = 64, num_blocks: int = 96, threads: int = 1) -> Engine:
        spec, backend = self._description.spec, self._make(threads)
        backend.load(spec, self._description.weights)
        layout, window = layout_of(spec, "f16"), None
        if num_window_blocks:
            layout = replace(layout, windowed=windowed_layers(spec), num_window_blocks=num_window_blocks)
            widest = max(attention.window or 0 for attention in attentions(spec))
            window = WindowShape(widest + KEY_TILE, num_window_blocks, chunk)
        num_blocks = backend.reserve_kv(layout, num_blocks * layout.block_bytes)
        kv = KVCache(num_blocks, layout.block_size, num_states=layout.num_states, window=window)
        decoder = AutoregressiveDecoder(backend, spec.vocab_size, (), SamplingDefaults())
        admission = Admission(spec.vocab_size, CONTEXT, decoder, kv)
        config = EngineConfig(max_batch_tokens=chunk, **UNPACED)
        return Engine(backend, decoder, kv, stream=Stream(NoText, ()), admission=admission, config=config)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WindowedModel:
    return WindowedModel(request.param, NativeBackend, tmp_path_factory.mktemp("model"))


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()  # type: ignore[no-any-return]


def answers(
    engine: Engine, prompts: Sequence[Sequence[int]], num_choices: int = 1, params: SamplingParams = PARAMS
) -> list[Completion]:
    """Those of all choices to all prompts, computed together; the cache is checked after every step."""
    requests = []
    for prompt in prompts:
        first = submit(engine, prompt, params)
        others = [submit(engine, prompt, params, choice=i, fork_of=first) for i in range(1, num_choices)]
        requests += [first, *others]
    found = {}
    while engine.has_work:
        for event in engine.step():
            if event.completion is not None:
                found[event.request_id] = event.completion
        engine.kv.check()
    return [found[request.id] for request in requests]


def alone(model: WindowedModel, prompt: Sequence[int], params: SamplingParams = PARAMS, choice: int = 0) -> Completion:
    """What an engine that keeps everything answers."""
    engine = model.engine()
    request, found = submit(engine, prompt, params, choice=choice), []
    while engine.has_work:
        found += [event.completion for event in engine.step() if event.completion is not None]
    assert request.is_ended
    return found[0]


@KINDS
@pytest.mark.parametrize("chunk", [16, 100])
def test_neighbours_and_preemption_change_nothing_where_windows_are_freed(
    model: WindowedModel, params: SamplingParams, chunk: int
) -> None:
    mine = [prompt_of(length, length) for length in (150, 20, 97)]
    expected = [alone(model, prompt, params) for prompt in mine]
    for num_blocks, num_window_blocks in ((96, 40), (15, 16)):
        engine = model.engine(num_window_blocks, chunk=chunk, num_blocks=num_blocks, threads=2)
        assert same(answers(engine, mine, params=params), expected)
        assert (engine.stats().preemptions > 0) == (num_blocks == 15)


@KINDS
def test_forks_share_a_window_and_leave_it(model: WindowedModel, params: SamplingParams) -> None:
    prompt = prompt_of(121, 5)
    expected = [alone(model, prompt, params, choice) for choice in range(3)]
    assert same(answers(model.engine(40), [prompt], num_choices=3, params=params), expected)


@KINDS
def test_a_prefix_is_taken_over_where_its_window_is_still_there(model: WindowedModel, params: SamplingParams) -> None:
    shared = prompt_of(192, 9)
    # On one thread their decodes read common blocks together, but the first has left some of the others' windows.
    mine = [[*shared, *prompt_of(length, length)] for length in (9, 30, 2, 3)]
    expected = [alone(model, prompt, params) for prompt in mine]
    engine = model.engine(60)
    found = [*answers(engine, mine[:1], params=params), *answers(engine, mine[1:], params=params)]
    assert same(found, expected)
    assert [completion.usage.cached_tokens for completion in found] == [0, 192, 192, 192]
    for block_id in engine.kv.groups[1].pool.cached_ids:  # as other sequences would by and by
        engine.kv.groups[1].unpublish(block_id)
    again = answers(engine, mine, params=params)
    assert same(again, expected)
    assert again[0].usage.cached_tokens == 0


def test_a_long_sequence_holds_its_window_only(model: WindowedModel) -> None:
    engine = model.engine(12)
    request = submit(engine, prompt_of(200, 3), PARAMS)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.kv.groups[1].num_held(request.id))
    assert most <= 11  # of 15: 8 + 64 tokens, and a chunk of 64
    ids = prompt_of(240, 4)
    kept = model.engine()
    scores = [score_tokens(one.backend, one.kv, ids, 32) for one in (kept, engine)]
    assert np.array_equal(*scores)


@pytest.mark.parametrize("arch", ["gemma3", "lfm3"])
def test_the_reference_computes_the_same_where_windows_are_freed(arch: str, tmp_path: Path) -> None:
    """Step for step: its sums depend on the shape of a batch."""
    model = WindowedModel(arch, lambda _threads: ReferenceBackend(), tmp_path)
    prompts = [prompt_of(130, 1), prompt_of(20, 2)]
    kept, freed = (answers(model.engine(count), prompts, num_choices=2) for count in (0, 40))
    assert same(freed, kept)


@pytest.mark.parametrize("arch", ["gpt_oss", "gemma3n_text", "lfm3"])
def test_torch_gives_the_same_bytes_where_windows_are_freed(arch: str, tmp_path: Path) -> None:
    """Beside a neighbour, in other chunks, forked and from a prefix: as alone with everything kept."""
    model, shared = WindowedModel(arch, torch_cpu, tmp_path), prompt_of(128, 9)
    prompts = [[*shared, 5, 7], [*shared, 9]]
    kept = model.engine(chunk=128)
    expected = [answer for prompt in prompts for answer in answers(kept, [prompt], num_choices=2, params=SHORT)]
    engine = model.engine(24, chunk=48)
    first = answers(engine, prompts[:1], num_choices=2, params=SHORT)
    assert same(first + answers(engine, prompts[1:], num_choices=2, params=SHORT), expected)
    request, held = submit(engine, prompts[0], SHORT), 0
    while engine.has_work:
        engine.step()
        held = max(held, engine.kv.groups[1].num_held(request.id))
    assert 0 < held <= 8  # of 9: 8 + 64 tokens, and a chunk of 48
