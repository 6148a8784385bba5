"""Refusals of changes to the models in memory: no room beside those in use, and when to ask again; still in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvarn.errors import CapacityError, InvalidParameter, RequestError
from kvarn.models.memory_plan import show_bytes

if TYPE_CHECKING:
    from kvarn.server.models.adapters import ServedAdapter
    from kvarn.server.models.model_slot import ModelSlot

RETRY_AFTER_S = 5.0  # about one answer's time, where nothing tells how long
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
LATER = 1.25  # than requests have run so far: who asks again too early is refused again
MAX_MODELS = 256  # of one server


class NoRoomForModel(CapacityError):
    """Other models are in use, and there is no memory for one more."""

    def __init__(self, message: str, missing_bytes: int, in_use: Mapping[str, int]) -> None:
        """in_use: the bytes of each model that can be unloaded once its requests have ended."""
        super().__init__(message, retry_after_s=RETRY_AFTER_S)
        self._missing_bytes = missing_bytes
        self._in_use = in_use

    def retry_after(self, left_s: Callable[[str], float | None]) -> None:
        """Retry when enough of the models will be idle; left_s: how long the requests of one will still run."""
        times = sorted((_bounded(left_s(model_id)), num_bytes) for model_id, num_bytes in self._in_use.items())
        num_missing = self._missing_bytes
        for seconds, num_bytes in times:
            self.retry_after_s = seconds
            num_missing -= num_bytes
            if num_missing <= 0:
                return


class ModelInUse(RequestError):
    """A model cannot be unloaded now, because requests use it or the configuration keeps it."""

    field = "model"


def require_removable(slot: ModelSlot, adapters: Sequence[ServedAdapter], *, drains: bool) -> None:
    """Refuse to unload what is pinned, what adapters need, and without drains what requests use."""
    if slot.is_pinned:
        raise ModelInUse(f"model {slot.id!r} is pinned by the server's configuration; it stays loaded")
    if adapters:
        raise ModelInUse(f"model {slot.id!r} has adapters; unload {adapters[0].name!r} first, {len(adapters)} in all")
    if slot.is_leaving:
        raise ModelInUse(f"model {slot.id!r} is being unloaded already; wait for that")
    if slot.num_users and not drains:
        raise ModelInUse(
            f"model {slot.id!r} is in use, requests: {slot.num_users}; send drain to unload it when they have ended"
        )


def require_free_id(model_id: str, ids: Sequence[str]) -> None:
    """Refuse an id that another model or adapter has, and more models than there may be."""
    if model_id in ids:
        raise InvalidParameter(f"id is {model_id!r:.80}, which another model has; give another", field="id")
    if len(ids) >= MAX_MODELS:
        raise InvalidParameter(f"{len(ids)} models are offered; unload some", field="model")


def no_room_error(wanted: ModelSlot, loaded: list[ModelSlot], budget_bytes: int) -> NoRoomForModel:
    """For a model that would not fit even if all idle ones were unloaded."""
    staying = [slot for slot in loaded if not slot.is_removable]
    taken = ", ".join(f"{slot.id} {show_bytes(slot.needed_bytes)}" for slot in staying)
    free = budget_bytes - sum(slot.needed_bytes for slot in staying)
    return NoRoomForModel(
        f"model {wanted.id!r} needs {show_bytes(wanted.needed_bytes)} of the server's {show_bytes(budget_bytes)}, "
        f"and others are in use ({taken}); try again when they are idle",
        wanted.needed_bytes - free,
        {slot.id: slot.needed_bytes for slot in loaded if slot.num_users and not slot.is_pinned},
    )


def _bounded(left_s: float | None) -> float:
    """None: what runs does not tell how long."""
    return RETRY_AFTER_S if left_s is None else min(max(LATER * left_s, MIN_RETRY_S), MAX_RETRY_S)
