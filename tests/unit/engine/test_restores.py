"""Prefixes from disk: found by the next engine, the same answers as without, and never in the way of others."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvarn.backends.fake import FakeBackend
from kvarn.engine.engine import Engine
from kvarn.engine.persistence import restores
from kvarn.engine.persistence.disk_prefixes import DiskPrefixes
from kvarn.prefix_store.pack import UInt8
from kvarn.prefix_store.store import BlockStore
from kvarn.request import Request
from kvarn.types import Completion, FinishReason, SamplingParams
from tests.conftest import Size
from tests.persisting import close, hash_key, keep_on_disk
from tests.submitting import submit
from tests.unit.engine.fake import expected, is_idle, make_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PREFIX = list(range(1, 41))  # ten blocks


def engine_on(folder: Path, **options: object) -> tuple[Engine, DiskPrefixes]:
    engine = make_engine(hash_key=hash_key(folder), **options)  # type: ignore[arg-type]
    return engine, keep_on_disk(engine, folder)


def answers(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Step to the end as the engine's thread does."""
    found = {}
    while engine.has_work:
        found |= {event.request_id: event.completion for event in engine.step() if event.completion is not None}
        engine.kv.check()
        time.sleep(engine.wait_s)
    return [found[request.id] for request in requests]


def ask(engine: Engine, prompt: Sequence[int], tenant: str = "", params: SamplingParams = GREEDY) -> Completion:
    return answers(engine, [submit(engine, prompt, params, tenant=tenant)])[0]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A folder with the blocks of PREFIX, which was asked for twice."""
    engine, disk = engine_on(tmp_path)
    for last in (50, 51):
        ask(engine, [*PREFIX, last])
    close(disk)
    return tmp_path


def num_computed(engine: Engine) -> int:
    assert isinstance(engine.backend, FakeBackend)
    return sum(engine.backend.batch_sizes)


def test_the_next_engine_starts_on_blocks_from_disk_and_says_the_same(filled: Path) -> None:
    engine, disk = engine_on(filled)
    completion = ask(engine, [*PREFIX, 60])
    assert list(completion.token_ids) == expected([*PREFIX, 60], 8)
    assert completion.usage.cached_tokens == 40
    assert num_computed(engine) == 8
    assert engine.scheduler.prefix_reuse.restores.num_tokens == 40
    assert is_idle(engine)
    assert ask(engine, [*PREFIX, 61]).usage.cached_tokens == 40
    assert engine.scheduler.prefix_reuse.restores.num_tokens == 40  # not twice
    close(disk)


def test_a_prompt_that_came_once_is_not_written(tmp_path: Path) -> None:
    engine, disk = engine_on(tmp_path)
    ask(engine, [*PREFIX, 50])
    close(disk)
    engine, disk = engine_on(tmp_path)
    assert not disk.has_blocks
    assert ask(engine, [*PREFIX, 50]).usage.cached_tokens == 0


def test_another_tenant_finds_nothing(filled: Path) -> None:
    engine, _ = engine_on(filled)
    completion = ask(engine, [*PREFIX, 60], tenant="other")
    assert completion.usage.cached_tokens == 0
    assert list(completion.token_ids) == expected([*PREFIX, 60], 8)


@pytest.mark.parametrize("how", ["reuse_cache", "prompt_logprobs"])
def test_nothing_is_restored_for_a_request_that_must_compute(filled: Path, how: str) -> None:
    engine, _ = engine_on(filled)
    params = {"reuse_cache": {"reuse_cache": False}, "prompt_logprobs": {"prompt_logprobs": 0}}[how]
    assert ask(engine, [*PREFIX, 60], params=GREEDY.replace(**params)).usage.cached_tokens == 0  # type: ignore[arg-type]


def test_what_the_cache_has_is_not_read_again(filled: Path) -> None:
    engine, disk = engine_on(filled)
    ask(engine, [*PREFIX[:16], 99])  # restores four blocks
    store = _store(disk)
    before = store.num_read
    assert ask(engine, [*PREFIX, 60]).usage.cached_tokens == 40
    assert (before, store.num_read) == (4, 10)


def test_equal_prefixes_at_the_same_time_are_read_once(filled: Path) -> None:
    engine, disk = engine_on(filled)
    requests = [submit(engine, [*PREFIX, last], GREEDY) for last in range(60, 66)]
    found = answers(engine, requests)
    assert [one.usage.cached_tokens for one in found] == [40] * 6
    assert [list(one.token_ids) for one in found] == [expected([*PREFIX, last], 8) for last in range(60, 66)]
    assert _store(disk).num_read == 10


def test_a_damaged_block_is_computed_again_with_the_rest(filled: Path) -> None:
    for pack in filled.glob("*/*/*.pack"):
        content = bytearray(pack.read_bytes())
        content[-3 * 4096] ^= 1  # the third block from the end
        pack.write_bytes(content)
    engine, _ = engine_on(filled)
    completion = ask(engine, [*PREFIX, 60])
    assert 0 < completion.usage.cached_tokens < 40
    assert list(completion.token_ids) == expected([*PREFIX, 60], 8)


def test_a_request_is_cancelled_while_its_blocks_are_read(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch)
    engine, _ = engine_on(filled)
    request = submit(engine, [*PREFIX, 60], GREEDY)
    engine.step()
    assert engine.stats().waiting == 1
    request.is_cancel_requested = True
    (completion,) = answers(engine, [request])
    assert completion.finish_reason is FinishReason.CANCELLED
    assert is_idle(engine)


def test_others_go_on_while_blocks_are_read(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch)
    engine, _ = engine_on(filled)
    slow = submit(engine, [*PREFIX, 60], GREEDY)
    engine.step()
    quick = submit(engine, [7, 8, 9], GREEDY)
    while not quick.is_ended:
        engine.step()
    assert slow.num_output == 0
    found = answers(engine, [slow])
    assert found[0].usage.cached_tokens == 40


def test_a_disk_that_gives_no_answer_is_not_waited_for(
    filled: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow_down(monkeypatch, 0.5)
    monkeypatch.setattr(restores, "STALLED_S", 0.05)
    engine, _ = engine_on(filled)
    completion = ask(engine, [*PREFIX, 60])
    assert completion.usage.cached_tokens == 0
    assert list(completion.token_ids) == expected([*PREFIX, 60], 8)
    assert "the disk gives no answer" in caplog.text


def test_a_disk_that_was_asked_for_nothing_is_not_taken_for_a_stalled_one(filled: Path) -> None:
    engine, disk = engine_on(filled)
    ask(engine, [*PREFIX[:16], 99])
    assert disk._parts is not None
    reader = disk._parts[1]
    reader.progress_at = 0.0  # long ago, and its threads sleep
    with reader._changed:  # nor do they wake before the engine looks
        job = reader.begin(engine.kv.digests([*PREFIX, 60])[4:])
        assert time.monotonic() - disk.read_at < restores.STALLED_S
    job.is_cancelled = True


def test_what_is_held_gives_way_to_requests_that_run(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, 0.01)
    engine, _ = engine_on(filled, num_blocks=14, context=50)
    running = submit(engine, [3, 2, 1], GREEDY.replace(max_tokens=40))
    engine.step()
    held = submit(engine, [*PREFIX, 60], GREEDY)
    found = answers(engine, [running, held])
    assert list(found[0].token_ids) == expected([3, 2, 1], 40)
    assert list(found[1].token_ids) == expected([*PREFIX, 60], 8)


def test_random_lives_with_a_disk_give_the_answers_of_each_alone(tmp_path: Path, size: Size) -> None:
    rng = random.Random(7)
    stems = [rng.choices(range(1, 250), k=24) for _ in range(3)]
    num_restored = 0
    for _ in range(size(12, 200)):
        engine, disk = engine_on(tmp_path, num_blocks=rng.choice([12, 30, 100]), context=40)
        asked = []
        for _ in range(12):
            prompt = [*rng.choice(stems)[: rng.choice([8, 16, 24])], *rng.choices(range(1, 250), k=rng.randint(1, 6))]
            asked.append(submit(engine, prompt, GREEDY, tenant=rng.choice("ab")))
            for _ in range(rng.randint(0, 6)):
                engine.step()
                engine.kv.check()
        while engine.has_work:
            engine.step()
            engine.kv.check()
            time.sleep(engine.wait_s)
        assert [list(one.output_ids) for one in asked] == [expected(one.prompt_ids, 8) for one in asked]
        assert is_idle(engine)
        num_restored += engine.scheduler.prefix_reuse.restores.num_tokens
        close(disk)
    assert num_restored > 100


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
    """A disk that takes so long for each block."""
    read = BlockStore.read

    def slowly(self: BlockStore, digest: bytes, into: UInt8 | None = None) -> object:
        time.sleep(seconds)
        return read(self, digest, into)

    monkeypatch.setattr(BlockStore, "read", slowly)


def _store(disk: DiskPrefixes) -> BlockStore:
    assert disk._parts is not None
    return disk._parts[0]
