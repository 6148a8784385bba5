"""The included diffusion model: what it writes, its held-out likelihood, and what caches and policies cost it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvarn import LLM, DiffusionParams, SamplingParams, SparseConfig
from kvarn.backends.batch import Sampled, SampleRows
from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.protocol import Hidden
from kvarn.config import EngineConfig
from kvarn.decoding.diffusion import DiffusionDecoder
from kvarn.decoding.sampling_state import SamplingDefaults
from kvarn.engine.admission import Admission
from kvarn.engine.engine import Engine
from kvarn.engine.stream import Stream
from kvarn.formats.open import open_weights
from kvarn.hub import resolve
from kvarn.kv.cache import KVCache
from kvarn.models.describe import describe
from kvarn.models.spec import MaskedDiffusion
from kvarn.types import FinishReason
from tests.diffusing import NoText, run
from tests.running import all_logits, layout_of, scattered_table
from tests.submitting import submit

if TYPE_CHECKING:
    from tests.conftest import Record

STORIES = json.loads((Path(__file__).parents[1] / "golden" / "held_out_stories.json").read_text())
BASELINE = 1.567  # nats per token of the model to beat, on stories drawn in the same way
WAYS: dict[str, dict[str, Any]] = {
    "none": {"cache": "none"},
    "prefix": {"cache": "prefix"},
    "dual": {"cache": "dual"},
    "sparse": {"sparse": SparseConfig(retention_ratio=0.5)},
    "sub_block": {"cache": "sub_block"},
}
CACHED = ("prefix", "dual", "sparse", "sub_block")
Size = Callable[[int, int], int]


class Truth(NativeBackend):
    """A backend that always chooses what stands in a text, and keeps how probable that was."""

    def __init__(self) -> None:
        super().__init__(2)
        self.tokens: Sequence[int] = ()
        self.logprobs: dict[int, float] = {}  # by position, at the last look

    def sample(self, hidden: Hidden, rows: SampleRows) -> Sampled:
        found = super().sample(hidden, rows)
        positions = [row.position for row in rows.params]
        chosen = np.array([self.tokens[position] for position in positions], np.int32)
        scores = self.score(hidden, chosen, 0).logprobs
        self.logprobs |= dict(zip(positions, scores.tolist(), strict=True))
        return replace(found, token_ids=chosen, logprobs=scores)


@pytest.fixture(scope="module")
def truth() -> Truth:
    backend, described = Truth(), describe(open_weights(resolve("tiny-diffusion")))
    backend.load(described.spec, described.weights)
    return backend


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-diffusion") as llm:
        yield llm


def test_it_writes_english(llm: LLM) -> None:
    text = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=48)).text
    words = text.replace(",", " ").replace(".", " ").split()
    assert len(words) >= 30
    assert {"there", "was", "a", "little"} <= set(words)


def test_a_story_ends_where_the_next_one_would_begin(llm: LLM) -> None:
    story, end = next((story, story.index(1, 1)) for story in STORIES if 1 in story[100:])
    completion = llm.generate(story[: end - 6], SamplingParams(temperature=0, max_tokens=32))
    assert completion.finish_reason is FinishReason.STOP
    assert len(completion.token_ids) < 32
    assert "<s>" not in completion.text


def test_its_likelihood_beats_the_baseline(truth: Truth, size: Size, record: Record) -> None:
    """The bound of masked diffusion: n tokens masked, n uniform, each -log p weighed by 1 / n; first token given."""
    rng = np.random.default_rng(0)
    spec = describe(open_weights(resolve("tiny-diffusion"))).spec
    layout = layout_of(spec)
    truth.reserve_kv(layout, 20 * layout.block_bytes)
    stories, draws = STORIES[: size(6, len(STORIES))], size(2, 32)
    bounds = [
        np.mean([_bound(truth, story, count, rng) for count in _counts(len(story) - 1, draws, rng)])
        for story in stories
    ]
    nats, error = float(np.mean(bounds)), float(np.std(bounds) / np.sqrt(len(bounds)))
    figures = {"nats_per_token": nats, "standard_error": error, "stories": len(stories), "draws": draws}
    record("tiny-diffusion-likelihood", figures)
    assert nats < BASELINE


def _counts(longest: int, draws: int, rng: np.random.Generator) -> list[int]:
    """Stratified over 1 .. longest."""
    return [1 + int((draw + rng.random()) / draws * longest) for draw in range(draws)]


def _bound(backend: Truth, story: list[int], count: int, rng: np.random.Generator) -> float:
    places = 1 + rng.permutation(len(story) - 1)[:count]
    canvas = np.array(story)
    canvas[places] = _mask_id()
    logits = all_logits(backend, scattered_table(20, 16), canvas.tolist(), (len(story),))[places].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    picked = logits[np.arange(count), np.array(story)[places]]
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - picked))


def _mask_id() -> int:
    generation = describe(open_weights(resolve("tiny-diffusion"))).spec.generation
    assert isinstance(generation, MaskedDiffusion)
    return generation.mask_id


@pytest.mark.parametrize("way", CACHED)
def test_caches_cost_little_likelihood(truth: Truth, way: str, size: Size, record: Record) -> None:
    """A held-out text is revealed four tokens at a time, in random order within blocks of 32: nats per token."""
    stories, num_tokens = STORIES[: size(1, 32)], size(64, 192)
    nats = [_revealed(truth, story, num_tokens, WAYS[way]) for story in stories]
    order = (
        {"sub_block_length": 8} if way == "sub_block" else {}
    )  # four of the same eight at a time are harder to guess
    plain = [_revealed(truth, story, num_tokens, WAYS["none"] | order) for story in stories]
    figures = {"nats_per_token": float(np.mean(nats)), "uncached": float(np.mean(plain)), "stories": len(nats)}
    record(f"tiny-diffusion-revealed-{way}", figures)
    assert np.mean(nats) < np.mean(plain) + 0.1


def _revealed(backend: Truth, story: list[int], num_tokens: int, way: dict[str, Any]) -> float:
    num_prompt = 32
    backend.tokens, backend.logprobs = story, {}
    engine = _engine(backend)
    diffusion = DiffusionParams(policy="random", steps=num_tokens // 4, block_length=32, **way)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1, diffusion=diffusion)
    run(engine, [submit(engine, story[:num_prompt], params)])
    assert len(backend.logprobs) == num_tokens
    return -float(np.mean(list(backend.logprobs.values())))


def _engine(backend: Truth) -> Engine:
    spec = describe(open_weights(resolve("tiny-diffusion"))).spec
    assert isinstance(spec.generation, MaskedDiffusion)
    layout = layout_of(spec, "f16")
    kv = KVCache(backend.reserve_kv(layout, 64 * layout.block_bytes), layout.block_size)
    defaults = SamplingDefaults(temperature=0.0)
    decoder = DiffusionDecoder(backend, spec.generation, spec.vocab_size, (), defaults=defaults, context=512)
    admission = Admission(spec.vocab_size, 512, decoder, kv)
    config = EngineConfig(block_size=layout.block_size)
    return Engine(backend, decoder, kv, stream=Stream(NoText, ()), admission=admission, config=config, publishes=False)


@pytest.mark.parametrize("way", CACHED)
def test_cached_answers_agree_with_uncached_ones(llm: LLM, way: str, size: Size, record: Record) -> None:
    """Equal tokens until the first difference, as a share of the answer; greedy."""
    shares, num_tokens = [], size(16, 64)
    for story in STORIES[: size(1, 32)]:
        answers = [llm.generate(story[:24], _greedy(num_tokens, **WAYS[cache])).token_ids for cache in ("none", way)]
        shares.append(_common(*answers) / num_tokens)
    record(f"tiny-diffusion-agreement-{way}", {"share": float(np.mean(shares)), "answers": len(shares)})
    assert np.mean(shares) > 0.1


def _greedy(num_tokens: int, **options: Any) -> SamplingParams:
    diffusion = DiffusionParams(**options)
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, diffusion=diffusion)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
