"""The adapters of one loaded model by name: packed within a budget of bytes, the least recently used ones out.

A request holds what it uses: an adapter that is unloaded or replaced while requests run stays with them until they
end, and one that was put out for others is read again from its path when somebody names it. Any thread may call.
"""

from __future__ import annotations

import math
import os
import re
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarn.adapters.files import AdapterDescription, open_adapter
from kvarn.adapters.weights import HEAD, AdapterUse, LoraWeights
from kvarn.checks import short
from kvarn.config import DEFAULT_LORA_BYTES
from kvarn.errors import CapacityError, DoesNotFit, FormatError, InvalidParameter, UnsupportedModel
from kvarn.models.spec import Encoder

if TYPE_CHECKING:
    from kvarn.models.spec import ModelSpec

RETRY_AFTER_S = 1.0
MAX_SCALE = 1000.0
MAX_USES = 8  # adapters of one request
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}")

LoraChoice = str | Mapping[str, float] | None  # an adapter's name, or several with their factors


@dataclass(frozen=True, slots=True)
class LoadedLora:
    """What is known about a loaded adapter."""

    name: str
    path: str
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    base: str | None  # the model it was made for, where its file says so
    digest: str  # of every value and scale
    num_bytes: int  # of memory


@dataclass(slots=True, eq=False)
class _PackedAdapter:
    """An adapter in the backend, or the memory that running requests still hold of one."""

    handle: Any
    num_bytes: int
    changes_head: bool
    used_at: int = 0
    uses: weakref.WeakSet[AdapterUse] = field(default_factory=weakref.WeakSet)


@dataclass(slots=True, eq=False)
class _NamedAdapter:
    lora: LoadedLora
    digest: bytes
    packed: _PackedAdapter | None  # None: put out, to be read again


