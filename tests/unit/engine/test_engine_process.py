"""An engine in a process of its own, through kvarn.LLM: what crosses the socket, and what is refused on this side."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kvarn
from kvarn import errors
from kvarn.engine.process.early import prepare_child
from kvarn.engine.process.messages import PackedError
from kvarn.errors import BackendError, CapacityError, InvalidParameter, KvarnError, PromptTooLong, RequestError
from tests.chat_model import write_chat_model
from tests.children import child_ids
from tests.server.edge_client import until

HOST = "kvarn.engine.process.host"
GPU = kvarn.EngineConfig(backend="cuda")
GREEDY = kvarn.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[kvarn.LLM, kvarn.LLM]]:
    """The same model with an engine in a process of its own, and with one here."""
    path: Path = write_chat_model(tmp_path_factory.mktemp("model") / "tiny")
    config = kvarn.EngineConfig(own_process=True, threads=1, context=256, queue_limit=4)
    with kvarn.LLM(path, config=config) as own, kvarn.LLM(path, threads=1, context=256) as here:
        yield own, here


def test_scores_answers_and_their_events_are_the_same(pair: tuple[kvarn.LLM, kvarn.LLM]) -> None:
    own, here = pair
    assert (own.score([5, 6, 7, 8]) == here.score([5, 6, 7, 8])).all()
    assert own.generate("Hello", GREEDY).token_ids == here.generate("Hello", GREEDY).token_ids
    told = [[(event.text, event.token_id, event.index) for event in llm.stream("Hello", GREEDY)] for llm in pair]
    assert told[0] == told[1]
    assert len(told[0]) == GREEDY.max_tokens
    assert own.stats().generated_tokens == here.stats().generated_tokens


def test_what_this_side_can_tell_is_refused_here(pair: tuple[kvarn.LLM, kvarn.LLM]) -> None:
    own, _ = pair
    kvarn.register_sampler("first", lambda logits, token_ids, draw: 0)
    with pytest.raises(InvalidParameter, match="own_process=False"):
        own.generate("Hello", kvarn.SamplingParams(sampler="first"))
    with pytest.raises(PromptTooLong, match="300"):
        own.generate([5] * 300, GREEDY)
    with pytest.raises(BackendError, match="cannot be run in the engine's process"):
        own.client.call(lambda engine: engine.stats()).result()


def test_a_full_queue_refuses_as_ever(pair: tuple[kvarn.LLM, kvarn.LLM]) -> None:
    own, _ = pair
    with pytest.raises(CapacityError) as refused:
        own.submit("Hello", GREEDY.replace(n=6))
    assert refused.value.retry_after_s > 0
    assert own.generate("Hello", GREEDY).text


def test_after_close_callers_are_told_so(tmp_path: Path) -> None:
    config = kvarn.EngineConfig(own_process=True, threads=1, context=256, max_running=1)
    llm = kvarn.LLM(write_chat_model(tmp_path / "tiny"), config=config)
    handles = [llm.submit("Hello", GREEDY.replace(max_tokens=240)) for _ in range(64)]  # the last waits for the others
    llm.close()
    for ask in (handles[-1].result, lambda: llm.generate("Hello", GREEDY)):
        with pytest.raises(RequestError, match="closed"):
            ask()
    assert not llm.client.is_alive


def test_a_file_that_cannot_be_loaded_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(errors.FormatError) as here:
        kvarn.LLM(tmp_path / "broken.gguf")
    with pytest.raises(errors.FormatError) as own:
        kvarn.LLM(tmp_path / "broken.gguf", config=kvarn.EngineConfig(own_process=True))
    assert str(own.value) == str(here.value)


def test_a_process_that_waits_for_its_model_loads_the_next_one_and_no_other(tmp_path: Path) -> None:
    path, before = write_chat_model(tmp_path / "tiny"), set(child_ids(HOST))
    prepare_child(GPU, 1)
    (waiting,) = set(child_ids(HOST)) - before
    used = []
    for _ in range(2):
        with kvarn.LLM(path, config=kvarn.EngineConfig(own_process=True, threads=1, context=256)) as llm:
            (engine,) = set(child_ids(HOST)) - before
            used.append(engine == waiting)
            assert llm.generate("Hello", GREEDY).text
    assert used == [True, False]


@pytest.mark.parametrize(
    ("config", "num_models"),
    [(GPU, 2), (replace(GPU, own_process=False), 1), (replace(GPU, backend="auto"), 1)],
    ids=["several models", "in this process", "on the CPU"],
)
def test_no_process_waits_where_none_may_be_needed(config: kvarn.EngineConfig, num_models: int) -> None:
    before = set(child_ids(HOST))
    prepare_child(config, num_models)
    assert set(child_ids(HOST)) == before


def test_a_process_that_waits_ends_with_the_program_that_started_it() -> None:
    script = (
        "from kvarn import EngineConfig\n"
        "from kvarn.engine.process.early import prepare_child, take_child\n"
        "prepare_child(EngineConfig(backend='cuda'), 1)\n"
        "print(take_child().pid)\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    until(lambda: not Path(f"/proc/{int(found.stdout)}").exists())


def test_every_error_comes_back_as_it_was() -> None:
    kinds = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, KvarnError)]
    assert len(kinds) > 20
    for kind in kinds:
        error = kind.__new__(kind, "why")
        error.args = ("why",)
        error.__dict__["retry_after_s"] = 2.5
        error.__cause__ = OSError("disk")
        back = PackedError.of(error).error()
        assert (type(back), back.args, back.__dict__) == (kind, error.args, error.__dict__)
        assert str(back.__cause__) == "OSError: disk"
