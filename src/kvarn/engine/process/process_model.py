"""A model whose engine is loaded in a process of its own: here are its tokenizer, its description and its bounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvarn.backends.pooling import PooledLayers
from kvarn.backends.protocol import Backend
from kvarn.config import EngineConfig
from kvarn.engine.admission import Admission
from kvarn.engine.load import OnLoad, encoder_parts, make_decoder, text_stream
from kvarn.engine.process.child import EngineChild, current_log_level
from kvarn.engine.process.early import take_child
from kvarn.engine.process.messages import Ready, Start
from kvarn.engine.process.remote_engine import RemoteEngine
from kvarn.formats.open import open_weights
from kvarn.kv.cache import KVCache
from kvarn.machine import release_free_memory
from kvarn.models.describe import Description, describe
from kvarn.models.encoders.text_prompts import TextPrompts
from kvarn.models.memory_plan import MemoryPlan
from kvarn.models.spec import ModelSpec

if TYPE_CHECKING:
    from kvarn.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RemoteBackend:
    """The names of a backend in another process."""

    name: str
    isa: str


@dataclass(frozen=True, slots=True)
class ProcessModel:
    """A LoadedModel, as far as it is here."""

    spec: ModelSpec
    tokenizer: Tokenizer
    backend: RemoteBackend
    engine: RemoteEngine
    memory: MemoryPlan
    pooled_layers: PooledLayers
    text_prompts: TextPrompts

    def close(self) -> None:
        self.tokenizer.close()


def load_in_process(path: Path, config: EngineConfig, progress: OnLoad | None = None) -> ProcessModel:
    """Load a model in a new process; what is needed here of it is read meanwhile."""
    child = take_child()
    try:
        child.start(Start(path, config, current_log_level()))
        with ThreadPoolExecutor(1, thread_name_prefix="kvarn-tokenizer") as pool:
            described = pool.submit(_describe, path, config)
            facts = child.until_ready(progress)
            return _joined(child, facts, described.result())
    except BaseException:
        child.kill()
        raise
    finally:
        release_free_memory()


@dataclass(frozen=True, slots=True)
class _Read:
    """What is read of the files here."""

    description: Description
    tokenizer: Tokenizer
    pooled_layers: PooledLayers
    text_prompts: TextPrompts


def _describe(path: Path, config: EngineConfig) -> _Read:
    from kvarn.tokenizer import load_tokenizer

    source = open_weights(path)
    try:
        description = describe(source, config.context)
        tokenizer = load_tokenizer(source).fitted(description.spec.vocab_size)
        return _Read(description, tokenizer, *encoder_parts(description))
    finally:
        source.close()


def _joined(child: EngineChild, facts: Ready, read: _Read) -> ProcessModel:
    spec, words = read.description.spec, read.tokenizer
    backend = RemoteBackend(facts.backend, facts.isa)
    # A decoder computes with its backend; here it only knows bounds.
    decoder = make_decoder(cast(Backend, backend), spec, words, read.description.recommended, facts.context)
    kv = KVCache(facts.num_blocks, facts.block_size, num_states=facts.memory.num_states)
    engine = RemoteEngine(child, facts, Admission(spec.vocab_size, facts.context, decoder, kv), text_stream(words))
    return ProcessModel(spec, words, backend, engine, facts.memory, read.pooled_layers, read.text_prompts)
