"""Engines over tiny models that denoise canvases of random tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.protocol import Backend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.config import EngineConfig
from kvarn.decoding.uniform.decoder import UniformDiffusionDecoder
from kvarn.diffusion import DiffusionParams
from kvarn.engine.admission import Admission
from kvarn.engine.engine import Engine
from kvarn.engine.stream import Stream
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.kv.cache import KVCache
from kvarn.models.describe import describe
from kvarn.models.spec import UniformDiffusion
from kvarn.types import SamplingParams
from tests.canvas_models import CONTEXT, VOCAB, canvas_gguf
from tests.diffusing import NoText
from tests.running import layout_of
from tests.torch_backend import torch_cpu

BACKENDS = ("reference", "native", "torch")


class CanvasModel:
    """One tiny model, from which engines of any shape are made."""

    def __init__(
        self, shape: int, folder: Path, type: TensorType = TensorType.F32, scale: float = 1.0, **metadata: Any
    ) -> None:
        self.path = canvas_gguf(shape, folder, type, scale, **metadata)
        self.spec = describe(open_weights(self.path)).spec
        self._ready: dict[str, Backend] = {}

    def engine(
        self,
        name: str = "reference",
        *,
        num_blocks: int = 64,
        eos_ids: tuple[int, ...] = (),
        backend: Backend | None = None,
        **options: Any,
    ) -> Engine:
        """options go to EngineConfig. Without a backend one is shared by all engines, which run one after the other."""
        backend, spec = backend or self.backend(name), self.spec
        assert isinstance(spec.generation, UniformDiffusion)
        layout = layout_of(spec, "f16" if name == "native" else "f32")
        kv = KVCache(backend.reserve_kv(layout, num_blocks * layout.block_bytes), layout.block_size)
        context = min(CONTEXT, kv.max_tokens)
        decoder = UniformDiffusionDecoder(backend, spec.generation, VOCAB, eos_ids, context=context)
        config = EngineConfig(block_size=layout.block_size, **options)
        admission = Admission(VOCAB, context, decoder, kv)
        return Engine(backend, decoder, kv, stream=Stream(NoText, eos_ids), admission=admission, config=config)

    def backend(self, name: str) -> Backend:
        if name not in self._ready:
            makers = {"reference": ReferenceBackend, "native": lambda: NativeBackend(1), "torch": torch_cpu}
            self._ready[name] = self.load(makers[name]())
        return self._ready[name]

    def load(self, backend: Backend) -> Backend:
        description = describe(open_weights(self.path))
        backend.load(description.spec, description.weights)
        return backend


def denoise(max_tokens: int = 20, *, sampling: dict[str, Any] | None = None, **options: Any) -> SamplingParams:
    """Parameters of a request; options go to DiffusionParams."""
    given = {"ignore_eos": True, "seed": 3} | (sampling or {})
    return SamplingParams(max_tokens=max_tokens, diffusion=DiffusionParams(**({"steps": 6} | options)), **given)
