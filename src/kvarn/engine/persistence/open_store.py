"""From settings to a prefix cache on disk: the folder, which models use it, and the identity of their blocks.

Whatever is in the way turns the cache off with one line in the log; the model serves without it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from kvarn.backends.protocol import BlockBytesBackend
from kvarn.backends.select import kv_dtype
from kvarn.config import EngineConfig
from kvarn.engine.engine import Engine
from kvarn.engine.persistence.disk_prefixes import Call, DiskPrefixes
from kvarn.models.spec import ModelSpec
from kvarn.prefix_store.failures import StoreUnavailable, log
from kvarn.prefix_store.folder import StoreFolder, open_folder
from kvarn.prefix_store.identity import BlockIdentity, WeightFiles
from kvarn.prefix_store.store import BlockStore


@dataclass(frozen=True, slots=True)
class PrefixFolder:
    """The folder for a model that is about to be loaded, and its files as they are before that."""

    folder: StoreFolder
    weights: WeightFiles

    @classmethod
    def of(cls, path: Path, config: EngineConfig) -> PrefixFolder | None:
        """None: nothing is kept. Call it before the weights are opened."""
        folder = config.prefix_cache_dir
        if folder is None or config.prefix_cache_bytes == 0 or not config.prefix_cache:
            return None
        try:
            weights = WeightFiles.of(path)
            return cls(open_folder(Path(folder).expanduser(), config.prefix_cache_bytes), weights)
        except (OSError, StoreUnavailable, RuntimeError) as error:  # RuntimeError: ~somebody
            log.warning("prefix cache on disk is off: %s", error)
            return None

    @property
    def hash_key(self) -> bytes:
        return self.folder.keys.hash_key

    def attach(self, engine: Engine, spec: ModelSpec) -> None:
        """Have an engine keep its prefixes: at once if the weights' hash is known, else as soon as it is."""
        if not engine.scheduler.prefix_reuse.finds_prefixes:
            return
        if (reason := _reason_against(engine)) is not None:
            log.warning("prefix cache on disk is off for %s: %s", spec.name, reason)
            return
        assert isinstance(engine.backend, BlockBytesBackend)
        disk = DiskPrefixes(engine.kv, engine.backend, self.folder)
        engine.scheduler.prefix_reuse.keep_on(disk)
        kernels = engine.backend.kernel_identity()  # now: the model may be unloaded before its weights are hashed
        args = (disk, spec, engine.config, kernels)
        if self.weights.is_hashed(self.folder):
            self._open(*args)
        else:
            threading.Thread(target=self._open, args=args, name="kvarn-prefix-hash", daemon=True).start()

    def _open(self, disk: DiskPrefixes, spec: ModelSpec, config: EngineConfig, kernels: str) -> None:
        try:
            identity = BlockIdentity(
                weights=self.weights.hash(self.folder),
                spec=repr(spec),
                kv_dtype=kv_dtype(config),
                block_size=disk.block_size,
                block_bytes=disk.block_bytes,
                kernels=kernels,
                weight_types=f"{config.encoder_weights} {config.gpu_weights}",
            )
            about = {"model": spec.name, "architecture": spec.architecture, "kv_dtype": identity.kv_dtype}
            disk.open(BlockStore(self.folder, identity.digest(), disk.block_bytes, about))
        except (OSError, StoreUnavailable) as error:
            log.warning("prefix cache on disk is off for %s: %s", spec.name, error)


def _reason_against(engine: Engine) -> str | None:
    if not isinstance(engine.backend, BlockBytesBackend):
        return f"the {engine.backend.name} backend keeps blocks in its own memory only"
    if len(engine.kv.groups) > 1:
        return "it has layers that keep a window, whose blocks stay in memory"
    if engine.kv.states is not None:
        return "it has recurrent layers, whose states stay in memory"
    return None


def start_disk(engine: Engine, call: Call) -> None:
    """Begin to write an engine's blocks, where they are kept; call: of the thread that owns it."""
    if (disk := engine.scheduler.prefix_reuse.disk) is not None:
        disk.start(call, lambda: engine.scheduler.num_running > 0)
