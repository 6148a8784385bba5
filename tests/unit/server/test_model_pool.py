"""The model pool: models are loaded when asked for, stay while they fit, and are evicted for others."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvarn.config import EngineConfig
from kvarn.errors import CapacityError, ConfigError, DoesNotFit, ModelError, ModelNotFound
from kvarn.server.models.catalog import MemoryRoom, plan_load
from kvarn.server.models.model_pool import ModelPool
from kvarn.server.models.served_model import ServedModel
from kvarn.server.process.settings import ServerConfig, default_engine
from kvarn.types import SamplingParams
from tests.chat_model import CONTEXT, write_chat_model

MIB = 1 << 20
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [str(write_chat_model(folder / f"{name}.gguf")) for name in "abc"]


@pytest.fixture(scope="module")
def needed_bytes(files: list[str]) -> int:
    return plan_load("a", files[0], EngineConfig(), MemoryRoom(1 << 30, 1 << 30, True)).entry.needed_bytes


@asynccontextmanager
async def started(files: list[str], memory_bytes: int = 1 << 30, **options: Any) -> AsyncIterator[ModelPool]:
    pool = ModelPool(ServerConfig(models=tuple(files), memory_bytes=memory_bytes, **options))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in an event loop of its own."""

    @functools.wraps(test)  # pytest sees the fixtures of the test
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


async def use(pool: ModelPool, name: str) -> ServedModel:
    async with pool.use(name) as model:
        return model


def loaded(pool: ModelPool) -> set[str]:
    return {model.id for model in pool.loaded}


@in_a_loop
async def test_only_the_first_model_is_loaded_at_the_start_and_others_when_asked_for(files: list[str]) -> None:
    async with started(files) as pool:
        assert loaded(pool) == {"a.gguf"}
        async with pool.use("c.gguf") as model:
            assert (await model.llm.generate("ab", GREEDY)).usage.completion_tokens > 0
        assert loaded(pool) == {"a.gguf", "c.gguf"}


@in_a_loop
async def test_alternating_between_models_that_fit_loads_each_of_them_once(files: list[str]) -> None:
    async with started(files) as pool:
        seen = [await use(pool, f"{name}.gguf") for name in "abcabcacb"]
    assert len({id(model) for model in seen}) == 3


