"""The models of one server: loaded when first asked for, kept within a memory budget, the least recently used one out.

    use(name) ── loaded? ──yes────────────────────────────────────────> ServedModel, counted until the request ends
                    └─no─> shorten its context, else evict (unused, unpinned, oldest first) ─> load and warm up ─┘

Lives in one event loop. Names from requests are looked up, never opened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from kvarn.backends.select import device_memory
from kvarn.errors import CapacityError, ModelError, ModelNotFound
from kvarn.observe.logs import with_fields
from kvarn.server.models.adapters import ServedAdapters, named_path, require_lora_dir
from kvarn.server.models.catalog import (
    CatalogEntry,
    LoadPlan,
    MemoryRoom,
    find_files,
    model_ids,
    pinned_id,
    plan_beside,
    plan_load,
    with_adapters,
    with_process_choice,
)
from kvarn.server.models.model_slot import ModelSlot, retrieve_result
from kvarn.server.models.no_room import RETRY_AFTER_S, no_room_error, require_free_id, require_removable
from kvarn.server.models.served_model import ServedModel, load_served

if TYPE_CHECKING:
    from kvarn.server.process.settings import ServerConfig

log = logging.getLogger("kvarn.server")

MAX_NAME_SHOWN = 80


class ModelPool:
    """The configured models by id, each loaded or not."""

    def __init__(self, config: ServerConfig) -> None:
        require_lora_dir(config.lora_dir)
        self._names = dict(model_ids(config.models))
        self.adapters, self._loras = ServedAdapters(), config.loras
        self._pinned = frozenset(pinned_id(self._names, name) for name in config.pinned)
        self._engine, self._has_adapters = config.engine, bool(config.loras) or config.lora_dir is not None
        self._budget_bytes = config.memory_bytes
        self._slots: dict[str, ModelSlot] = {}  # of each model, by the first id that it has
        self._first_ids: dict[str, str] = {}  # one file may have several ids: it is loaded once
        self.added_ids: set[str] = set()  # that an admin added since the start
        self._ticks = count(1)
        self._changing = asyncio.Lock()  # one model is loaded or evicted at a time
        self._is_closed = False

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of all models on offer, loaded or not, and of their adapters."""
        return (*self._names, *self.adapters.names)

    @property
    def model_ids(self) -> tuple[str, ...]:
        return tuple(self._names)

    @property
    def default_id(self) -> str:
        return next(iter(self._names))

    @property
    def loaded(self) -> tuple[ServedModel, ...]:
        """The models that are loaded now, for health and metrics."""
        return tuple(slot.model for slot in self._slots.values() if slot.model is not None)

    @property
    def budget_bytes(self) -> int:
        """Memory for all models together."""
        if self._budget_bytes is None:
            self._budget_bytes = device_memory(self._engine).num_bytes
        return self._budget_bytes

    async def start(self, on_phase: Callable[[str, str], None] | None = None) -> None:
        """Find every model and load the pinned ones and the first; whatever cannot be served is refused here."""
        report = on_phase or _ignore
        if self._has_adapters:
            self._engine = with_adapters(self._engine, self.budget_bytes)
        await self._find(report)
        num_models = len(set(self._first_ids.values()))
        self._engine = await asyncio.to_thread(with_process_choice, self._engine, num_models)
        pinned = {self._first_ids[model_id] for model_id in self._pinned}
        self._pinned = frozenset(pinned)
        for model_id in sorted(set(self._first_ids.values()), key=lambda one: (one not in pinned, self.ids.index(one))):
            self._slots[model_id] = ModelSlot(await self._plan(model_id, self.budget_bytes, self.budget_bytes))
        await self._share_memory()
        for model_id in dict.fromkeys((*sorted(pinned, key=self.ids.index), self.default_id)):
            report("load", model_id)
            await self._load_now(self._slots[model_id])
        for given in self._loras:
            await self.adapters.load(self, *named_path(given), self.default_id, replaces=False)

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[ServedModel]:
        """Keep a model loaded while the block runs, loading it first if need be; ModelNotFound for other names."""
        slot = self.slot(name)
        is_adapter = self.adapters.get(name) is not None
        if slot.is_leaving:
            raise CapacityError(f"model {slot.id!r} is being unloaded; try again", retry_after_s=RETRY_AFTER_S)
        slot.num_users += 1  # before waiting, so that it is not unloaded between its load and its use
        slot.unused.clear()
        try:
            model = slot.model or await self._load(slot)
            if is_adapter:
                yield await self.adapters.served(model, name)
            else:
                yield model if model.id == name else replace(model, id=name, entry=replace(model.entry, id=name))
        finally:
            slot.num_users -= 1
            slot.used_at = next(self._ticks)
            if slot.num_users == 0:
                slot.unused.set()

    def is_loaded(self, name: str) -> bool:
        """Whether a use of this name need not wait."""
        slot = self._slots.get(self._first_ids.get(self._model_of(name), ""))
        return slot is not None and slot.model is not None

    def entries(self) -> tuple[CatalogEntry, ...]:
        """All models in the order of the configuration."""
        return tuple(self.entry(model_id) for model_id in self.ids)

    def entry(self, name: str) -> CatalogEntry:
        slot, adapter = self.slot(name), self.adapters.get(name)
        entry = replace(slot.plan.entry, id=name, is_loaded=slot.model is not None)
        return entry if adapter is None else adapter.entry(entry)

    def first_id(self, name: str) -> str:
        """The id under which a model is loaded that has several; of an adapter, its model's."""
        return self.slot(name).id

    async def prospect(self, model_id: str, name: str) -> ModelSlot:
        """The slot of a model whose files are here: the one that it has, or a new one, planned for what is free."""
        path = await asyncio.to_thread(find_files, name)
        if known := [slot for slot in self._slots.values() if slot.plan.path.resolve() == path]:
            return known[0]
        with_process_choice(self._engine, len(self._slots) + 1)  # refuses where engines cannot take turns
        loaded = sum(slot.needed_bytes for slot in self._slots.values() if slot.model is not None)
        pinned = sum(slot.needed_bytes for slot in self._slots.values() if slot.is_pinned)
        room = MemoryRoom(self.budget_bytes - loaded, self.budget_bytes - pinned, is_shared=True)
        return ModelSlot(await asyncio.to_thread(plan_load, model_id, name, self._engine, room))

    def offer(self, slot: ModelSlot) -> None:
        """Offer a new slot's model as those of the start are; without effect on one that is offered."""
        if self._slots.get(slot.id) is not slot:
            require_free_id(slot.id, self.ids)
            self._names[slot.id], self._first_ids[slot.id] = str(slot.plan.path), slot.id
            self._slots[slot.id] = slot
            self.added_ids.add(slot.id)

    async def unload(self, name: str, *, drains: bool) -> ModelSlot:
        """Free a model's memory, once nobody uses it if drains; one that was added is not offered any more."""
        slot = self.slot(name)
        require_removable(slot, self.adapters.of_model(slot.id), drains=drains)
        slot.is_leaving = True
        try:
            if slot.num_users:
                await slot.unused.wait()
            async with self._changing:
                if slot.id in self.added_ids:
                    self.added_ids.remove(slot.id)
                    del self._names[slot.id], self._first_ids[slot.id], self._slots[slot.id]
                await asyncio.shield(asyncio.create_task(slot.unload()))
        finally:
            slot.is_leaving = False
        return slot

    async def close(self) -> None:
        """Unload everything; later uses are refused."""
        self._is_closed = True
        async with self._changing:
            for slot in self._slots.values():
                await slot.unload()

    def _model_of(self, name: str) -> str:
        adapter = self.adapters.get(name)
        return name if adapter is None else adapter.base_id

    def slot(self, name: str) -> ModelSlot:
        """Of one model, loaded or not; ModelNotFound for other names."""
        if name not in self.ids:
            offered = ", ".join(self.ids)
            raise ModelNotFound(f"no model here is called {name[:MAX_NAME_SHOWN]!r}; this server has {offered}")
        if self._is_closed:
            raise CapacityError("the server is shutting down; ask another one", retry_after_s=RETRY_AFTER_S)
        first_id = self._first_ids.get(self._model_of(name))
        if first_id not in self._slots:
            raise CapacityError("the server is still looking for its models; try again", retry_after_s=RETRY_AFTER_S)
        return self._slots[first_id]

    async def _find(self, report: Callable[[str, str], None]) -> None:
        """Find the files of all models, and which ids are of the same one."""
        first_ids: dict[Path, str] = {}
        for model_id, name in self._names.items():
            report("find", model_id)
            path = await asyncio.to_thread(find_files, name)
            self._first_ids[model_id] = first_ids.setdefault(path, model_id)

    async def _plan(self, model_id: str, share: int, whole: int) -> LoadPlan:
        room = MemoryRoom(share, whole, is_shared=len(set(self._first_ids.values())) > 1)
        plan = await asyncio.to_thread(plan_load, model_id, self._names[model_id], self._engine, room)
        return replace(plan, entry=replace(plan.entry, is_pinned=model_id in self._pinned))

    async def _share_memory(self) -> None:
        """Shorten contexts until all models fit together, if they can: what a small one leaves goes to the others."""
        left, pinned_bytes = self.budget_bytes, 0
        order = sorted(self._slots.values(), key=lambda slot: (not slot.is_pinned, slot.needed_bytes))
        for num_before, slot in enumerate(order):
            share = left // (len(order) - num_before)
            if slot.needed_bytes > share:
                slot.plan = slot.full_plan = await self._plan(slot.id, share, self.budget_bytes - pinned_bytes)
            left -= min(slot.needed_bytes, share)
            pinned_bytes += slot.needed_bytes if slot.is_pinned else 0

    async def _load(self, slot: ModelSlot) -> ServedModel:
        """Wait for the load; it goes on when this caller gives up, because others may wait for it too."""
        if slot.loading is None:
            slot.loading = asyncio.create_task(self._load_now(slot))
            slot.loading.add_done_callback(retrieve_result)
        try:
            return await asyncio.shield(slot.loading)
        except (CapacityError, asyncio.CancelledError):
            raise
        except Exception as error:
            # The reason may name files of this machine: it was logged, and clients get the model's id only.
            raise ModelError(f"model {slot.id!r} could not be loaded; the server's log says why") from error

    async def _load_now(self, slot: ModelSlot) -> ServedModel:
        try:
            async with self._changing:
                if self._is_closed:  # while this load waited for another
                    raise CapacityError("the server is shutting down; ask another one", retry_after_s=RETRY_AFTER_S)
                await self._make_room(slot)
                started = time.monotonic()
                slot.plan, model = await load_served(slot.plan)
                slot.remember_digest()
                slot.model = model
                seconds = round(time.monotonic() - started, 3)
                fields = with_fields(
                    model=slot.id, context=model.entry.context, bytes=slot.needed_bytes, seconds=seconds
                )
                log.info("model loaded", extra=fields)
                return model
        except CapacityError:
            raise
        except Exception as error:
            log.error("model could not be loaded", exc_info=error, extra=with_fields(model=slot.id))
            raise
        finally:
            slot.loading = None

    async def _make_room(self, wanted: ModelSlot) -> None:
        wanted.plan, leaving = await self.room_for(wanted)
        for slot in leaving:
            log.info("model unloaded", extra=with_fields(model=slot.id, makes_room_for=wanted.id))
            await slot.unload()

    async def room_for(self, wanted: ModelSlot) -> tuple[LoadPlan, list[ModelSlot]]:
        """Shorten the model's context, before any other is unloaded for it, and unload as few as possible."""
        loaded = [slot for slot in self._slots.values() if slot.model is not None]
        idle = sorted((slot for slot in loaded if slot.is_removable), key=lambda slot: slot.used_at)
        free = self.budget_bytes - sum(slot.needed_bytes for slot in loaded)
        if await self._plan_beside(wanted, free + sum(slot.needed_bytes for slot in idle)) is None:
            raise no_room_error(wanted, loaded, self.budget_bytes)
        leaving: list[ModelSlot] = []
        while (plan := await self._plan_beside(wanted, free)) is None:
            leaving.append(idle[len(leaving)])
            free += leaving[-1].needed_bytes
        return plan, leaving

    async def _plan_beside(self, wanted: ModelSlot, free: int) -> LoadPlan | None:
        """The plan of the start, or one with a shorter context; None where even that does not fit."""
        if wanted.full_plan.entry.needed_bytes <= free:
            return wanted.full_plan
        known, path = wanted.full_plan.entry, str(wanted.full_plan.path.absolute())
        plan = await asyncio.to_thread(plan_beside, wanted.id, path, self._engine, free)
        if plan is None:
            return None
        return replace(plan, entry=replace(plan.entry, is_pinned=known.is_pinned, digest=known.digest))


def _ignore(_name: str, _model: str) -> None:
    pass
