"""The models of one server: loaded when first asked for, kept within a memory budget, the least recently used one out.

    use(name) ── on the shelf? ──yes──────────────────────────────> ServedModel, counted until the request ends
                      └─no─> make room (unused, unpinned, oldest first) ─> load and warm up ─┘

Lives in one event loop. Names from requests are looked up, never opened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from kvarn.async_llm import AsyncLLM
from kvarn.errors import CapacityError, ConfigError, KvarnError, ModelError, ModelNotFound
from kvarn.machine import available_memory
from kvarn.models.memory_plan import show_bytes
from kvarn.observe.logs import with_fields
from kvarn.server.chat.output.formats import OutputFormat, detect_format
from kvarn.server.models.catalog import CatalogEntry, MemoryRoom, Offer, make_offer, model_ids, with_digest
from kvarn.types import SamplingParams

if TYPE_CHECKING:
    from kvarn.server.process.settings import ServerConfig

log = logging.getLogger("kvarn.server")

RETRY_AFTER_S = 5.0  # for room: about one answer's time
MAX_NAME_SHOWN = 80
WARM_UP_TEXT = "Hello"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model, for as long as somebody uses it."""

    id: str
    llm: AsyncLLM
    card: CatalogEntry
    output_format: OutputFormat


class ModelPool:
    """The configured models by id; each is on the shelf (loaded) or can be put there."""

    def __init__(self, config: ServerConfig) -> None:
        self._names = model_ids(config.models)
        self._pinned = frozenset(_pinned_id(self._names, name) for name in config.pinned)
        self._engine = config.engine
        self._budget_bytes = config.memory_bytes
        self._places: dict[str, _PoolEntry] = {}
        self._ticks = count(1)
        self._changing = asyncio.Lock()  # one model comes or goes at a time
        self._is_closed = False

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of all configured models, loaded or not."""
        return tuple(self._names)

    @property
    def default_id(self) -> str:
        return next(iter(self._names))

    @property
    def loaded(self) -> tuple[ServedModel, ...]:
        """The models on the shelf now, for health and metrics."""
        return tuple(place.served for place in self._places.values() if place.served is not None)

    @property
    def budget_bytes(self) -> int:
        """Memory for all models together."""
        if self._budget_bytes is None:
            self._budget_bytes = available_memory().num_bytes
        return self._budget_bytes

    async def start(self, on_phase: Callable[[str], None] | None = None) -> None:
        """Find every model and load the pinned ones and the first; whatever cannot be served is refused here."""
        report = on_phase or _ignore
        for model_id in sorted(self._names, key=lambda name: name not in self._pinned):
            report(f"find {model_id}")
            await self._find(model_id)
        for model_id in dict.fromkeys((*sorted(self._pinned, key=self.ids.index), self.default_id)):
            report(f"load {model_id}")
            await self._load_now(self._places[model_id])

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[ServedModel]:
        """Keep a model loaded while the block runs, loading it first if need be; ModelNotFound for other names."""
        place = self._place(name)
        place.num_users += 1  # before waiting, so that it is not unloaded between its load and its use
        try:
            yield place.served or await self._load(place)
        finally:
            place.num_users -= 1
            place.used_at = next(self._ticks)

    def is_loaded(self, name: str) -> bool:
        """Whether a use of this name need not wait."""
        return name in self._places and self._places[name].served is not None

    def cards(self) -> tuple[CatalogEntry, ...]:
        """All models in the order of the configuration."""
        return tuple(self.card(model_id) for model_id in self._names)

    def card(self, name: str) -> CatalogEntry:
        place = self._place(name)
        return replace(place.offer.card, is_loaded=place.served is not None)

    async def close(self) -> None:
        """Unload everything; later uses are refused."""
        self._is_closed = True
        async with self._changing:
            for place in self._places.values():
                await _unload(place)

    def _place(self, name: str) -> _PoolEntry:
        if name not in self._names:
            offered = ", ".join(self._names)
            raise ModelNotFound(f"no model here is called {name[:MAX_NAME_SHOWN]!r}; this server has {offered}")
        if self._is_closed:
            raise CapacityError("the server is shutting down; ask another one", retry_after_s=RETRY_AFTER_S)
        if name not in self._places:
            raise CapacityError("the server is still looking for its models; try again", retry_after_s=RETRY_AFTER_S)
        return self._places[name]

    async def _find(self, model_id: str) -> None:
        pinned_bytes = sum(place.needed_bytes for place in self._places.values() if place.is_pinned)
        is_shared = len(self._names) > 1
        room = MemoryRoom(self.budget_bytes // len(self._names), self.budget_bytes - pinned_bytes, is_shared)
        offer = await asyncio.to_thread(make_offer, model_id, self._names[model_id], self._engine, room)
        is_pinned = model_id in self._pinned
        self._places[model_id] = _PoolEntry(replace(offer, card=replace(offer.card, is_pinned=is_pinned)))

    async def _load(self, place: _PoolEntry) -> ServedModel:
        """Wait for the load; it goes on when this caller gives up, because others may wait for it too."""
        if place.loading is None:
            place.loading = asyncio.create_task(self._load_now(place))
            place.loading.add_done_callback(_see)
        try:
            return await asyncio.shield(place.loading)
        except (CapacityError, asyncio.CancelledError):
            raise
        except Exception as error:
            # The reason may name files of this machine: it was logged, and clients are told the model's id only.
            raise ModelError(f"model {place.id!r} could not be loaded; the server's log says why") from error

    async def _load_now(self, place: _PoolEntry) -> ServedModel:
        try:
            async with self._changing:
                if self._is_closed:  # while this load waited for another
                    raise CapacityError("the server is shutting down; ask another one", retry_after_s=RETRY_AFTER_S)
                await self._make_room(place)
                started = time.monotonic()
                place.offer, served = await _open(place.offer)
                place.served = served
                seconds = round(time.monotonic() - started, 3)
                told = with_fields(
                    model=place.id, context=served.card.context, bytes=place.needed_bytes, seconds=seconds
                )
                log.info("model loaded", extra=told)
                return served
        except CapacityError:
            raise
        except Exception as error:
            log.error("model could not be loaded", exc_info=error, extra=with_fields(model=place.id))
            raise
        finally:
            place.loading = None

    async def _make_room(self, wanted: _PoolEntry) -> None:
        on_shelf = [place for place in self._places.values() if place.served is not None]
        missing = sum(place.needed_bytes for place in on_shelf) + wanted.needed_bytes - self.budget_bytes
        idle = sorted((place for place in on_shelf if place.is_removable), key=lambda place: place.used_at)
        if missing > sum(place.needed_bytes for place in idle):
            raise self._no_room(wanted, on_shelf)
        for place in idle:
            if missing <= 0:
                return
            missing -= place.needed_bytes
            log.info("model unloaded", extra=with_fields(model=place.id, makes_room_for=wanted.id))
            await _unload(place)

    def _no_room(self, wanted: _PoolEntry, on_shelf: list[_PoolEntry]) -> CapacityError:
        taken = ", ".join(
            f"{place.id} {show_bytes(place.needed_bytes)}" for place in on_shelf if not place.is_removable
        )
        needed, budget = show_bytes(wanted.needed_bytes), show_bytes(self.budget_bytes)
        return CapacityError(
            f"model {wanted.id!r} needs {needed} of the server's {budget}, "
            f"and others are in use ({taken}); try again when they are idle",
            retry_after_s=RETRY_AFTER_S,
        )


@dataclass(slots=True)
class _PoolEntry:
    """One model's place on the shelf: empty, being filled, or taken."""

    offer: Offer
    served: ServedModel | None = None
    loading: asyncio.Task[ServedModel] | None = None
    num_users: int = 0
    used_at: int = 0  # ticks, not time: only the order counts

    @property
    def id(self) -> str:
        return self.offer.card.id

    @property
    def needed_bytes(self) -> int:
        return self.offer.card.needed_bytes

    @property
    def is_pinned(self) -> bool:
        return self.offer.card.is_pinned

    @property
    def is_removable(self) -> bool:
        return self.num_users == 0 and not self.is_pinned


