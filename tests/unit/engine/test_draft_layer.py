"""A layer of the model's own file that guesses: when it is used, its memory, and what it holds of the requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvarn import LLM, EngineConfig, SamplingParams
from kvarn.decoding.speculation.draft_length import Always
from kvarn.engine.drafting import draft_cache
from kvarn.engine.drafting.draft_layer import MAX_UNREAD, CachedDraftLayer
from kvarn.engine.load import LoadedModel, load_model
from kvarn.types import Completion
from tests.chat_model import write_chat_model, write_draft_layer_model
from tests.submitting import submit
from tests.unit.engine.test_draft_model import GREEDY, answers, prompts


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft_layer_model(tmp_path_factory.mktemp("model") / "near.gguf", is_near=True)


def config(speculation: str, **options: Any) -> EngineConfig:
    unpaced = {"max_stretch": 1e3, "prefill_ms": 1e6}
    return EngineConfig(threads=1, context=1024, kv_bytes=8 << 20, speculation=speculation, **unpaced, **options)


def loaded(path: Path, **options: Any) -> tuple[LoadedModel, CachedDraftLayer]:
    model = load_model(path, config("mtp", **options))
    speculation = model.engine.decoder.speculation
    assert speculation is not None
    assert speculation.model_drafts is not None
    speculation.length = Always()
    layer = speculation.model_drafts.model
    assert isinstance(layer, CachedDraftLayer)
    return model, layer


def test_auto_uses_the_layer_where_there_is_one_and_counts_its_memory(near: Path) -> None:
    plain, beside = (load_model(near, config(speculation)) for speculation in ("off", "auto"))
    assert plain.memory.draft_bytes == 0
    assert beside.memory.draft_bytes > 64 * 128 * 4 + 1024 * 2 * 64 * 2  # its matrix, and the cache of one context
    assert beside.memory.needed_bytes - plain.memory.needed_bytes == beside.memory.draft_bytes
    speculation = beside.engine.decoder.speculation
    assert speculation is not None
    assert speculation.model_drafts is not None
    plain.close()
    beside.close()


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_where_it_cannot_guess_a_line_says_so(
    near: Path, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = near if backend == "torch" else write_chat_model(tmp_path / "chat.gguf")
    model = load_model(path, config("mtp", backend=backend, **({"device": "cpu"} if backend == "torch" else {})))
    assert "nothing is guessed by mtp" in caplog.text
    assert len(answers(model, prompts(1, 20))[0]) == 30
    model.close()


def test_what_a_request_held_is_free_when_it_ends(near: Path) -> None:
    model, layer = loaded(near)
    answers(model, prompts(5, 100))
    assert sum(model.engine.stats().accepted_per_position) > 50
    assert layer.num_held == {}
    assert layer.kv.num_free == layer.kv.num_blocks
    model.close()


@pytest.mark.parametrize("length", [40, 200, 700])
def test_a_cache_that_is_too_small_costs_guesses_and_no_answer(
    near: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_cache, "CACHE_TOKENS", 128)
    asked = prompts(4, length)
    plain = load_model(near, config("off"))
    expected = answers(plain, asked)
    model, layer = loaded(near)
    assert layer.kv.max_tokens == 128
    assert answers(model, asked) == expected
    layer.kv.check()
    assert sum(model.engine.stats().accepted_per_position) > 5
    plain.close()
    model.close()


def test_a_long_prompt_is_read_as_it_is_computed(near: Path) -> None:
    model, layer = loaded(near, max_batch_tokens=64)
    request = submit(model.engine, prompts(1, 400)[0], GREEDY)
    while request.num_computed < 256:
        model.engine.step()
    assert layer.num_held[request.id] >= request.num_computed - MAX_UNREAD - 1
    model.close()


def test_behind_a_cached_prefix_it_begins_with_the_states_that_come(near: Path) -> None:
    model, layer = loaded(near)
    asked = prompts(1, 300)
    first = answers(model, asked)
    request = submit(model.engine, asked[0], GREEDY)
    while request.num_output < 2:
        model.engine.step()
    assert request.num_cached >= 256
    assert 0 < layer.num_held[request.id] < 100
    while not request.is_ended:
        model.engine.step()
    assert tuple(request.token_ids[300:]) == first[0]
    model.close()


def test_a_layer_that_fails_is_left_out(near: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = prompts(3, 40)
    plain = load_model(near, config("off"))
    expected = answers(plain, asked)
    model, layer = loaded(near)
    layer.close()  # every pass fails from now on
    assert answers(model, asked) == expected
    assert caplog.text.count("the draft model failed and is not used any more") == 1
    plain.close()
    model.close()


def test_an_llm_answers_the_same_with_the_layer(near: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, n=3)
    found: list[list[Completion]] = []
    for speculation in ("off", "mtp"):
        with LLM(near, config=config(speculation)) as llm:
            found.append([handle.result() for handle in [llm.submit(ids, params) for ids in prompts(3, 50)]])
    assert [one.token_ids for one in found[0]] == [one.token_ids for one in found[1]]
