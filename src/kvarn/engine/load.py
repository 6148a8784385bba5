"""From a file to a ready engine: describe, plan the memory, load weights and tokeniser side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from kvarn.backends.batch import KVLayout
from kvarn.backends.pooling import PooledLayers
from kvarn.backends.protocol import Backend
from kvarn.backends.select import (
    block_size,
    device_memory,
    device_share,
    device_weights,
    kv_dtype,
    make_backend,
    memory_remedies,
    require_support,
    window_step,
)
from kvarn.backends.unused_ids import UnusedIds
from kvarn.config import EngineConfig
from kvarn.decoding.autoregressive import AutoregressiveDecoder
from kvarn.decoding.decoder import Decoder
from kvarn.decoding.sampling_state import SamplingDefaults
from kvarn.engine.admission import Admission
from kvarn.engine.drafting.load_draft import draft_bytes, speculate
from kvarn.engine.engine import Engine
from kvarn.engine.stream import Stream
from kvarn.errors import ConfigError
from kvarn.formats.open import open_weights
from kvarn.formats.weights import WeightSource
from kvarn.kv.cache import KVCache
from kvarn.kv.group import WindowShape
from kvarn.kv.journal import PrefixJournal
from kvarn.kv.table import blocks_for
from kvarn.machine import choose_threads, release_free_memory
from kvarn.models.cache_cost import CacheCost, windowed_layers
from kvarn.models.describe import Description, describe
from kvarn.models.diffusion.uniform import UniformDiffusion
from kvarn.models.encoders.text_prompts import TextPrompts
from kvarn.models.memory_plan import MemoryPlan, plan_memory
from kvarn.models.recurrent import attentions, kv_layers, latent_layers, state_layers
from kvarn.models.sampling_defaults import DIFFUSION_DEFAULTS
from kvarn.models.spec import MaskedDiffusion, ModelSpec
from kvarn.routing.cluster_key import ClusterKey

if TYPE_CHECKING:
    from kvarn.engine.persistence.open_store import PrefixFolder
    from kvarn.engine.process.process_model import ProcessModel
    from kvarn.tokenizer.tokenizer import Tokenizer

OnLoad = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything a caller needs to run one model."""

    spec: ModelSpec
    tokenizer: Tokenizer
    backend: Backend
    engine: Engine
    memory: MemoryPlan
    pooled_layers: PooledLayers
    text_prompts: TextPrompts

    def close(self) -> None:
        if (disk := self.engine.scheduler.prefix_reuse.disk) is not None:
            disk.close()
        if (speculation := self.engine.decoder.speculation) is not None:
            speculation.close()
        self.backend.close()
        self.tokenizer.close()


def load_engine(path: Path, config: EngineConfig, progress: OnLoad | None = None) -> LoadedModel | ProcessModel:
    """Load a local file or folder; its engine runs here, or in a process of its own where the settings say so."""
    if not config.own_process:
        return load_model(path, config, progress)
    from kvarn.engine.process.process_model import load_in_process

    return load_in_process(path, config, progress)


def load_model(path: Path, config: EngineConfig, progress: OnLoad | None = None) -> LoadedModel:
    """Load a local file or folder; whatever was opened is closed again when something fails."""
    try:
        prefixes = None if config.prefix_cache_dir is None else _prefix_folder(path, config)
        return _load_open(open_weights(path), config, progress, prefixes)
    except BaseException as error:
        _forget_locals(error)
        raise
    finally:
        release_free_memory()


def _prefix_folder(path: Path, config: EngineConfig) -> PrefixFolder | None:
    from kvarn.engine.persistence.open_store import PrefixFolder

    return PrefixFolder.of(path, config)


def _load_open(
    source: WeightSource, config: EngineConfig, progress: OnLoad | None, prefixes: PrefixFolder | None
) -> LoadedModel:
    try:
        model = _load(source, config, progress, _hash_key(config, prefixes))
        if prefixes is not None:
            prefixes.attach(model.engine, model.spec)
        return model
    finally:
        source.close()


def _hash_key(config: EngineConfig, prefixes: PrefixFolder | None) -> bytes | None:
    """What block digests are keyed with: the cluster's secret, else that of the folder; None: drawn by the cache."""
    if config.cluster_key is not None:
        return ClusterKey.read(Path(config.cluster_key)).derive("blocks")
    return None if prefixes is None else prefixes.hash_key


def _load(source: WeightSource, config: EngineConfig, progress: OnLoad | None, hash_key: bytes | None) -> LoadedModel:
    description = describe(source, config.context)
    spec = description.spec
    weights = device_weights(spec, description.weights, config)
    share, held = device_share(spec, weights, config)
    memory = _plan(share, held, config, draft_bytes(config, description))
    backend = make_backend(config, config.threads or choose_threads().count)
    try:
        require_support(backend, spec)
        with ThreadPoolExecutor(1, thread_name_prefix="kvarn-tokenizer") as pool:
            # The native load lets go of the interpreter, so the tokeniser is built meanwhile, and no sooner: what
            # comes before is Python's, and would wait for it.
            tokenizer = pool.submit(_load_tokenizer, source)
            backend.load(spec, weights, progress)
        kv = _reserve(backend, share, memory, config, hash_key)
        if kv.states is not None:
            config = replace(config, max_running=min(config.max_running, kv.states.max_sequences - 1))
        context = min(memory.context, kv.max_tokens)
        words = tokenizer.result().fitted(spec.vocab_size)
        decoder = make_decoder(backend, spec, words, description.recommended, context)
        speculate(decoder, kv, words, config, description)
        engine = Engine(
            backend,
            decoder,
            kv,
            stream=text_stream(words),
            admission=Admission(spec.vocab_size, context, decoder, kv),
            config=config,
            publishes=all(attention.mask != "bidirectional" for attention in attentions(spec)),
        )
        return LoadedModel(spec, words, backend, engine, memory, *encoder_parts(description))
    except BaseException:
        backend.close()
        raise