async def _open(offer: Offer) -> tuple[Offer, ServedModel]:
    """Load a model and have it compute once; the offer comes back with the digest."""
    llm = AsyncLLM(str(offer.path), config=offer.engine)
    hashed = asyncio.create_task(asyncio.to_thread(with_digest, offer))
    try:
        await llm.load()
        offer = await hashed
        await _warm_up(llm, offer.card)
        tokenizer = llm.llm.tokenizer
        output_format = detect_format(tokenizer.chat_template, tokenizer)
    except BaseException:
        hashed.cancel()
        await llm.close()
        raise
    return offer, ServedModel(offer.card.id, llm, replace(offer.card, is_loaded=True), output_format)


async def _warm_up(llm: AsyncLLM, card: CatalogEntry) -> None:
    if card.kind == "embed":
        await llm.embed(WARM_UP_TEXT)
    elif card.kind == "rerank":
        await asyncio.to_thread(llm.llm.classify, [(WARM_UP_TEXT, WARM_UP_TEXT)])
    else:
        await asyncio.to_thread(llm.llm.tokenizer.prepare_chat)
        await llm.generate(WARM_UP_TEXT, SamplingParams(max_tokens=1, temperature=0.0))


async def _unload(place: _PoolEntry) -> None:
    served, place.served = place.served, None
    if served is None:
        return
    try:
        await served.llm.close()
    except KvarnError:
        log.exception("model was not unloaded cleanly", extra=with_fields(model=place.id))


def _pinned_id(names: Mapping[str, str], wanted: str) -> str:
    """The id of a model that shall stay, written as an id or as the name it was configured with."""
    for model_id, name in names.items():
        if wanted in (model_id, name):
            return model_id
    raise ConfigError(f"pinned names {wanted!r:.80}, which is not among the models {', '.join(names)}; add it there")


def _see(load: asyncio.Task[ServedModel]) -> None:
    """Look at how a load ended, which asyncio wants somebody to do; its callers may all be gone."""
    _ = load.cancelled() or load.exception()


def _ignore(_: str) -> None:
    pass
