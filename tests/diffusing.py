"""Engines over tiny random diffusion models, and a model of that kind that can be talked to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.protocol import Backend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.config import EngineConfig
from kvarn.decoding.diffusion import DiffusionDecoder
from kvarn.decoding.sampling_state import SamplingDefaults
from kvarn.diffusion import DiffusionParams
from kvarn.engine.admission import Admission
from kvarn.engine.engine import Engine
from kvarn.engine.stream import Stream
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.kv.cache import KVCache
from kvarn.models.describe import describe
from kvarn.models.spec import MaskedDiffusion
from kvarn.request import Request
from kvarn.types import Completion, SamplingParams, TokenEvent
from tests.chat_model import chat_metadata, write_chat_model
from tests.diffusion_models import tiny_diffusion
from tests.running import layout_of
from tests.submitting import submit
from tests.tiny_models import VOCAB

CONTEXT = 128


class NoText:
    """Tiny models have no tokeniser."""

    def __init__(self, _starts_text: bool, _visible_ids: frozenset[int]) -> None: ...

    def push(self, token_id: int) -> str:
        return ""

    def push_all(self, token_ids: Iterable[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class DiffusionModel:
    """One tiny model, from which engines of any shape are made."""

    def __init__(self, arch: str, folder: Path, type: TensorType = TensorType.F32, **changes: Any) -> None:
        self.path = tiny_diffusion(arch, folder, "gguf", type=type, **changes)
        self._ready: dict[bool, Backend] = {}

    def engine(
        self,
        *,
        is_native: bool = False,
        num_blocks: int = 64,
        eos_ids: tuple[int, ...] = (),
        backend: Backend | None = None,
        kv_dtype: str | None = None,
        **options: Any,
    ) -> Engine:
        """options go to EngineConfig. Without a backend one is shared by all engines, which run one after the other."""
        backend = backend or self.backend(is_native)
        spec = describe(open_weights(self.path)).spec
        assert isinstance(spec.generation, MaskedDiffusion)
        layout = layout_of(spec, kv_dtype or ("f16" if is_native else "f32"))
        kv = KVCache(backend.reserve_kv(layout, num_blocks * layout.block_bytes), layout.block_size)
        context = min(CONTEXT, kv.max_tokens)
        decoder = DiffusionDecoder(
            backend, spec.generation, VOCAB, eos_ids, defaults=SamplingDefaults(temperature=0.0), context=context
        )
        admission = Admission(VOCAB, context, decoder, kv)
        is_block = spec.generation.block is not None
        config = EngineConfig(block_size=layout.block_size, **options)
        stream = Stream(NoText, eos_ids)
        return Engine(backend, decoder, kv, stream=stream, admission=admission, config=config, publishes=is_block)

    def backend(self, is_native: bool = False) -> Backend:
        if is_native not in self._ready:
            self._ready[is_native] = self.load(NativeBackend(1) if is_native else ReferenceBackend())
        return self._ready[is_native]

    def load(self, backend: Backend) -> Backend:
        description = describe(open_weights(self.path))
        backend.load(description.spec, description.weights)
        return backend


def denoise(max_tokens: int = 12, *, sampling: dict[str, Any] | None = None, **options: Any) -> SamplingParams:
    """Parameters of a request; options go to DiffusionParams."""
    given = {"temperature": 0.0, "ignore_eos": True, "seed": 3} | (sampling or {})
    return SamplingParams(max_tokens=max_tokens, diffusion=DiffusionParams(**options), **given)


def run(engine: Engine, requests: Sequence[Request], events: list[TokenEvent] | None = None) -> list[Completion]:
    """Step to the end, checking the cache; the completions of these requests, in order."""
    found = {}
    while engine.has_work:
        for event in engine.step():
            if events is not None:
                events.append(event)
            if event.completion is not None:
                found[event.request_id] = event.completion
        engine.kv.check()
    for request in requests:
        if request.error is not None:
            raise request.error
    return [found[request.id] for request in requests]


def answer(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    """The tokens one request gets alone."""
    return run(engine, [submit(engine, prompt, params)])[0].token_ids


def write_talking_model(path: Path) -> Path:
    """A tiny diffusion model with a byte tokeniser and a chat template; token 257 is its mask."""
    renamed = {key.replace("llama.", "llada."): value for key, value in chat_metadata().items()}
    dropped = dict.fromkeys(key for key in chat_metadata() if key.startswith("llama."))
    ours = {"general.architecture": "llada", "tokenizer.ggml.mask_token_id": 257, "diffusion.shift_logits": False}
    return write_chat_model(path, **dropped | renamed | ours | {"llada.attention.causal": False})