def _plan(share: ModelSpec, held: WeightSource, config: EngineConfig, beside_bytes: int) -> MemoryPlan:
    return plan_memory(
        share,
        held,
        config.context,
        config.kv_bytes,
        device_memory(config),
        kv_dtype=kv_dtype(config),
        max_running=config.max_running,
        window_step=window_step(config),
        step_rows=config.max_batch_tokens,
        remedies=memory_remedies(config),
        draft_bytes=beside_bytes,
        lora_bytes=config.lora_bytes or 0,
    )


def encoder_parts(description: Description) -> tuple[PooledLayers, TextPrompts]:
    return PooledLayers.read(description.spec, description.weights), TextPrompts.read(description.weights)


def make_decoder(
    backend: Backend, spec: ModelSpec, words: Tokenizer, recommended: Mapping[str, Any], context: int
) -> Decoder:
    """The way of generating that the model was trained for."""
    if isinstance(spec.generation, MaskedDiffusion):
        from kvarn.decoding.diffusion import DiffusionDecoder

        defaults = SamplingDefaults(**{**DIFFUSION_DEFAULTS, **recommended})
        diffusion = DiffusionDecoder(
            backend, spec.generation, spec.vocab_size, words.eos_ids, defaults=defaults, context=context
        )
        # A mask token need not be in the tokenizer's table; prompts may hold it, and it is never chosen anyway.
        diffusion.unused = UnusedIds.of(spec.vocab_size, words.unused_ids - {spec.generation.mask_id})
        return diffusion
    if isinstance(spec.generation, UniformDiffusion):
        from kvarn.decoding.uniform.decoder import UniformDiffusionDecoder

        if context <= spec.generation.canvas:
            raise ConfigError(
                f"the context has room for {context:,} tokens, and this model denoises canvases of "
                f"{spec.generation.canvas:,} tokens behind a prompt; give it a larger context, or more memory"
            )
        denoiser = UniformDiffusionDecoder(backend, spec.generation, spec.vocab_size, words.eos_ids, context=context)
        denoiser.unused = UnusedIds.of(spec.vocab_size, words.unused_ids)
        return denoiser
    encode = partial(words.encode, add_special=False)
    decoder = AutoregressiveDecoder(backend, spec.vocab_size, words.eos_ids, SamplingDefaults(**recommended), encode)
    decoder.unused = UnusedIds.of(spec.vocab_size, words.unused_ids)
    return decoder


def text_stream(tokenizer: Tokenizer) -> Stream:
    """A Stream that reads text with the model's tokeniser."""
    from kvarn.tokenizer.incremental import IncrementalDecoder

    def make_decoder(starts_text: bool, visible_ids: frozenset[int]) -> IncrementalDecoder:
        return IncrementalDecoder(tokenizer, at_start=starts_text, visible_ids=visible_ids)

    return Stream(make_decoder, tokenizer.eos_ids)


def _load_tokenizer(source: WeightSource) -> Tokenizer:
    from kvarn.tokenizer import load_tokenizer

    return load_tokenizer(source)


def _forget_locals(error: BaseException | None) -> None:
    """Free what the functions that failed had built: a caller that keeps the error keeps no vocabulary with it."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__


def _reserve(
    backend: Backend, spec: ModelSpec, memory: MemoryPlan, config: EngineConfig, hash_key: bytes | None
) -> KVCache:
    size = _block_size(spec, config)
    num_tokens, window_tokens = memory.cost.split(memory.kv_bytes, memory.context)
    window = _window_shape(memory.cost, (num_tokens, window_tokens), size, config.max_batch_tokens)
    layout = KVLayout(
        size,
        kv_layers(spec),
        kv_dtype(config),
        state_layers(spec),
        memory.num_states,
        latent_layers(spec),
        () if window is None else windowed_layers(spec),
        0 if window is None else window.num_blocks,
    )
    num_blocks = backend.reserve_kv(layout, blocks_for(num_tokens, size) * layout.block_bytes)
    kv = KVCache(num_blocks, size, hash_key=hash_key, num_states=memory.num_states, window=window)
    kv.journal = None if config.cluster_key is None else PrefixJournal()
    return kv


def _window_shape(cost: CacheCost, num_tokens: tuple[int, int], size: int, step_tokens: int) -> WindowShape | None:
    """Blocks for so many tokens in windows, the second number; whatever their size, one request alone must run."""
    if not cost.has_windows:
        return None
    least = blocks_for(cost.window + step_tokens, size) + 3  # cut at both ends, and a copy of the last
    full, windows = (blocks_for(count, size) for count in num_tokens)
    return WindowShape(cost.window, max(windows, min(full, least)), step_tokens)


def _block_size(spec: ModelSpec, config: EngineConfig) -> int:
    """Tokens per KV block: whole blocks of the mask, so that no K and V depend on tokens of a later one."""
    return math.lcm(block_size(config), *(attention.mask_block or 1 for attention in attentions(spec)))
