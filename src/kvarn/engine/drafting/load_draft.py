"""Drafts switched on for a decoder, and the draft model behind them: its memory, its vocabulary, its load."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvarn.backends.select import device_weights, make_backend, require_support
from kvarn.config import EngineConfig, speculation_methods
from kvarn.decoding.autoregressive import AutoregressiveDecoder
from kvarn.decoding.decoder import Decoder
from kvarn.decoding.speculation.draft_length import ByCost
from kvarn.decoding.speculation.model_drafts import ModelDrafts
from kvarn.decoding.speculation.speculation import Speculation
from kvarn.engine.drafting.draft_cache import cache_bytes, draft_layout
from kvarn.engine.drafting.draft_model import CachedDraftModel
from kvarn.engine.drafting.load_layer import layer_bytes, load_draft_layer, uses_draft_layer
from kvarn.errors import ConfigError
from kvarn.formats.open import open_weights
from kvarn.formats.weights import WeightSource
from kvarn.kv.cache import KVCache
from kvarn.machine import choose_threads
from kvarn.models.describe import Description, describe
from kvarn.models.memory_plan import held_bytes, scratch_bytes
from kvarn.models.recurrent import state_layers
from kvarn.models.spec import Autoregressive, ModelSpec

if TYPE_CHECKING:
    from kvarn.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("kvarn.engine")


def speculate(decoder: Decoder, kv: KVCache, words: Tokenizer, config: EngineConfig, description: Description) -> None:
    """Switch drafts on where they were asked for and can be rolled back."""
    methods = speculation_methods(config.speculation)
    if not methods:
        return
    reason = None
    if not isinstance(decoder, AutoregressiveDecoder):
        reason = "a diffusion model fills many positions a step anyway"
    elif kv.states is not None:
        reason = "the states of recurrent layers cannot be rolled back"
    elif decoder.backend.runs_ahead:
        reason = f"the {decoder.backend.name} backend computes ahead of what was chosen"
    if reason is not None:
        log.warning("speculation is off: %s", reason)
    elif isinstance(decoder, AutoregressiveDecoder):
        unused, vocab_size = decoder.unused, words.vocab_size
        decoder.speculation = speculation = Speculation(
            methods, ByCost(config.max_stretch), lambda token_id: token_id < vocab_size and token_id not in unused
        )
        if config.drafts_by_model:
            speculation.model_drafts = ModelDrafts(load_draft(config, words))
        elif uses_draft_layer(description, config):
            speculation.model_drafts = ModelDrafts(load_draft_layer(description, config, decoder.backend))
        elif "mtp" in config.speculation.split(","):
            log.warning("nothing is guessed by mtp: the model has no layer for it, or the backend cannot run it")


def draft_bytes(config: EngineConfig, description: Description) -> int:
    """The memory of what guesses beside a model, a draft model or a layer, with its cache; 0: there is none."""
    if not config.drafts_by_model:
        return layer_bytes(description, config)
    draft = _open(config)
    try:
        return held_bytes(draft.weights) + scratch_bytes(draft.spec) + cache_bytes(draft.spec, draft.config)
    finally:
        draft.source.close()


def load_draft(config: EngineConfig, words: Tokenizer) -> CachedDraftModel:
    """Load the draft model of a model with these tokens."""
    draft = _open(config)
    try:
        _check_vocabulary(draft, words)
        backend = make_backend(draft.config, config.threads or choose_threads().count)
        try:
            require_support(backend, draft.spec)
            backend.load(draft.spec, draft.weights)
            layout = draft_layout(draft.spec, draft.config)
            kv = KVCache(backend.reserve_kv(layout, cache_bytes(draft.spec, draft.config)), layout.block_size)
        except BaseException:
            backend.close()
            raise
    finally:
        draft.source.close()
    return CachedDraftModel(backend, kv, draft.spec.vocab_size, draft.spec.context_length)


@dataclass(frozen=True, slots=True)
class _OpenDraft:
    name: str
    spec: ModelSpec
    source: WeightSource
    weights: WeightSource  # as the backend holds them
    config: EngineConfig


def _open(config: EngineConfig) -> _OpenDraft:
    name = config.draft_model or ""
    source = open_weights(Path(name))
    try:
        description = describe(source)
        spec = description.spec
        if not isinstance(spec.generation, Autoregressive) or state_layers(spec):
            kind = "has recurrent layers" if state_layers(spec) else "does not write from left to right"
            raise ConfigError(f"draft_model is {name!r}, which {kind}; give a model whose cache can be rolled back")
        own = replace(config, tensor_parallel=1, pipeline_parallel=1, kv_dtype=None)
        return _OpenDraft(Path(name).name, spec, source, device_weights(spec, description.weights, own), own)
    except BaseException:
        source.close()
        raise


def _check_vocabulary(draft: _OpenDraft, words: Tokenizer) -> None:
    """Refuse a draft model for which the ids mean other tokens. Padding may differ."""
    from kvarn.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(draft.source)
    try:
        theirs = tokenizer.vocabulary.tokens[: draft.spec.vocab_size]
    finally:
        tokenizer.close()
    ours, unused = words.vocabulary.tokens, words.unused_ids
    pairs = enumerate(zip(ours, theirs, strict=False))
    wrong = [token_id for token_id, (mine, other) in pairs if mine != other and token_id not in unused]
    wrong += [token_id for token_id in range(len(theirs), len(ours)) if token_id not in unused]
    if wrong:
        first = wrong[0]
        other = repr(theirs[first])[:60] if first < len(theirs) else "nothing"
        raise ConfigError(
            f"draft_model {draft.name!r} has another vocabulary: {len(wrong):,} of {len(ours):,} tokens differ, first "
            f"token {first:,}, which is {repr(ours[first])[:60]} in the model and {other} in the draft model; "
            "give a smaller model of the same family"
        )
