"""kvarn.AsyncLLM: the same engine for asyncio. Nothing here blocks an event loop, and nothing polls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, overload

from kvarn.adapters.pool import LoadedLora, LoraChoice
from kvarn.citations.types import Retrieves
from kvarn.config import DEFAULT_MODEL, EngineConfig
from kvarn.engine.delivery.async_answers import AsyncAnswers, drop_event
from kvarn.engine.stats import EngineStats
from kvarn.engine.submission import Submission
from kvarn.errors import RequestError
from kvarn.fill import Filled, Slot, template_parts
from kvarn.hub import OnProgress
from kvarn.llm import LLM
from kvarn.models.spec import Pooling
from kvarn.prompts import (
    LoraOfEach,
    ParamsOfEach,
    Prompt,
    Prompts,
    TokenIds,
    cited,
    is_single,
    listed,
)
from kvarn.reranking.rank import RankedDocument
from kvarn.submissions import encoded
from kvarn.tokenizer.fim import Infill
from kvarn.types import Completion, Message, SamplingParams, TokenEvent
from kvarn.vectors import Float32


class AsyncLLM:
    """A model for coroutines, of any number of event loops: `async with kvarn.AsyncLLM("smollm2") as llm: ...`."""

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        threads: int | None = None,
        context: int | None = None,
        kv_bytes: int | None = None,
        backend: str | None = None,
        tensor_parallel: int | None = None,
        pipeline_parallel: int | None = None,
        config: EngineConfig | None = None,
        progress: OnProgress | None = None,
    ) -> None:
        """Take the options of kvarn.LLM; the model is loaded by `async with` or load()."""
        self._make = partial(
            LLM,
            model,
            threads=threads,
            context=context,
            kv_bytes=kv_bytes,
            backend=backend,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            config=config,
            progress=progress,
        )
        self._loaded: LLM | None = None
        self._loading = threading.Lock()

    async def load(self) -> None:
        """Fetch and load the model, unless that has been done."""
        await asyncio.to_thread(self._load_once)

    async def close(self) -> None:
        """Free weights, cache and helper processes; later calls raise."""
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.close)

    async def __aenter__(self) -> AsyncLLM:
        await self.load()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def llm(self) -> LLM:
        """The synchronous face of the same model: tokenizer, spec, context and the rest."""
        if self._loaded is None:
            raise RequestError("the model is not loaded; use `async with kvarn.AsyncLLM(...) as llm` or await load()")
        return self._loaded

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        tools: Sequence[Any] | None = None,
        *,
        tenant: str = "",
        lora: LoraChoice = None,
    ) -> AsyncEventStream:
        """Events as tokens are chosen. The request starts with the first `async for`; closing the iterator cancels."""
        prepare = partial(self.llm.submissions.of_prompt, prompt, params, tools, tenant=tenant, lora=lora)
        return AsyncEventStream(self.llm, prepare, self.llm.client.stream_async(1))

    @overload
    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, lora: LoraChoice = None
    ) -> Completion: ...

    @overload
    async def generate(
        self, prompt: Prompts, params: ParamsOfEach = None, *, lora: LoraOfEach = None
    ) -> list[Completion]: ...

    async def generate(
        self, prompt: Prompt | Prompts, params: ParamsOfEach = None, *, lora: LoraOfEach = None
    ) -> Completion | list[Completion]:
        """Continue a text or token ids; a list of them gives a list, params and lora may be one too.

        Cancelling the task cancels the requests.
        """
        given = listed(prompt)
        is_one = is_single(given)
        completions = await self._complete(self.llm.submissions.of_prompts([given] if is_one else given, params, lora))
        return completions[0] if is_one else completions

    async def infill(self, prefix: str, suffix: str, params: SamplingParams | None = None) -> Completion:
        """Write what fits between two texts; for diffusion models, and models with fill-in-the-middle tokens."""
        prepare = partial(self.llm.submissions.of_middle, Infill(prefix, suffix), params, self.llm.context)
        submission, read = await asyncio.to_thread(prepare)
        return read((await self._complete([lambda: submission]))[0])

    async def fill(
        self,
        template: str | Mapping[str, Any],
        slots: Mapping[str, Slot] | None = None,
        *,
        prompt: Prompt = "",
        params: SamplingParams | None = None,
    ) -> Filled:
        """Fill the slots of a text, or the values of a JSON schema, all at once; see LLM.fill."""
        llm = self.llm
        ids, parts = encoded(llm.tokenizer, prompt), template_parts(template, slots)
        submission, layout = await asyncio.to_thread(llm.submissions.of_fill, ids, parts, params, llm.context)
        return layout.filled(llm.tokenizer, (await self._complete([lambda: submission]))[0])

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        tools: Sequence[Any] | None = None,
        *,
        retrieve: Retrieves | None = None,
        lora: LoraChoice = None,
    ) -> Completion:
        """Answer a conversation through the model's chat template; retrieve: a kvarn.Collection to look it up in."""
        grounded = await asyncio.to_thread(self.llm.ground, messages, retrieve)
        prepare = partial(self.llm.submissions.of_grounded, grounded, params, tools, lora=lora)
        (completion,) = await self._complete([prepare])
        return await asyncio.to_thread(cited, completion, grounded)

    async def score(self, token_ids: TokenIds) -> Float32:
        """Log-probability of each token after the first, given those before it: (n - 1)."""
        return await asyncio.to_thread(self.llm.score, token_ids)

    async def embed(
        self,
        texts: str | Sequence[str] | Sequence[TokenIds],
        pooling: Pooling | None = None,
        normalize: bool = True,
        *,
        prompt_name: str | None = None,
        priority: int = 0,
    ) -> Float32:
        """One vector per text or list of token ids, (n, dim); for encoder models. Cancelling stops between groups."""
        parts = self.llm.vectors
        chosen = parts.pooling(pooling, normalize=normalize, priority=priority)
        groups = await asyncio.to_thread(parts.groups, texts, prompt_name)
        vectors = [await asyncio.wrap_future(parts.compute(group, chosen, priority=priority)) for group in groups]
        return parts.joined(vectors, normalize)

    async def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> list[RankedDocument]:
        """The documents that answer a query best, best first, with scores of 0 to 1; top_n: not more than so many."""
        return await asyncio.to_thread(self.llm.rerank, query, documents, top_n=top_n)

    async def load_lora(self, path: str, name: str | None = None) -> LoadedLora:
        """Load an adapter for requests that name it as lora=; see kvarn.LLM.load_lora."""
        return await asyncio.to_thread(self.llm.load_lora, path, name)

    async def unload_lora(self, name: str) -> None:
        """Forget an adapter; requests that run with it end as they would have."""
        await asyncio.to_thread(self.llm.unload_lora, name)

    async def stats(self) -> EngineStats:
        """What the engine is doing: requests, blocks, prefix hits, preemptions, tokens per second."""
        return await asyncio.to_thread(self.llm.stats)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Accept nothing more and wait for what runs; whether all of it ended in time."""
        return await asyncio.to_thread(self.llm.drain, timeout_s)

    async def _complete(self, prepare: Sequence[Callable[[], Submission]]) -> list[Completion]:
        answers = self.llm.client.stream_async(len(prepare), drop_event)
        try:
            await answers.submit(await asyncio.to_thread(lambda: [one() for one in prepare]))
            return await answers.results()
        finally:  # also when it was refused, failed, or this task was cancelled
            answers.release()

    def _load_once(self) -> None:
        with self._loading:
            if self._loaded is None:
                self._loaded = self._make()


class AsyncEventStream:
    """Events of one request. aclose(), a cancelled task or dropping it cancels the request within one step."""

    def __init__(self, llm: LLM, prepare: Callable[[], Submission], answers: AsyncAnswers) -> None:
        self._llm = llm  # keeps the model loaded
        self._prepare = prepare
        self._answers = answers
        self._is_started = False
        self._is_over = False

    def __aiter__(self) -> AsyncEventStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._is_over:
            raise StopAsyncIteration
        try:
            if not self._is_started:
                self._is_started = True
                await self._answers.submit([await asyncio.to_thread(self._prepare)])
            _, event = await anext(self._answers)
        except BaseException:  # also the end
            self._close()
            raise
        return event

    def cancel(self) -> None:
        """Ask for the end: the next event is the last, with what was said so far."""
        self._answers.cancel()

    async def aclose(self) -> None:
        """Cancel what is left and throw it away."""
        self._close()

    async def __aenter__(self) -> AsyncEventStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        self._is_over = True
        self._answers.release()
