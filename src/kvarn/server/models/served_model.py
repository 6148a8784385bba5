"""A loaded model as requests use it, and how it is loaded: with its digest, warmed up, its format of answers known."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from kvarn.adapters.weights import AdapterUse
from kvarn.async_llm import AsyncLLM
from kvarn.diffusion import DiffusionParams
from kvarn.server.chat.output.formats import OutputFormat, detect_format
from kvarn.server.models.catalog import CatalogEntry, LoadPlan, with_digest
from kvarn.types import SamplingParams

WARM_UP_TEXT = "Hello"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model, for as long as a request uses it."""

    id: str
    llm: AsyncLLM
    entry: CatalogEntry
    output_format: OutputFormat
    adapters: tuple[AdapterUse, ...] = ()  # what is added to it, under the id of an adapter

    @property
    def base_id(self) -> str:
        """The id of the model itself."""
        return self.entry.parent or self.id


async def load_served(plan: LoadPlan) -> tuple[LoadPlan, ServedModel]:
    """Load a model and have it compute once; the plan comes back with the digest."""
    llm = AsyncLLM(str(plan.path), config=plan.engine)
    hashed = asyncio.create_task(asyncio.to_thread(with_digest, plan))
    try:
        await llm.load()
        plan = await hashed
        await _warm_up(llm, plan.entry)
        tokenizer = llm.llm.tokenizer
        output_format = detect_format(tokenizer.chat_template, tokenizer)
    except BaseException:
        hashed.cancel()
        await llm.close()
        raise
    return plan, ServedModel(plan.entry.id, llm, replace(plan.entry, is_loaded=True), output_format)


async def _warm_up(llm: AsyncLLM, entry: CatalogEntry) -> None:
    if entry.kind == "embed":
        await llm.embed(WARM_UP_TEXT)
    elif entry.kind == "rerank":
        await asyncio.to_thread(llm.llm.classify, [(WARM_UP_TEXT, WARM_UP_TEXT)])
    else:
        await asyncio.to_thread(llm.llm.tokenizer.prepare_chat)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        if entry.is_diffusion:  # some have no temperature, and a canvas takes many steps
            params = SamplingParams(max_tokens=1, diffusion=DiffusionParams(steps=1))
        await llm.generate(WARM_UP_TEXT, params)
