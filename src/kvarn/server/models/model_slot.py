"""One configured model of a server: its plans, whether it is loaded, and who uses it. The pool decides when."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvarn.errors import KvarnError
from kvarn.observe.logs import with_fields
from kvarn.server.models.catalog import LoadPlan
from kvarn.server.process.interpreter import collect_everything_again

if TYPE_CHECKING:
    from kvarn.server.models.served_model import ServedModel

log = logging.getLogger("kvarn.server")


@dataclass(slots=True)
class ModelSlot:
    """One configured model: not loaded, loading, or loaded."""

    full_plan: LoadPlan  # made at the start
    plan: LoadPlan = field(init=False)  # the last load's: perhaps with a shorter context
    model: ServedModel | None = None
    loading: asyncio.Task[ServedModel] | None = None
    num_users: int = 0
    used_at: int = 0  # ticks, not time: only the order counts
    is_leaving: bool = False  # being unloaded by an admin: takes no more requests
    unused: asyncio.Event = field(default_factory=asyncio.Event)  # set when the last user leaves

    def __post_init__(self) -> None:
        self.plan = self.full_plan

    @property
    def id(self) -> str:
        return self.plan.entry.id

    def remember_digest(self) -> None:
        """The file's, which is known once it was loaded."""
        entry = replace(self.full_plan.entry, digest=self.plan.entry.digest)
        self.full_plan = replace(self.full_plan, entry=entry)

    @property
    def needed_bytes(self) -> int:
        return self.plan.entry.needed_bytes

    @property
    def is_pinned(self) -> bool:
        return self.plan.entry.is_pinned

    @property
    def is_removable(self) -> bool:
        return self.num_users == 0 and not self.is_pinned

    async def unload(self) -> None:
        """Free its memory; nothing happens if it is not loaded."""
        model, self.model = self.model, None
        if model is None:
            return
        try:
            await model.llm.close()
            collect_everything_again()
        except KvarnError:
            log.exception("model was not unloaded cleanly", extra=with_fields(model=self.id))


def retrieve_result(load: asyncio.Task[ServedModel]) -> None:
    """Retrieve the result of a load, or asyncio warns; its callers may all have disconnected."""
    _ = load.cancelled() or load.exception()