@in_a_loop
async def test_one_file_with_several_ids_is_loaded_once(files: list[str], needed_bytes: int, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(files[0])
    names = [f"first={files[0]}", files[0], str(link), f"other={files[1]}"]
    async with started(names, memory_bytes=needed_bytes * 2 + MIB, pinned=("link.gguf",)) as pool:
        models = [await use(pool, name) for name in ("first", "a.gguf", "link.gguf", "other")]
        assert [model.id for model in models] == [model.entry.id for model in models] == list(pool.ids)
        assert models[0].llm is models[1].llm is models[2].llm is not models[3].llm
        assert loaded(pool) == {"first", "other"}
        assert [entry.id for entry in pool.entries()] == list(pool.ids)
        assert [entry.is_pinned for entry in pool.entries()] == [True, True, True, False]
        assert all(entry.is_loaded for entry in pool.entries())
        assert pool.is_loaded("link.gguf")


@in_a_loop
async def test_adapters_count_where_a_server_may_load_some(files: list[str], needed_bytes: int, tmp_path: Path) -> None:
    async with started(files[:1], lora_dir=tmp_path) as pool:
        assert [entry.needed_bytes for entry in pool.entries()] == [needed_bytes + (1 << 30) // 8]
    given = replace(default_engine(), lora_bytes=10 * MIB)
    async with started(files[:1], lora_dir=tmp_path, engine=given) as pool:
        assert [entry.needed_bytes for entry in pool.entries()] == [needed_bytes + 10 * MIB]
    with pytest.raises(DoesNotFit, match=r"adapters 1\.0 GiB"):
        async with started(files[:1], lora_dir=tmp_path, engine=replace(given, lora_bytes=1 << 30)):
            pass


@in_a_loop
async def test_a_folder_of_adapters_that_is_none_is_refused_at_the_start(files: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing', which is no folder"):
        async with started(files[:1], lora_dir=tmp_path / "nothing"):
            pass


@in_a_loop
async def test_the_ids_of_one_file_do_not_share_its_memory(files: list[str]) -> None:
    async with started([files[0]]) as alone, started([files[0], f"again={files[0]}"]) as twice:
        assert {entry.context for entry in twice.entries()} == {entry.context for entry in alone.entries()}
        assert {entry.needed_bytes for entry in twice.entries()} == {one.needed_bytes for one in alone.entries()}


@in_a_loop
async def test_the_least_recently_used_model_makes_room(files: list[str], needed_bytes: int) -> None:
    async with started(files, 2 * needed_bytes + MIB) as pool:
        for name in "aba":
            await use(pool, f"{name}.gguf")
        await use(pool, "c.gguf")
        assert loaded(pool) == {"a.gguf", "c.gguf"}
        await use(pool, "b.gguf")
        assert loaded(pool) == {"b.gguf", "c.gguf"}


@in_a_loop
async def test_an_unloaded_model_leaves_no_thread_behind(files: list[str], needed_bytes: int) -> None:
    async with started(files, needed_bytes + MIB) as pool:
        before = num_engines()
        for name in "bcab":
            await use(pool, f"{name}.gguf")
        assert num_engines() == before
    assert num_engines() == before - 1


@in_a_loop
async def test_a_pinned_model_stays_however_long_it_is_idle(files: list[str], needed_bytes: int) -> None:
    async with started(files, 2 * needed_bytes + MIB, pinned=(files[1],)) as pool:
        assert loaded(pool) == {"a.gguf", "b.gguf"}  # pinned ones are loaded at the start too
        for name in "acac":
            await use(pool, f"{name}.gguf")
            assert "b.gguf" in loaded(pool)
        assert [entry.is_pinned for entry in pool.entries()] == [False, True, False]


@in_a_loop
async def test_a_model_in_use_is_not_unloaded_and_the_refusal_has_the_numbers(
    files: list[str], needed_bytes: int
) -> None:
    async with started(files, needed_bytes + MIB) as pool:
        async with pool.use("a.gguf") as model:
            with pytest.raises(CapacityError, match=r"'b.gguf' needs .*MiB.* in use \(a.gguf .*MiB\)") as refused:
                await use(pool, "b.gguf")
            assert refused.value.retry_after_s > 0
            assert (await model.llm.generate("ab", GREEDY)).text is not None
        await use(pool, "b.gguf")
        assert loaded(pool) == {"b.gguf"}


@in_a_loop
async def test_callers_that_come_during_a_load_wait_for_that_load(files: list[str]) -> None:
    async with started(files) as pool:
        model = await asyncio.gather(*(use(pool, "b.gguf") for _ in range(8)))
        assert len({id(one) for one in model}) == 1


@in_a_loop
async def test_a_caller_that_gives_up_does_not_end_the_load_of_the_others(files: list[str]) -> None:
    async with started(files) as pool:
        first, second = asyncio.create_task(use(pool, "b.gguf")), asyncio.create_task(use(pool, "b.gguf"))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).id == "b.gguf"
        assert first.cancelled()
        assert loaded(pool) == {"a.gguf", "b.gguf"}


@in_a_loop
async def test_a_model_that_cannot_be_loaded_fails_its_callers_without_paths_and_can_be_tried_again(
    files: list[str],
) -> None:
    path = Path(files[1])
    async with started(files) as pool:
        hidden = path.rename(path.with_suffix(".away"))
        try:
            results = await asyncio.gather(*(use(pool, "b.gguf") for _ in range(3)), return_exceptions=True)
            assert all(isinstance(result, ModelError) for result in results), results
            assert "'b.gguf'" in str(results[0])
            assert "/" not in str(results[0])
            assert (await use(pool, "a.gguf")).id == "a.gguf"
        finally:
            hidden.rename(path)
        assert (await use(pool, "b.gguf")).id == "b.gguf"


@in_a_loop
async def test_names_from_requests_are_compared_and_never_opened(files: list[str]) -> None:
    hostile = ["../../etc/passwd", "/etc/passwd", files[1], "https://example.org/m.gguf", "hf:org/repo", "b", "", "\0"]
    async with started(files) as pool:
        for name in [*hostile, "b.gguf" * 700, "a.gguf\0", "A.GGUF", "./a.gguf"]:
            with pytest.raises(ModelNotFound) as refused:
                await use(pool, name)
            assert len(str(refused.value)) < 300
            assert str(Path(files[0]).parent) not in str(refused.value).replace(repr(name)[:80], "")
        assert loaded(pool) == {"a.gguf"}


@in_a_loop
async def test_a_card_tells_kind_context_digest_and_whether_it_is_loaded(files: list[str]) -> None:
    async with started(files) as pool:
        first, second, _third = pool.entries()
        assert (first.id, first.kind, first.context, first.is_loaded) == ("a.gguf", "generate", CONTEXT, True)
        assert first.digest == hashlib.sha256(Path(files[0]).read_bytes()).hexdigest()
        assert first.created == int(Path(files[0]).stat().st_mtime)
        assert (second.is_loaded, second.context) == (False, CONTEXT)
        assert pool.entry("b.gguf") == second
        with pytest.raises(ModelNotFound):
            pool.entry("d")


@in_a_loop
async def test_a_closed_pool_refuses_every_use(files: list[str]) -> None:
    async with started(files) as pool:
        pass
    with pytest.raises(CapacityError, match="shutting down"):
        await use(pool, "a.gguf")
    assert pool.loaded == ()


@in_a_loop
async def test_loads_that_wait_while_the_pool_closes_leave_nothing_loaded(files: list[str]) -> None:
    before = num_engines()
    async with started(files) as pool:
        loads = [asyncio.create_task(use(pool, name)) for name in ("b.gguf", "c.gguf")]
        await asyncio.sleep(0)
    results = await asyncio.gather(*loads, return_exceptions=True)
    assert isinstance(results[1], CapacityError)
    assert pool.loaded == ()
    assert num_engines() == before


@in_a_loop
async def test_a_model_that_can_never_fit_is_refused_at_the_start_with_the_numbers(
    files: list[str], needed_bytes: int
) -> None:
    with pytest.raises(DoesNotFit, match=r"'a.gguf'.*needs .*MiB") as refused:
        async with started(files, 20 * MIB):
            pass
    assert refused.value.needed_bytes > refused.value.available_bytes
    # Beside a pinned model there must be room for each of the others.
    with pytest.raises(DoesNotFit, match=r"'a\.gguf'"):
        async with started(files, needed_bytes + 8 * MIB, pinned=(files[1],)):
            pass


@in_a_loop
async def test_one_context_for_all_is_an_upper_bound_for_models_made_for_less(files: list[str]) -> None:
    small = write_chat_model(Path(files[0]).parent / "small.gguf", **{"llama.context_length": 512})
    async with started([files[0], str(small)], engine=replace(default_engine(), context=1024)) as pool:
        assert [entry.context for entry in pool.entries()] == [1024, 512]
        async with pool.use("small.gguf") as model:
            assert model.llm.llm.context == 512
    with pytest.raises(ConfigError, match="512"):  # alone, it is a mistake to say so
        async with started([str(small)], engine=replace(default_engine(), context=1024)):
            pass


def test_two_models_with_one_id_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"both called 'm.gguf'"):
        ModelPool(ServerConfig(models=("x/m.gguf", "y/m.gguf")))


def test_a_pinned_name_that_is_not_a_model_is_refused() -> None:
    ModelPool(ServerConfig(models=("x/m.gguf", "smollm2"), pinned=("m.gguf", "smollm2")))  # ids and names both count
    with pytest.raises(ConfigError, match=r"'other', which is not among the models m\.gguf"):
        ModelPool(ServerConfig(models=("x/m.gguf",), pinned=("other",)))


def test_a_long_context_shrinks_to_the_models_share_so_that_all_stay_loaded(tmp_path: Path) -> None:
    path = str(write_chat_model(tmp_path / "long.gguf", **{"llama.context_length": 65536}))
    full = plan_load("long", path, EngineConfig(), MemoryRoom(1 << 30, 1 << 30, True))
    assert full.entry.context == 65536
    shared = plan_load("long", path, EngineConfig(), MemoryRoom(full.entry.needed_bytes - 16 * MIB, 1 << 30, True))
    assert 4096 <= shared.entry.context < 65536
    assert shared.entry.needed_bytes <= full.entry.needed_bytes - 16 * MIB
    # A share too small for a useful context is no reason to give it less than there is.
    alone = plan_load("long", path, EngineConfig(), MemoryRoom(full.entry.needed_bytes - 31 * MIB, 1 << 30, True))
    assert alone.entry.context == 65536


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 65,536 tokens, of which 4,096 are enough."""
    folder = tmp_path_factory.mktemp("long")
    return str(write_chat_model(folder / "long.gguf", **{"llama.context_length": 65536}))


def needed_for(path: str, context: int | None = None) -> int:
    room = MemoryRoom(1 << 40, 1 << 40, is_shared=True)
    return plan_load("m", path, EngineConfig(context=context), room).entry.needed_bytes


@in_a_loop
async def test_what_a_small_model_leaves_of_its_share_goes_to_a_long_context(
    files: list[str], needed_bytes: int, long_file: str
) -> None:
    budget = needed_bytes + needed_for(long_file, 40_000)
    assert needed_for(long_file, 40_000) > budget // 2 + MIB  # more than an equal share
    async with started([long_file, files[0]], budget) as pool:
        assert 30_000 < pool.entry("long.gguf").context <= 65536
        await use(pool, "a.gguf")
        assert loaded(pool) == {"a.gguf", "long.gguf"}  # neither had to go


@in_a_loop
async def test_a_context_shrinks_before_a_neighbour_is_unloaded_and_grows_when_there_is_room(
    files: list[str], needed_bytes: int, long_file: str
) -> None:
    """Three small models would not fit beside it together, but two do if it is content with less."""
    budget = 2 * needed_bytes + needed_for(long_file, 8000)
    async with started([files[0], files[1], files[2], long_file], budget) as pool:
        full = pool.entry("long.gguf").context
        await use(pool, "b.gguf")
        assert (await use(pool, "long.gguf")).llm.llm.context < full
        assert loaded(pool) == {"a.gguf", "b.gguf", "long.gguf"}
        shorter = pool.entry("long.gguf")
        assert 4096 <= shorter.context < full
        assert shorter.digest is not None
        await use(pool, "a.gguf")
        await use(pool, "c.gguf")  # the oldest idle one goes for this one, and it alone
        assert len(loaded(pool)) == 3


@in_a_loop
async def test_a_context_below_a_useful_one_is_not_planned_a_neighbour_goes_instead(
    files: list[str], needed_bytes: int, long_file: str
) -> None:
    budget = needed_bytes + needed_for(long_file, 4096) - 3 * MIB
    async with started([files[0], long_file], budget) as pool:
        assert (await use(pool, "long.gguf")).llm.llm.context >= 4096
        assert loaded(pool) == {"long.gguf"}


@in_a_loop
async def test_a_context_that_was_asked_for_is_never_shortened(files: list[str], long_file: str) -> None:
    engine = replace(default_engine(), context=2048)
    budget = needed_for(files[0], 2048) + needed_for(long_file, 2048) - MIB
    async with started([files[0], long_file], budget, engine=engine) as pool:
        assert (await use(pool, "long.gguf")).llm.llm.context == 2048
        assert loaded(pool) == {"long.gguf"}


def num_engines() -> int:
    return sum(thread.name == "kvarn-engine" for thread in threading.enumerate())
