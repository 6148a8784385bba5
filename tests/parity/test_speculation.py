"""Speculation never changes a byte: every kind of sampling, every drafter, alone and in any company.

Drafters that are right, wrong, partly right or random stand beside the real ones; all of their drafts are computed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvarn import EngineConfig, JsonSchema, Regex, SamplingParams
from kvarn.adapters.pool import AdapterPool
from kvarn.decoding.speculation.draft_length import Always
from kvarn.decoding.speculation.drafters import Drafter, Proposal
from kvarn.decoding.speculation.speculation import Speculation
from kvarn.engine.drafting.draft_layer import CachedDraftLayer
from kvarn.engine.drafting.draft_model import CachedDraftModel
from kvarn.engine.engine import Engine
from kvarn.engine.load import LoadedModel, load_model
from kvarn.request import Request, RequestState
from kvarn.submissions import Submissions
from kvarn.types import Completion
from tests.chat_model import write_chat_model, write_draft_layer_model, write_pruned_model
from tests.conftest import Size
from tests.parity.test_same_bytes import GREEDY, TinyModel, alone, prompts
from tests.parity.test_same_bytes import SAMPLED as SAMPLED_PARAMS
from tests.submitting import submit

PEOPLE = {
    "type": "object",
    "properties": {"first_name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
    "required": ["first_name", "age"],
    "additionalProperties": False,
}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "seed": 11}
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(**SAMPLED),
    "penalties": SamplingParams(**SAMPLED, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    "a window of penalties": SamplingParams(temperature=0.5, seed=3, repetition_penalty=1.5, penalty_window=9),
    "DRY": SamplingParams(temperature=0.3, seed=5, dry_multiplier=2.0, dry_allowed_length=1),
    "XTC": SamplingParams(**SAMPLED, xtc_probability=0.6, xtc_threshold=0.01),
    "JSON schema": SamplingParams(**SAMPLED, constraint=JsonSchema(PEOPLE)),
    "regex": SamplingParams(**SAMPLED, constraint=Regex(r"(abcdefgh[0-9]{2}-){3}stop")),
    "stop strings": SamplingParams(temperature=1.5, seed=9, stop=("e", "a")),
    "min_tokens": SamplingParams(**SAMPLED, min_tokens=12, logit_bias={256: 8.0}),
}
METHODS = ("prediction", "ngram", "grammar", "suffix")
DRAFT_MODELS = ("a draft model", "the model itself")
DRAFT_LAYERS = {"a layer that is near": True, "a layer that is far": False}
WAYS = pytest.mark.parametrize("way", ["alone", "batched", "preempted", "chunked"])
MISTAKES = {"right": 0.0, "partly right": 0.3, "wrong": 0.95, "random": 1.1}
PREDICTION = 'the mat and the cat {"first_name": "'
PROMPT = "the cat sat on the mat and the cat sat on the "
LENGTH = 24
Counts = dict[str, int]


class Scripted:
    """Knows the answer, and says something else with probability wrong; wrong above 1: tokens at random."""

    source = "script"

    def __init__(self, answer: Sequence[int], wrong: float, seed: int) -> None:
        self._answer, self._wrong, self._random = answer, wrong, random.Random(seed)

    def propose(self, request: Request, max_tokens: int) -> Proposal | None:
        left = self._answer[request.num_output :] or [1]
        number = self._random.randint(1, max_tokens)
        ids = [one if self._random.random() >= self._wrong else self._random.randrange(260) for one in left[:number]]
        return Proposal(self.source, ids, 3)


class Model:
    """Engines of one model that has a tokeniser, and what each kind of request answers without speculation."""

    def __init__(self, path: Path, pruned: Path | None = None, kv_bytes: int = 16 << 20) -> None:
        self.path, self._kv_bytes = path, kv_bytes
        self.drafts = {} if pruned is None else {"a draft model": pruned, "the model itself": path}
        self.words: Submissions | None = None  # with the compiled constraints
        self.expected = self.answers(self.load("off"))

    def load(self, speculation: str, **options: Any) -> LoadedModel:
        unpaced = {"max_stretch": 1e3, "prefill_ms": 1e6}  # who runs beside whom depends on no clock
        sizes = {"context": 512, "kv_bytes": self._kv_bytes}
        config = EngineConfig(threads=1, speculation=speculation, **sizes, **unpaced, **options)
        model = load_model(self.path, config)
        adapters = AdapterPool(model.spec, model.backend, 0)
        self.words = self.words or Submissions(model.tokenizer, model.spec, adapters)
        return model

    def answers(self, model: LoadedModel) -> dict[str, Completion]:
        """Of all kinds, one after the other."""
        return {name: run(model.engine, [self.submit(model, name)])[0] for name in KINDS}

    def submit(self, model: LoadedModel, name: str, prompt: str = PROMPT) -> Request:
        return self.submit_all(model, KINDS[name], prompt)[0]

    def submit_all(self, model: LoadedModel, params: SamplingParams, prompt: str = PROMPT) -> Sequence[Request]:
        assert self.words is not None
        params = params.replace(max_tokens=LENGTH, logprobs=2, prediction=PREDICTION)
        return model.engine.submit(self.words.of_ids(model.tokenizer.encode(prompt), params, tenant="one"))


def run(engine: Engine, requests: Sequence[Request], preempts: random.Random | None = None) -> list[Completion]:
    """Step to the end, checking the cache after every step, and what each running request holds of it."""
    found = {}
    while engine.has_work:
        for event in engine.step():
            if event.completion is not None:
                found[event.request_id] = event.completion
        engine.kv.check()
        check_draft(engine)
        running = [request for request in requests if request.state is RequestState.RUNNING]
        assert all(engine.kv.num_tokens(one.id) == one.num_computed for one in running)
        if preempts is not None and running and preempts.random() < 0.3:
            engine.scheduler.preempt(preempts.choice(running))
    return [found[request.id] for request in requests]


def check_draft(engine: Engine) -> None:
    """What the draft model holds is in its cache, and no wrong guess is among what it takes for sure."""
    speculation = engine.decoder.speculation
    if speculation is not None and speculation.model_drafts is not None:
        draft = speculation.model_drafts.model
        assert isinstance(draft, CachedDraftModel | CachedDraftLayer)
        draft.kv.check()
        assert draft.num_held == {name: draft.kv.num_tokens(name) for name in draft.num_held}


def bytes_of(completion: Completion) -> tuple[Any, ...]:
    return completion.text, completion.token_ids, completion.logprobs, completion.finish_reason, completion.stop_match


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = write_chat_model(tmp_path_factory.mktemp("model") / "chat.gguf")
    return Model(path, write_pruned_model(path.with_name("pruned.gguf")))


def eager(tiny: Model, drafter: str, **options: Any) -> LoadedModel:
    """A model that computes whatever its drafters say."""
    if drafter in DRAFT_LAYERS:
        model = tiny.load("mtp", **options)
    elif drafter in tiny.drafts:
        model = tiny.load("draft", draft_model=str(tiny.drafts[drafter]), **options)
    else:
        methods = drafter if drafter in METHODS else "auto,suffix" if drafter == "real" else "grammar"
        model = tiny.load(methods, **options)
    speculation = model.engine.decoder.speculation
    assert speculation is not None
    speculation.length = Always()
    if drafter in MISTAKES:
        speculation.extra.append(lambda request: iter([scripted(tiny, drafter, request)]))
    return model


def scripted(tiny: Model, drafter: str, request: Request) -> Drafter:
    asked = request.params.replace(max_tokens=None, logprobs=None, prediction=None, n=1)
    answer = next(one.token_ids for name, one in tiny.expected.items() if KINDS[name] == asked)
    return Scripted(answer, MISTAKES[drafter], request.number)


@WAYS
@pytest.mark.parametrize("drafter", ["real", *METHODS, *MISTAKES, *DRAFT_MODELS])
def test_no_drafter_changes_a_byte(tiny: Model, drafter: str, way: str, size: Size) -> None:
    check_no_drafter_changes_a_byte(tiny, drafter, way, size(2, 10))


def check_no_drafter_changes_a_byte(tiny: Model, drafter: str, way: str, rounds: int) -> Counts:
    """Compare all kinds of requests with what they answer without speculation."""
    model = eager(tiny, drafter, max_batch_tokens=24 if way == "chunked" else 512)
    for seed in range(rounds):
        if way == "alone":
            found = tiny.answers(model)
        else:
            requests = [tiny.submit(model, name) for name in KINDS]
            if way == "chunked":
                model.engine.step()
                tiny.submit(model, "greedy", PROMPT * 8)
            preempts = random.Random(seed) if way == "preempted" else None
            found = dict(zip(KINDS, run(model.engine, requests, preempts), strict=True))
        for name, expected in tiny.expected.items():
            assert bytes_of(found[name]) == bytes_of(expected), name
    check_counts(model, drafter, way, rounds)
    model.close()
    return counts_of(model)


def check_counts(model: LoadedModel, drafter: str, way: str, rounds: int) -> None:
    """Drafts were computed, and as many were right as this drafter makes."""
    stats = model.engine.stats()
    num_accepted = sum(stats.accepted_per_position)
    enough = rounds if drafter in METHODS else 5 * rounds
    assert stats.drafts > enough
    assert num_accepted > enough or drafter in ("wrong", "random", "a layer that is far")
    if drafter == "the model itself":
        assert num_accepted >= 0.9 * stats.draft_tokens  # those behind the end of an answer are not counted as right
    elif drafter != "right":
        assert num_accepted < stats.draft_tokens or drafter in ("grammar", "suffix")
    elif way != "chunked":  # there a longer prompt stands beside, whose answer it does not know
        assert num_accepted == stats.draft_tokens


def counts_of(model: LoadedModel) -> Counts:
    stats = model.engine.stats()
    return {"guessed_tokens": stats.draft_tokens, "accepted_tokens": sum(stats.accepted_per_position)}


@pytest.fixture(scope="module", params=DRAFT_LAYERS)
def layered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Model]:
    path = tmp_path_factory.mktemp("model") / "layered.gguf"
    return request.param, Model(write_draft_layer_model(path, is_near=DRAFT_LAYERS[request.param]))


@WAYS
def test_no_layer_of_the_model_changes_a_byte(layered: tuple[str, Model], way: str, size: Size) -> None:
    name, model = layered
    check_no_drafter_changes_a_byte(model, name, way, size(2, 10))


@WAYS
@pytest.mark.parametrize("drafter", ["real", "partly right", "a draft model"])
def test_several_answers_to_one_prompt_are_what_they_would_be(tiny: Model, drafter: str, way: str, size: Size) -> None:
    check_several_answers(tiny, drafter, way, size(2, 10))


@WAYS
def test_several_answers_with_a_layer_of_the_model_are_what_they_would_be(
    layered: tuple[str, Model], way: str, size: Size
) -> None:
    name, model = layered
    check_several_answers(model, name, way, size(2, 10))


def check_several_answers(tiny: Model, drafter: str, way: str, rounds: int) -> Counts:
    """Compare n = 4 of sampled kinds with what each answers alone without speculation."""
    kinds = [KINDS[name].replace(n=4) for name in ("temperature 1", "penalties", "JSON schema")]
    off = tiny.load("off")
    expected = [bytes_of(one) for params in kinds for one in run(off.engine, tiny.submit_all(off, params))]
    off.close()
    model = eager(tiny, drafter, max_batch_tokens=24 if way == "chunked" else 512)
    for seed in range(rounds):
        if way == "alone":
            found = [one for params in kinds for one in run(model.engine, tiny.submit_all(model, params))]
        else:
            if way == "chunked":
                tiny.submit(model, "greedy", PROMPT * 8)
                model.engine.step()
            requests = [request for params in kinds for request in tiny.submit_all(model, params)]
            found = run(model.engine, requests, random.Random(seed) if way == "preempted" else None)
        assert [bytes_of(one) for one in found] == expected
    stats = model.engine.stats()
    assert stats.drafts > 5 * rounds
    assert sum(stats.accepted_per_position) > rounds or drafter == "a layer that is far"
    model.close()
    assert len(set(expected)) > 8 or drafter == "a layer that is near"  # that model says little
    return counts_of(model)


def test_a_request_may_refuse_to_be_speculated_about(tiny: Model) -> None:
    model = eager(tiny, "real")
    run(model.engine, tiny.submit_all(model, KINDS["greedy"].replace(speculate=False)))
    assert model.engine.stats().drafts == 0


def test_no_tenant_is_drafted_what_another_was_told(tiny: Model) -> None:
    model = tiny.load("suffix")
    speculation = model.engine.decoder.speculation
    assert tiny.words is not None
    assert speculation is not None
    speculation.length = Always()
    ids, params = model.tokenizer.encode("tell me"), SamplingParams(temperature=1.0, seed=4, max_tokens=40)
    num_accepted = []
    for tenant in ("one", "two", "one"):
        run(model.engine, model.engine.submit(tiny.words.of_ids(ids, params.replace(reuse_cache=False), tenant)))
        num_accepted.append(speculation.counts.num_accepted_tokens)
    assert num_accepted[:2] == [0, 0]
    assert num_accepted[2] >= 30


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
def test_every_backend_takes_several_rows_of_one_answer(tiny: Model, backend: str) -> None:
    options: dict[str, Any] = {"backend": backend} | ({"device": "cpu"} if backend == "torch" else {})
    params = [KINDS[name] for name in ("greedy", "temperature 1", "penalties", "JSON schema")]
    found = []
    for model in (tiny.load("off", **options), eager(tiny, "partly right", **options)):
        requests = [request for one in params for request in tiny.submit_all(model, one)]
        found.append([(one.text, one.token_ids) for one in run(model.engine, requests)])
        model.close()
    assert found[0] == found[1]
    assert sum(model.engine.stats().accepted_per_position) > 10


@pytest.mark.parametrize("arch", ["gemma3", "mistral", "qwen3moe", "deepseek_v3", "gpt_oss"])
def test_every_kind_of_layer_takes_several_rows_of_one_answer(arch: str, tmp_path: Path, size: Size) -> None:
    model = TinyModel(arch, tmp_path)
    for seed, params in enumerate([GREEDY, SAMPLED_PARAMS] * size(1, 8)):
        mine = prompts(3, seed)
        expected = [alone(model, prompt, params) for prompt in mine]
        engine = model.engine(num_blocks=128)
        engine.decoder.speculation = speculation = Speculation(frozenset({"ngram"}), Always(), lambda _: True)
        answers = {tuple(prompt): one.token_ids for prompt, one in zip(mine, expected, strict=True)}
        speculation.extra.append(lambda request: iter([Scripted(answers[request.prompt_ids], 0.2, request.number)]))  # noqa: B023
        found = run(engine, [submit(engine, prompt, params) for prompt in mine])
        assert [bytes_of(one) for one in found] == [bytes_of(one) for one in expected]
        assert speculation.counts.num_accepted_tokens > 10
