"""The layer of a model's own file that guesses, loaded beside the model: when it is used, its memory, its cache."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from kvarn.backends.protocol import Backend, JoiningBackend
from kvarn.backends.select import make_backend
from kvarn.config import TORCH_BACKENDS, EngineConfig, speculation_methods
from kvarn.engine.drafting.draft_cache import CACHE_TOKENS, cache_bytes, draft_layout
from kvarn.engine.drafting.draft_layer import CachedDraftLayer
from kvarn.kv.cache import KVCache
from kvarn.machine import choose_threads
from kvarn.models.memory_plan import held_bytes, scratch_bytes
from kvarn.models.recurrent import state_layers
from kvarn.models.spec import Autoregressive

if TYPE_CHECKING:
    from kvarn.models.describe import Description

log = logging.getLogger("kvarn.engine")


def uses_draft_layer(description: Description, config: EngineConfig) -> bool:
    """Whether a model's own layer guesses: it is asked for, it is there, and no draft model guesses instead."""
    if "mtp" not in speculation_methods(config.speculation) or config.drafts_by_model:
        return False
    is_written = isinstance(description.spec.generation, Autoregressive) and not state_layers(description.spec)
    return is_written and description.draft is not None and config.backend not in TORCH_BACKENDS


def layer_bytes(description: Description, config: EngineConfig) -> int:
    """The memory of the layer with its cache; 0: it is not used."""
    if not uses_draft_layer(description, config) or description.draft is None:
        return 0
    spec, weights = description.draft.spec, description.draft.weights
    return held_bytes(weights) + scratch_bytes(spec) + cache_bytes(spec, _own(config))


def load_draft_layer(description: Description, config: EngineConfig, model: Backend) -> CachedDraftLayer:
    """Load the layer that reads this model's states."""
    assert description.draft is not None
    spec, own = description.draft.spec, _own(config)
    layer = make_backend(own, config.threads or choose_threads().count)
    try:
        layer.load(spec, description.draft.weights)
        layout = draft_layout(spec, own)
        kv = KVCache(layer.reserve_kv(layout, cache_bytes(spec, own)), layout.block_size)
    except BaseException:
        layer.close()
        raise
    log.info("a layer of the model guesses further tokens, with a cache of %s tokens", f"{CACHE_TOKENS:,}")
    return CachedDraftLayer(cast(JoiningBackend, layer), cast(JoiningBackend, model), kv, spec.context_length)


def _own(config: EngineConfig) -> EngineConfig:
    return replace(config, kv_dtype=None)
