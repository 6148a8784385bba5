"""Several ranks against one: the same logits within the tolerance of float32, and the same bytes in every company.

The worlds of processes are shared by all tests of a shape, because each process imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvarn import SamplingParams
from kvarn.backends.batch import BlockCopy
from kvarn.backends.protocol import Backend
from kvarn.errors import ConfigError
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from tests.children import child_ids
from tests.diffusion_models import BLOCKS, DIFFUSION, tiny_diffusion
from tests.parity import test_native_diffusion as denoising
from tests.parity.test_same_bytes import KINDS, TinyModel, alone, prompts, run, same
from tests.parity.test_torch_reference import NUM_TOKENS, _beside_a_neighbour, _ids, _loaded, _table
from tests.running import Float32, all_logits, batch_of, layout_of
from tests.submitting import submit
from tests.tiny_models import DECODERS, VOCAB, tiny_model
from tests.torch_backend import on_ranks, torch_cpu, torch_world

if TYPE_CHECKING:
    from kvarn.backends.torch.parallel.workers import World

pytest.importorskip("torch")
Worlds = Callable[[tuple[int, int]], "World"]
Ranks = Callable[[], Backend]  # a fresh backend over the ranks of the test's shape
WORKER = "kvarn.backends.torch.parallel.worker"
# (tensor_parallel, pipeline_parallel). Four processes on two cores are slow: what two can show is left to two.
TWO, FOUR, STAGES = (2, 1), (4, 1), (1, 2)
BOTH = pytest.param((2, 2), marks=pytest.mark.long)
EVERYWHERE = pytest.mark.parametrize("shape", [TWO, FOUR, STAGES, BOTH], ids="{0[0]}x{0[1]}".format)
ON_SOME = pytest.mark.parametrize("shape", [TWO, BOTH], ids="{0[0]}x{0[1]}".format)
SHORT = ("llama", "qwen2", "gemma2", "qwen3moe")  # biases, sandwich norms, soft caps, windows, experts
DENOISING = [arch if arch in ("dream", "sdar") else pytest.param(arch, marks=pytest.mark.long) for arch in DIFFUSION]
ARCHITECTURES = [arch if arch in SHORT else pytest.param(arch, marks=pytest.mark.long) for arch in DECODERS]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """Worlds by shape, started when first asked for; closed, they leave no process behind."""
    made: dict[tuple[int, int], World] = {}

    def find(shape: tuple[int, int]) -> World:
        if shape not in made:
            made[shape] = torch_world(*shape)
        return made[shape]

    yield find
    assert len(child_ids(WORKER)) == sum(tensor * pipeline - 1 for tensor, pipeline in made)
    for world in made.values():
        world.close()
    assert child_ids(WORKER) == []


@pytest.fixture
def ranks(worlds: Worlds, shape: tuple[int, int]) -> Ranks:
    return lambda: on_ranks(worlds(shape))


def _close(ours: Float32, one_rank: Float32) -> None:
    np.testing.assert_allclose(ours, one_rank, atol=2e-5 * max(1.0, float(np.abs(one_rank).max())))


@EVERYWHERE
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_ranks_give_the_logits_of_one(ranks: Ranks, arch: str, tmp_path: Path) -> None:
    path = tiny_model(arch, tmp_path, "gguf", type=TensorType.Q4_0)
    backend = _loaded(ranks(), path)
    whole = all_logits(backend, _table(), _ids(), [NUM_TOKENS])
    _close(whole, all_logits(_loaded(torch_cpu(), path), _table(), _ids(), [NUM_TOKENS]))
    for chunks in [16] * 5 + [10], [33, 1, 1, 1, 54]:
        np.testing.assert_array_equal(all_logits(backend, _table(), _ids(), chunks), whole)
    np.testing.assert_array_equal(_beside_a_neighbour(backend, _ids()), whole)


@pytest.mark.parametrize("shape", [TWO], ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("family", ["gpt_oss", "qwen2_moe", "granite", "cohere", "phi"])
def test_ranks_divide_sinks_shared_experts_and_parallel_blocks(ranks: Ranks, family: str, tmp_path: Path) -> None:
    _, path = pytest.importorskip("tests.tiny_families").family_folder(family, 0, tmp_path)
    ids = [one % 100 for one in _ids(40)]
    ours, one_rank = (all_logits(_loaded(b, path), _table(), ids, [33, 7]) for b in (ranks(), torch_cpu()))
    _close(ours, one_rank)


@pytest.mark.parametrize("shape", [TWO], ids="{0[0]}x{0[1]}".format)
def test_a_norm_over_all_heads_is_not_divided(ranks: Ranks, tmp_path: Path) -> None:
    _, path = pytest.importorskip("tests.tiny_families").family_folder("olmo2", 0, tmp_path)
    with pytest.raises(ConfigError, match=r"norm over all heads.*give one of 1, or"):
        _loaded(ranks(), path)


@KINDS
@pytest.mark.parametrize(
    ("shape", "arch"),
    [(TWO, "gemma2"), (TWO, "qwen3moe"), (FOUR, "qwen3moe"), (STAGES, "gemma2")]
    + [pytest.param((2, 2), arch, marks=pytest.mark.long) for arch in SHORT],
)
def test_answers_are_the_same_bytes_in_every_company(
    ranks: Ranks, arch: str, params: SamplingParams, tmp_path: Path
) -> None:
    model, params = TinyModel(arch, tmp_path, lambda _: ranks()), params.replace(max_tokens=8)
    mine, others = prompts(2, 1), prompts(3, 1001)
    expected = [alone(model, prompt, params) for prompt in mine]
    engine = model.engine(chunk=16)
    submit(engine, others[0], params.replace(max_tokens=5))
    engine.step()
    requests = [submit(engine, mine[0], params)]
    for other in others[1:]:
        submit(engine, other, params.replace(max_tokens=3, seed=5))
    engine.step()
    requests.append(submit(engine, mine[1], params))
    assert same(run(engine, requests), expected)
    one_rank = [alone(TinyModel(arch, tmp_path, torch_cpu), prompt, params) for prompt in mine]
    assert [answer.token_ids for answer in expected] == [answer.token_ids for answer in one_rank]


@ON_SOME
def test_preempted_and_forked_answers_are_the_same_bytes(ranks: Ranks, tmp_path: Path) -> None:
    model, params = (
        TinyModel("llama", tmp_path, lambda _: ranks()),
        SamplingParams(temperature=1.1, seed=7, logprobs=2, ignore_eos=True, max_tokens=16),
    )
    mine = prompts(3, 2, low=20, high=31)
    expected = [alone(model, prompt, params) for prompt in mine]
    engine = model.engine(num_blocks=6, chunk=40)
    requests = [submit(engine, prompt, params) for prompt in mine]
    assert same(run(engine, requests), expected)
    assert sum(request.num_preemptions for request in requests) > 0
    choices = [alone(model, mine[0], params, choice) for choice in range(2)]
    engine = model.engine(num_blocks=16)
    first = submit(engine, mine[0], params)
    fork = submit(engine, mine[0], params, choice=1, fork_of=first)
    assert same(run(engine, [first, fork]), choices)


@EVERYWHERE
@pytest.mark.parametrize("arch", DENOISING)
def test_diffusion_over_ranks_is_that_of_one(ranks: Ranks, arch: str, tmp_path: Path) -> None:
    """A canvas, a block of it, and a block against the keys that all heads together, or each for itself, keep."""
    path, results = tiny_diffusion(arch, tmp_path, "gguf"), []
    keeps = [] if arch in BLOCKS else [denoising.keep_of(29, per_head=per_head) for per_head in (True, False)]
    for backend in (denoising.loaded(ranks(), path), denoising.loaded(torch_cpu(), path)):
        found = [all_logits(backend, denoising.OWN[None], denoising.canvas(), [denoising.LENGTH])]
        found.append(denoising.logits_of(backend, denoising.block_of(denoising.canvas(seed=8), denoising.OWN, 90)))
        for keep in keeps:
            found.append(denoising.logits_of(backend, denoising.refresh(keep)))
            found.append(denoising.logits_of(backend, denoising.reuse(denoising.canvas(seed=8), keep)))
        results.append(np.concatenate(found))
    _close(*results)


@EVERYWHERE
def test_an_encoder_over_ranks_gives_the_states_of_one(ranks: Ranks, tmp_path: Path) -> None:
    path, ids = tiny_model("bert", tmp_path, "safetensors"), _ids(40)
    for table in (_table(), np.empty((1, 0), np.int32)):
        ours, one_rank = (_loaded(b, path).forward(batch_of([(ids, 0)], table)) for b in (ranks(), torch_cpu()))
        _close(ours.numpy(), one_rank.numpy())


@ON_SOME
def test_copied_blocks_and_single_layers_are_what_they_are_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    backend, ids = _loaded(ranks(), tiny_model("gemma3", tmp_path, "gguf")), _ids(40)
    table = np.arange(8, dtype=np.int32)[None]
    whole = all_logits(backend, table, ids, [40])
    backend.copy_blocks([BlockCopy(i, 20 + i, 16) for i in range(2)])
    copied = backend.logits(backend.forward(batch_of([(ids[32:], 32)], table + 20)))
    np.testing.assert_array_equal(copied, whole[32:])
    passage = backend.begin(batch_of([(ids, 0)], table))
    while (hidden := passage.advance(0.0)) is None:
        assert passage.piece_s > 0
    np.testing.assert_array_equal(backend.logits(hidden), whole)


@ON_SOME
def test_a_wrong_batch_is_refused_and_the_ranks_go_on(ranks: Ranks, tmp_path: Path) -> None:
    backend = _loaded(ranks(), tiny_model("llama", tmp_path, "gguf"))
    good = batch_of([([5, 6, 7], 0)], _table())
    with pytest.raises(ValueError, match="token ids"):
        backend.forward(replace(good, token_ids=np.asarray([5, VOCAB, 7], np.int32)))
    assert np.isfinite(backend.logits(backend.forward(good))).all()
    assert backend.lost is None


@ON_SOME
def test_heads_that_do_not_divide_are_refused_before_a_rank_is_told(ranks: Ranks, tmp_path: Path) -> None:
    description = describe(open_weights(tiny_model("llama", tmp_path, "gguf")))
    first = description.spec.blocks[0]
    odd = replace(first, mixer=replace(first.attention, num_heads=3, num_kv_heads=3))
    backend = ranks()
    with pytest.raises(ConfigError, match=r"3 attention heads; give one of 1, 3"):
        backend.load(replace(description.spec, blocks=(odd, odd)), description.weights)
    layout = layout_of(description.spec)
    backend.load(description.spec, description.weights)
    assert backend.reserve_kv(layout, 8 * layout.block_bytes) == 8
