"""The adapters that a server offers beside its models: each under a name of its own, from a path, of one model.

    use("sql") ──> its model, loaded as any other ──> the adapter in it, read again if the model was unloaded meanwhile

Lives in one event loop. Who may add adapters, and from where, is decided in adapter_routes.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvarn.adapters.files import CONFIG, SAFETENSORS
from kvarn.adapters.pool import LoadedLora, LoraChoice
from kvarn.adapters.weights import AdapterUse
from kvarn.errors import AuthError, ConfigError, InvalidParameter, ModelError, ModelNotFound
from kvarn.hub.names import split_id
from kvarn.observe.logs import with_fields
from kvarn.server.models.catalog import CatalogEntry

if TYPE_CHECKING:
    from kvarn.llm import LLM
    from kvarn.server.models.model_pool import ModelPool
    from kvarn.server.models.served_model import ServedModel

log = logging.getLogger("kvarn.server")

MAX_ADAPTERS = 4096


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """One adapter; the digest is that of its first load, and it is served with no other."""

    name: str
    base_id: str
    path: Path
    created: int  # Unix time when it was loaded
    digest: str
    num_bytes: int

    def entry(self, base: CatalogEntry) -> CatalogEntry:
        """What clients see of it."""
        return replace(
            base, id=self.name, parent=self.base_id, created=self.created, digest=self.digest, is_pinned=False
        )


class ServedAdapters:
    """All adapters by name, in the order they were loaded."""

    def __init__(self) -> None:
        self._adapters: dict[str, ServedAdapter] = {}
        self._changing = asyncio.Lock()  # one is loaded, unloaded or looked up at a time

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def get(self, name: str) -> ServedAdapter | None:
        return self._adapters.get(name)

    def of_model(self, base_id: str) -> list[ServedAdapter]:
        """Those of one model: their places in this list are llama-server's ids."""
        return [one for one in self._adapters.values() if one.base_id == base_id]

    async def load(self, models: ModelPool, name: str, path: Path, base_id: str, *, replaces: bool) -> ServedAdapter:
        """Load an adapter into its model and offer it; requests that run with one of the same name keep that."""
        if base_id in self._adapters:
            raise InvalidParameter(
                f"base_model is {base_id!r:.80}, an adapter itself; give a model", field="base_model"
            )
        async with models.use(base_id) as model, self._changing:
            base_id = models.first_id(base_id)
            known = self._adapters.get(name)
            if name in models.model_ids or (known is not None and known.base_id != base_id):
                raise InvalidParameter(f"lora_name is {name!r:.80}, which is the name of another", field="lora_name")
            if known is not None and not replaces:
                raise InvalidParameter(
                    f"adapter {name!r:.80} is loaded already; unload it first, or send load_inplace", field="lora_name"
                )
            if known is None and len(self._adapters) >= MAX_ADAPTERS:
                raise InvalidParameter(f"{MAX_ADAPTERS:,} adapters are loaded; unload some", field="lora_name")
            lora: LoadedLora = await model.llm.load_lora(str(path), name)
            adapter = ServedAdapter(name, base_id, path, int(time.time()), lora.digest, lora.num_bytes)
            self._adapters[name] = adapter
            log.info("adapter loaded", extra=with_fields(adapter=name, model=base_id, bytes=lora.num_bytes))
            return adapter

    async def unload(self, models: ModelPool, name: str) -> None:
        """Offer it no more; requests that run with it end as they would have."""
        async with self._changing:
            adapter = self._adapters.pop(name, None)
            if adapter is None:
                raise ModelNotFound(f"no adapter is called {name!r:.80}; GET /v1/models lists them")
            llm = next((one.llm.llm for one in models.loaded if one.id == adapter.base_id), None)
            if llm is not None and any(lora.name == name for lora in llm.loras):
                llm.unload_lora(name)
            log.info("adapter unloaded", extra=with_fields(adapter=name, model=adapter.base_id))

    async def served(self, model: ServedModel, name: str) -> ServedModel:
        """The model with an adapter of it, which the request holds from now on."""
        async with self._changing:
            adapter = self._adapters.get(name)
            if adapter is None:
                raise ModelNotFound(f"adapter {name!r:.80} was unloaded just now; GET /v1/models lists the others")
            uses = await asyncio.to_thread(_uses, model.llm.llm, [adapter], name)
        return replace(model, id=name, entry=adapter.entry(model.entry), adapters=uses)

    async def mixed(self, models: ModelPool, model: ServedModel, factors: Mapping[int, float]) -> ServedModel:
        """The model with several adapters at once, by llama-server's ids; none of them: the base."""
        async with self._changing:
            known = self.of_model(models.first_id(model.entry.parent or model.id))
            if unknown := [number for number in factors if number >= len(known)]:
                raise InvalidParameter(
                    f"lora has the id {unknown[0]}; the model has {len(known)} adapter{'s' * (len(known) != 1)}, "
                    "see GET /lora-adapters",
                    field="lora",
                )
            wanted = [known[number] for number in factors]
            choice = {known[number].name: factor for number, factor in factors.items()}
            uses = await asyncio.to_thread(_uses, model.llm.llm, wanted, choice)
        return replace(model, adapters=uses)


def _uses(llm: LLM, adapters: list[ServedAdapter], choice: LoraChoice) -> tuple[AdapterUse, ...]:
    """Runs in a worker thread: adapters of a model that was loaded again are read again."""
    for adapter in adapters:
        if any((lora.name, lora.digest) == (adapter.name, adapter.digest) for lora in llm.loras):
            continue  # else the model was loaded again, or a load that nobody waited for any more replaced it
        lora = llm.load_lora(adapter.path, adapter.name)
        if lora.digest != adapter.digest:
            llm.unload_lora(adapter.name)
            raise ModelError(f"the files of adapter {adapter.name!r} have changed; it must be loaded again")
    return llm.submissions.adapters.uses(choice)


def named_path(given: str) -> tuple[str, Path]:
    """Name and path of an adapter that the operator gave as NAME=PATH or PATH."""
    name, path = split_id(given)
    return (Path(path).name if name is None else name), Path(path).expanduser()


def require_lora_dir(folder: Path | None) -> None:
    """Refuse to start with a folder of adapters that is none: every load would fail."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"lora_dir is {str(folder)!r}, which is no folder; make it, or leave --lora-dir out")


def confined(folder: Path | None, given: str) -> Path:
    """The path of an adapter below the folder that the operator chose; anything else is refused.

    No part of the way may be a link, nor the files in it: what is in the folder is what the operator put there.
    """
    if folder is None:
        raise AuthError("this server loads no adapters; it was started without --lora-dir", reason="forbidden")
    root = folder.resolve()
    if not root.is_dir():
        raise InvalidParameter(
            "lora_path cannot be looked up: the folder of --lora-dir is gone; make it again", field="lora_path"
        )
    path = root / given
    try:
        parts = path.relative_to(root).parts
    except ValueError:
        parts = ()
    if not parts or ".." in parts or "\0" in given:
        raise InvalidParameter(
            "lora_path is not below the folder of adapters; give it as a name in it", field="lora_path"
        )
    steps = [root.joinpath(*parts[: number + 1]) for number in range(len(parts))]
    if any(step.is_symlink() for step in (*steps, path / CONFIG, path / SAFETENSORS)):
        raise InvalidParameter("lora_path leads over a symbolic link, which is not followed", field="lora_path")
    if not path.exists():
        raise InvalidParameter(f"lora_path is {given!r:.80}, and there is no such adapter", field="lora_path")
    return path
