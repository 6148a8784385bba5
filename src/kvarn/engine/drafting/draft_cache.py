"""The KV cache of what guesses beside a model: of a fixed number of tokens, all requests together."""

from __future__ import annotations

from kvarn.backends.batch import KVLayout
from kvarn.backends.select import block_size, kv_dtype
from kvarn.config import EngineConfig
from kvarn.kv.table import blocks_for
from kvarn.models.recurrent import kv_layers, latent_layers
from kvarn.models.spec import ModelSpec

CACHE_TOKENS = 16_384  # of all requests that are followed; no guesses for those beyond


def draft_layout(spec: ModelSpec, config: EngineConfig) -> KVLayout:
    return KVLayout(block_size(config), kv_layers(spec), kv_dtype(config), latent=latent_layers(spec))


def cache_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """Of no more tokens than the engine's requests can have."""
    num_tokens = min(CACHE_TOKENS, config.max_running * (config.context or CACHE_TOKENS))
    layout = draft_layout(spec, config)
    return blocks_for(num_tokens, layout.block_size) * layout.block_bytes
