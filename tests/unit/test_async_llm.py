"""kvarn.AsyncLLM on a tiny model: streams, cancellation by every way out, several event loops."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvarn
from kvarn import AsyncEventStream, AsyncLLM, FinishReason, SamplingParams
from kvarn.engine.delivery.async_answers import AsyncAnswers
from kvarn.engine.handle import OutputCollector
from tests.chat_model import write_chat_model

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
ENDLESS = GREEDY.replace(max_tokens=1500)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(str(path), backend="reference", context=1600)
    asyncio.run(llm.load())
    yield llm
    asyncio.run(llm.close())


async def becomes_idle(llm: AsyncLLM) -> bool:
    """Whether nothing is left to do well before an endless answer could have ended by itself."""
    engine = llm.llm._model.engine
    for _ in range(200):
        if llm.llm.client.compute(lambda engine: not engine.has_work).result():
            break
        await asyncio.sleep(0.005)
    return not engine.has_work and engine.kv.num_free == engine.kv.num_blocks


def test_a_stream_tells_the_same_as_generate(llm: AsyncLLM) -> None:
    async def main() -> None:
        events = [event async for event in llm.stream("hello", GREEDY)]
        assert [event.index for event in events] == list(range(8))
        assert events[-1].completion is not None
        completion = await llm.generate("hello", GREEDY)
        assert completion.token_ids == events[-1].completion.token_ids
        assert completion.token_ids == llm.llm.generate("hello", GREEDY).token_ids

    asyncio.run(main())


def test_coroutines_share_steps_and_get_what_they_get_alone(llm: AsyncLLM) -> None:
    texts = ["one", "two", "three", "four"]
    alone = [llm.llm.generate(text, GREEDY).token_ids for text in texts]

    async def read(text: str) -> tuple[int | None, ...]:
        return tuple([event.token_id async for event in llm.stream(text, GREEDY)])

    async def main() -> None:
        assert await asyncio.gather(*map(read, texts)) == alone
        assert [completion.token_ids for completion in await llm.generate(texts, GREEDY)] == alone

    asyncio.run(main())


def test_chat_and_score_are_coroutines(llm: AsyncLLM) -> None:
    messages = [{"role": "user", "content": "hi"}]

    async def main() -> None:
        chat = await llm.chat(messages, GREEDY)
        assert chat.token_ids == llm.llm.chat(messages, GREEDY).token_ids
        assert tuple([event.token_id async for event in llm.stream(messages, GREEDY)]) == chat.token_ids
        assert (await llm.score([1, 2, 3])).shape == (2,)
        with pytest.raises(kvarn.UnsupportedModel, match="encoder"):
            await llm.embed("text")

    asyncio.run(main())


def test_closing_the_iterator_cancels(llm: AsyncLLM) -> None:
    async def main() -> None:
        stream = llm.stream("hello", ENDLESS)
        assert (await anext(stream)).index == 0
        await stream.aclose()
        assert [event async for event in stream] == []
        assert await becomes_idle(llm)

    asyncio.run(main())


def test_leaving_the_loop_cancels(llm: AsyncLLM) -> None:
    async def main() -> None:
        async for event in llm.stream("hello", ENDLESS):
            if event.index == 2:
                break
        gc.collect()
        assert await becomes_idle(llm)

    asyncio.run(main())


@pytest.mark.parametrize("way", ["stream", "generate", "list"])
def test_cancelling_the_task_cancels_the_request(llm: AsyncLLM, way: str) -> None:
    async def work() -> None:
        if way == "stream":
            async for _ in llm.stream("hello", ENDLESS):
                pass
        else:
            await llm.generate("hello" if way == "generate" else ["a", "b"], ENDLESS)  # type: ignore[call-overload]

    async def main() -> None:
        task = asyncio.create_task(work())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await becomes_idle(llm)

    asyncio.run(main())


def test_a_task_cancelled_before_its_request_was_accepted_leaves_nothing_behind(llm: AsyncLLM) -> None:
    async def main() -> None:
        for delay in (0.0, 0.0005, 0.001, 0.002, 0.004):
            task = asyncio.create_task(llm.generate("hello", ENDLESS))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await becomes_idle(llm)

    asyncio.run(main())


def test_cancel_keeps_what_was_said(llm: AsyncLLM) -> None:
    async def main() -> None:
        stream = llm.stream("hello", ENDLESS)
        await anext(stream)
        stream.cancel()
        events = [event async for event in stream]
        assert events[-1].finish_reason is FinishReason.CANCELLED
        assert events[-1].completion is not None
        assert len(events[-1].completion.token_ids) == len(events)

    asyncio.run(main())


def test_a_loop_that_ends_takes_its_requests_along(llm: AsyncLLM) -> None:
    streams = []

    async def main() -> None:
        stream = llm.stream("hello", ENDLESS)
        await anext(stream)
        streams.append(stream)  # not closed, not collected

    asyncio.run(main())
    assert asyncio.run(becomes_idle(llm))


def test_several_event_loops_may_share_a_model(llm: AsyncLLM) -> None:
    expected = {text: llm.llm.generate(text, GREEDY).token_ids for text in "abcd"}
    found: dict[str, Any] = {}

    async def read(text: str) -> None:
        found[text] = tuple([event.token_id async for event in llm.stream(text, GREEDY)])

    threads = [threading.Thread(target=asyncio.run, args=(read(text),)) for text in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == expected


def test_refusals_are_raised_by_the_first_step_of_the_iterator(llm: AsyncLLM) -> None:
    async def main() -> None:
        with pytest.raises(kvarn.InvalidParameter, match="empty"):
            await llm.generate([])
        with pytest.raises(kvarn.PromptTooLong):
            await anext(llm.stream([5] * 2000, GREEDY))
        with pytest.raises(kvarn.InvalidParameter, match="SamplingParams"):
            await llm.generate("a", {"max_tokens": 5})  # type: ignore[call-overload]

    asyncio.run(main())


def test_a_model_that_is_not_loaded_or_closed_says_so(path: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(path), backend="reference")
        with pytest.raises(kvarn.RequestError, match="not loaded"):
            await llm.generate("a", GREEDY)
        async with llm:
            await llm.generate("a", GREEDY)
            stream = llm.stream("a", ENDLESS)
            await anext(stream)
        with pytest.raises(kvarn.RequestError, match="closed"):
            [event async for event in stream]
        with pytest.raises(kvarn.RequestError, match="closed"):
            await llm.generate("a", GREEDY)

    asyncio.run(main())


def test_two_readers_of_one_stream_share_its_events(llm: AsyncLLM) -> None:
    async def read() -> list[int]:
        stream = llm.stream("hello", GREEDY)

        async def rest() -> list[int]:
            return [event.index async for event in stream]

        parts = await asyncio.wait_for(asyncio.gather(rest(), rest(), rest()), 60)
        return sorted(index for part in parts for index in part)

    assert asyncio.run(read()) == list(range(8))


def test_a_stream_is_not_read_on_in_another_event_loop(llm: AsyncLLM) -> None:
    stream: list[AsyncEventStream] = []

    async def begin() -> None:
        stream.append(llm.stream("hello", ENDLESS))
        await anext(stream[0])

    async def read_on() -> None:
        async for _ in stream[0]:
            pass

    asyncio.run(begin())
    with pytest.raises(RuntimeError, match="different event loop"):
        asyncio.run(asyncio.wait_for(read_on(), 60))
    assert asyncio.run(becomes_idle(llm))


def test_answers_leave_nothing_for_the_garbage_collector(llm: AsyncLLM) -> None:
    async def ask() -> None:
        await llm.generate("hello", GREEDY)
        async for _ in llm.stream("hello", GREEDY):
            pass
        stream = llm.stream("hello", ENDLESS)
        await anext(stream)
        await stream.aclose()

    def num_answers() -> int:
        return sum(isinstance(one, AsyncAnswers | OutputCollector) for one in gc.get_objects())

    async def compare() -> tuple[int, int]:
        await ask()
        assert await becomes_idle(llm)
        gc.collect()
        before = num_answers()
        gc.disable()
        for _ in range(3):
            await ask()
        assert await becomes_idle(llm)
        await asyncio.sleep(0.05)  # the last events are read
        return before, num_answers()

    try:
        before, after = asyncio.run(compare())
    finally:
        gc.enable()
    assert after <= before
