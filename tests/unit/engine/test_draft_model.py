"""A draft model: what it refuses, what it holds of the requests, when it guesses and when it rests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvarn import LLM, ConfigError, DoesNotFit, EngineConfig, SamplingParams
from kvarn.decoding.speculation.acceptance import AcceptanceRates
from kvarn.decoding.speculation.draft_length import Always, ByCost
from kvarn.decoding.speculation.model_drafts import FIRST_PAUSE, MAX_DEPTH, ModelDrafts
from kvarn.engine.drafting import draft_cache, load_draft
from kvarn.engine.drafting.draft_model import CachedDraftModel
from kvarn.engine.load import LoadedModel, load_model
from kvarn.formats.open import open_weights
from kvarn.models.describe import Description, describe
from kvarn.request import Request
from kvarn.server.models.catalog import MemoryRoom, plan_load, with_process_choice
from tests.chat_model import chat_metadata, write_chat_model, write_pruned_model
from tests.recurrent_model import write_recurrent_model
from tests.submitting import new_request, submit
from tests.tiny_models import tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=30)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return write_chat_model(folder / "chat.gguf"), write_pruned_model(folder / "pruned.gguf")


def config(draft: Path | None, **options: Any) -> EngineConfig:
    chosen: dict[str, Any] = {} if draft is None else {"speculation": "draft", "draft_model": str(draft)}
    unpaced = {"max_stretch": 1e3, "prefill_ms": 1e6}
    return EngineConfig(threads=1, context=512, kv_bytes=8 << 20, **unpaced, **chosen, **options)


def described(path: Path) -> Description:
    source = open_weights(path)
    try:
        return describe(source)
    finally:
        source.close()


def loaded(paths: tuple[Path, Path]) -> tuple[LoadedModel, CachedDraftModel]:
    """A model whose draft model always guesses as far as it may."""
    model = load_model(paths[0], config(paths[1]))
    speculation = model.engine.decoder.speculation
    assert speculation is not None
    assert speculation.model_drafts is not None
    speculation.length = Always()
    draft = speculation.model_drafts.model
    assert isinstance(draft, CachedDraftModel)
    return model, draft


def answers(model: LoadedModel, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    requests = [submit(model.engine, prompt, GREEDY) for prompt in prompts]
    found = {}
    while model.engine.has_work:
        found |= {event.request_id: event.completion for event in model.engine.step() if event.completion is not None}
    return [tuple(found[request.id].token_ids) for request in requests]


def prompts(count: int, length: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(256) for _ in range(length)] for _ in range(count)]


def test_another_vocabulary_is_refused_with_the_difference(paths: tuple[Path, Path], tmp_path: Path) -> None:
    tokens = list(chat_metadata()["tokenizer.ggml.tokens"])
    tokens[70], tokens[71] = tokens[71], tokens[70]
    other = write_pruned_model(tmp_path / "other.gguf", **{"tokenizer.ggml.tokens": tokens})
    with pytest.raises(
        ConfigError, match=r"'other.gguf' has another vocabulary: 2 of 260 tokens differ, first token 70"
    ):
        load_model(paths[0], config(other))


def test_a_draft_model_whose_cache_cannot_be_rolled_back_is_refused(paths: tuple[Path, Path], tmp_path: Path) -> None:
    encoder, recurrent = tiny_model("bert", tmp_path), write_recurrent_model(tmp_path / "recurrent.gguf")
    for draft, reason in ((encoder, "does not write from left to right"), (recurrent, "has recurrent layers")):
        with pytest.raises(ConfigError, match=reason):
            load_draft.draft_bytes(config(draft), described(paths[0]))


@pytest.mark.parametrize(
    "options",
    [
        {"speculation": "draft"},
        {"draft_model": "small.gguf"},
        {"draft_model": "small.gguf", "speculation": "ngram"},
        {"draft_model": "", "speculation": "draft"},
        {"draft_model": 3, "speculation": "auto"},
    ],
)
def test_half_of_a_setting_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="draft_model"):
        EngineConfig(**options)


def test_its_memory_is_in_the_plan(paths: tuple[Path, Path]) -> None:
    plain, beside = (load_model(paths[0], config(draft)) for draft in (None, paths[1]))
    needed = load_draft.draft_bytes(config(paths[1]), described(paths[0]))
    assert beside.memory.needed_bytes - plain.memory.needed_bytes == beside.memory.draft_bytes == needed
    assert needed > paths[1].stat().st_size * 0.9 + 512 * 2 * 64 * 2  # its weights, and the cache of one context
    room = MemoryRoom(1 << 40, 1 << 40, is_shared=False)
    served = plan_load("m", str(paths[0]), config(paths[1]), room)
    assert served.entry.needed_bytes == beside.memory.needed_bytes
    with pytest.raises(DoesNotFit, match="draft model"):
        plan_load("m", str(paths[0]), config(paths[1]), MemoryRoom(1 << 20, 1 << 20, is_shared=False))


def test_a_server_of_several_models_refuses_one_draft_model(paths: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="there are 2 models"):
        with_process_choice(config(paths[1]), 2)


def test_an_llm_takes_a_draft_model_by_its_name(paths: tuple[Path, Path]) -> None:
    ids = prompts(1, 40)[0]
    found = []
    for draft in (None, paths[1]):
        with LLM(paths[0], config=config(draft)) as llm:
            found.append(llm.generate(ids, GREEDY).token_ids)
    assert found[0] == found[1]


def test_what_a_request_held_is_free_when_it_ends(paths: tuple[Path, Path]) -> None:
    model, draft = loaded(paths)
    answers(model, prompts(5, 100))
    assert model.engine.stats().drafts > 10
    assert draft.num_held == {}
    assert draft.kv.num_free == draft.kv.num_blocks


def test_requests_for_which_its_cache_has_no_room_are_answered_without_it(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_cache, "CACHE_TOKENS", 256)
    asked = prompts(4, 100)
    expected = answers(load_model(paths[0], config(None)), asked)
    model, draft = loaded(paths)
    assert draft.kv.max_tokens == 256
    assert answers(model, asked) == expected
    assert model.engine.stats().drafts > 10
    draft.kv.check()


def test_a_long_text_is_read_in_pieces_within_the_time_that_is_given(paths: tuple[Path, Path]) -> None:
    model, draft = loaded(paths)
    request = submit(model.engine, prompts(1, 400)[0], GREEDY)
    while request.sampling is None:
        model.engine.step()
    draft.release(request.id)
    assert draft.prepare([request], 0.0) == []
    assert draft.prepare([request], 1e-9) == []
    assert draft.num_held[request.id] <= 32
    assert draft.prepare([request], 60.0) == [request]
    assert draft.num_held[request.id] >= 384


def test_a_draft_model_that_fails_is_left_out(paths: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    asked = prompts(3, 40)
    expected = answers(load_model(paths[0], config(None)), asked)
    model, draft = loaded(paths)
    draft.close()  # every pass fails from now on
    assert answers(model, asked) == expected
    assert caplog.text.count("the draft model failed and is not used any more") == 1


class Timed:
    """A draft model that takes so many seconds a pass, and counts them."""

    reads_states = False

    def __init__(self, pass_s: float) -> None:
        self.now, self.pass_s = 0.0, pass_s
        self.depths: list[int] = []

    def prepare(self, requests: list[Request], seconds: float) -> list[Request]:
        return list(requests)

    def draft(self, requests: list[Request], depth: int) -> dict[str, list[int]]:
        self.now += depth * self.pass_s
        self.depths.append(depth)
        return {request.id: [1] * depth for request in requests}

    def release(self, request_id: str) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("pass_s", "rate", "expected"), [(0.05, 0.95, (4, 8)), (0.05, 0.0, (0, 0)), (0.9, 0.9, (0, 0))]
)
def test_it_guesses_as_far_as_its_time_pays_and_rests_where_it_does_not(
    pass_s: float, rate: float, expected: tuple[int, int]
) -> None:
    rng, model, length, rates = random.Random(1), Timed(pass_s), ByCost(3.0), AcceptanceRates()
    for num_rows in (1, 2, 3, 5, 9):
        length.observe(num_rows, 1.0 + 0.06 * (num_rows - 1))
    for _ in range(200):
        rates.observe("draft", rng.randrange(MAX_DEPTH), rng.random() < rate)
    drafts = ModelDrafts(model, clock=lambda: model.now)  # type: ignore[arg-type]
    request = new_request("r", (1, 2), SamplingParams(), 1000, 0)
    for _ in range(FIRST_PAUSE):
        drafts.proposals({request: rates}, 1, 15, length)
        length.observe(1, 1.0)
    if expected == (0, 0):
        assert model.depths == [1, 1]  # to learn its time, and once more; then it rests
    else:
        assert all(expected[0] <= depth <= expected[1] for depth in model.depths[1:])
        assert len(model.depths) == FIRST_PAUSE
    assert drafts.take_spent_s() == pytest.approx(sum(model.depths) * pass_s)
    assert drafts.take_spent_s() == 0.0


def test_it_rests_for_the_tenant_alone_for_whom_it_does_not_pay() -> None:
    model, length = Timed(0.05), ByCost(3.0)
    for num_rows in (1, 2, 3, 5, 9):
        length.observe(num_rows, 1.0 + 0.06 * (num_rows - 1))
    drafts = ModelDrafts(model, clock=lambda: model.now)  # type: ignore[arg-type]
    asked = {}
    for tenant, is_right in (("wrong", False), ("right", True)):
        rates = AcceptanceRates()
        for number in range(200):
            rates.observe("draft", number % MAX_DEPTH, is_right)
        asked[tenant] = new_request(tenant, (1, 2), SamplingParams(), 1000, 0, tenant=tenant), rates
    num_guesses = dict.fromkeys(asked, 0)
    for _ in range(FIRST_PAUSE):
        for tenant, (request, known) in asked.items():
            num_guesses[tenant] += len(drafts.proposals({request: known}, 1, 15, length))
            length.observe(1, 1.0)
    assert num_guesses == {"wrong": 2, "right": FIRST_PAUSE}