class AdapterPool:
    """Loads, names and packs adapters for one backend."""

    def __init__(self, spec: ModelSpec, backend: Any, budget_bytes: int | None) -> None:
        """budget_bytes: None is DEFAULT_LORA_BYTES."""
        self._spec = spec
        self._backend = backend
        self._budget_bytes = DEFAULT_LORA_BYTES if budget_bytes is None else budget_bytes
        self._entries: dict[str, _NamedAdapter] = {}
        self._leaving: list[_PackedAdapter] = []  # without a name, until their requests end
        self._ticks = count(1)
        self._lock = threading.RLock()

    @property
    def loras(self) -> tuple[LoadedLora, ...]:
        """All that have a name here, in the order they were loaded."""
        with self._lock:
            return tuple(entry.lora for entry in self._entries.values())

    @property
    def num_bytes(self) -> int:
        """Memory of all adapters, those that leave included."""
        with self._lock:
            self._leaving = [packed for packed in self._leaving if len(packed.uses)]
            return sum(packed.num_bytes for packed in self._packed())

    def load(self, path: str | os.PathLike[str], name: str | None = None) -> LoadedLora:
        """Read and pack an adapter under a name, by default its file's; one of that name is replaced.

        Requests that run with the one before keep it.
        """
        chosen = _checked_name(Path(path).name if name is None else name)
        description, weights = self._read(path)
        digest = weights.digest()
        with self._lock:
            packed = self._pack(weights, chosen)
            self._forget(chosen)
            entry = _NamedAdapter(_loaded(chosen, description, digest, packed), digest, packed)
            self._entries[chosen] = entry
            return entry.lora

    def unload(self, name: str) -> None:
        """Forget a name; requests that run with it end as they would have."""
        with self._lock:
            self._require(name)
            self._forget(name)

    def uses(self, choice: LoraChoice) -> tuple[AdapterUse, ...]:
        """What a request adds to the base; it holds the adapters' memory as long as it exists."""
        factors = {} if choice is None else {choice: 1.0} if isinstance(choice, str) else _checked_factors(choice)
        with self._lock:
            found = [self._use(name, factor) for name, factor in factors.items() if factor]
        # The order of sums is the adapters' own, not that of their names: equal mixtures have equal bytes.
        return tuple(sorted(found, key=lambda use: (use.digest, use.scale)))

    def _use(self, name: str, factor: float) -> AdapterUse:
        entry = self._require(name)
        packed = entry.packed
        if packed is None:
            _, weights = self._read(entry.lora.path)
            if weights.digest() != entry.digest:
                raise FormatError(
                    f"adapter {name!r} was put out of memory, and its file has changed since; load it again",
                    file=entry.lora.path,
                )
            packed = entry.packed = self._pack(weights, name)
        packed.used_at = next(self._ticks)
        use = AdapterUse(packed.handle, entry.digest, float(factor), packed.changes_head)
        packed.uses.add(use)
        return use

    def _read(self, path: str | os.PathLike[str]) -> tuple[AdapterDescription, LoraWeights]:
        if not callable(getattr(self._backend, "prepare_adapter", None)):
            raise UnsupportedModel(
                f"the {self._backend.name} backend has no adapters here; use the native or the reference one, without "
                "own_process",
                fields=("lora",),
            )
        if isinstance(self._spec.generation, Encoder):
            raise UnsupportedModel(
                f"{self._spec.name!r} is an encoder; adapters are for models that generate", fields=("lora",)
            )
        file = open_adapter(path, self._budget_bytes)
        return file.description, file.fit(self._spec)

    def _pack(self, weights: LoraWeights, name: str) -> _PackedAdapter:
        """Pack an adapter, and put others out where the budget is exceeded by it."""
        handle = self._backend.prepare_adapter(weights)
        packed = _PackedAdapter(handle, handle.num_bytes, HEAD in weights.pairs, next(self._ticks))
        if packed.num_bytes > self._budget_bytes:
            raise DoesNotFit(
                f"adapter {name!r} needs {packed.num_bytes:,} bytes, lora_bytes is {self._budget_bytes:,}; raise it",
                needed_bytes=packed.num_bytes,
                available_bytes=self._budget_bytes,
            )
        idle = sorted((e for e in self._entries.values() if e.packed and not e.packed.uses), key=_used_at)
        while self.num_bytes + packed.num_bytes > self._budget_bytes:
            if not idle:
                raise CapacityError(
                    f"adapter {name!r} needs {packed.num_bytes:,} bytes, requests use {self.num_bytes:,} of lora_bytes "
                    f"{self._budget_bytes:,}; try again when some have ended",
                    retry_after_s=RETRY_AFTER_S,
                )
            idle.pop(0).packed = None
        return packed

    def _packed(self) -> list[_PackedAdapter]:
        return [*self._leaving, *(entry.packed for entry in self._entries.values() if entry.packed is not None)]

    def _forget(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None and entry.packed is not None and entry.packed.uses:
            self._leaving.append(entry.packed)

    def _require(self, name: str) -> _NamedAdapter:
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(self._entries) or "none"
            raise InvalidParameter(f"no adapter is called {short(name)}; loaded are: {known}", field="lora")
        return entry


def _used_at(entry: _NamedAdapter) -> int:
    assert entry.packed is not None, "only packed ones are compared"
    return entry.packed.used_at


def _loaded(name: str, description: AdapterDescription, digest: bytes, packed: _PackedAdapter) -> LoadedLora:
    return LoadedLora(
        name=name,
        path=description.path,
        ranks=description.ranks,
        targets=description.targets,
        base=description.base,
        digest=digest.hex(),
        num_bytes=packed.num_bytes,
    )


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter(
            f"the adapter's name is {short(name)}; give letters, digits and . _ : @ / -, at most 128", field="name"
        )
    return name


def _checked_factors(choice: object) -> Mapping[str, float]:
    if not isinstance(choice, Mapping) or len(choice) > MAX_USES:
        raise InvalidParameter(
            f"lora is {short(choice)}; give an adapter's name, or up to {MAX_USES} names with a factor each",
            field="lora",
        )
    for name, factor in choice.items():
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not isinstance(name, str) or not is_number or not math.isfinite(factor) or abs(factor) > MAX_SCALE:
            raise InvalidParameter(
                f"lora gives {short(name)} the factor {short(factor)}; give a number from -{MAX_SCALE:g} to "
                f"{MAX_SCALE:g}",
                field="lora",
            )
    return choice
