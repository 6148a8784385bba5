"""Kvarn: one small engine for language models on the machine you have.

The public surface; everything is imported when first used, so `import kvarn` stays instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarn.adapters.pool import LoadedLora
    from kvarn.async_llm import AsyncEventStream, AsyncLLM
    from kvarn.citations.types import Citation, CitedPassage, SentenceSupport
    from kvarn.config import EngineConfig
    from kvarn.diffusion import CanvasView, DiffusionParams, SparseConfig
    from kvarn.engine.client import EventStream
    from kvarn.engine.handle import RequestHandle
    from kvarn.engine.stats import EngineStats
    from kvarn.errors import (
        BackendError,
        Cancelled,
        CapacityError,
        CollectionNotFound,
        ConfigError,
        ConstraintError,
        DeadlineExceeded,
        DocumentError,
        DoesNotFit,
        DownloadError,
        FormatError,
        InvalidParameter,
        KvarnError,
        ModelError,
        ModelNotFound,
        PromptTooLong,
        RequestError,
        RetrievalError,
        StorageError,
        TemplateError,
        UnsupportedModel,
    )
    from kvarn.evaluation.evaluate import EvaluationOptions, evaluate
    from kvarn.evaluation.report import Divergence, EvaluationReport
    from kvarn.fill.layout import Filled
    from kvarn.fill.template import Slot
    from kvarn.llm import LLM
    from kvarn.pruning.options import PruneOptions, PruneTarget
    from kvarn.pruning.prune import prune
    from kvarn.pruning.report import PruningReport
    from kvarn.quantization.allocation.allocate import SizeTarget
    from kvarn.quantization.collect import ImatrixOptions, collect_imatrix
    from kvarn.quantization.quantize import QuantizeOptions, quantize
    from kvarn.quantization.report import QuantizationReport
    from kvarn.request import RequestState
    from kvarn.reranking.rank import RankedDocument
    from kvarn.retrieval.collection import Collection
    from kvarn.retrieval.types import Document, Hit, Tuning
    from kvarn.sampling.custom_samplers import register_sampler
    from kvarn.structured.constraints import Grammar, JsonSchema, Regex
    from kvarn.types import Completion, FinishReason, SamplingParams, Timings, TokenEvent, TokenLogprob, Usage

_HOMES = {
    "AsyncEventStream": "kvarn.async_llm",
    "AsyncLLM": "kvarn.async_llm",
    "EventStream": "kvarn.engine.client",
    "RequestHandle": "kvarn.engine.handle",
    "RequestState": "kvarn.request",
    "Collection": "kvarn.retrieval.collection",
    "RankedDocument": "kvarn.reranking.rank",
    "Document": "kvarn.retrieval.types",
    "Hit": "kvarn.retrieval.types",
    "Tuning": "kvarn.retrieval.types",
    "LLM": "kvarn.llm",
    "LoadedLora": "kvarn.adapters.pool",
    "Divergence": "kvarn.evaluation.report",
    "EvaluationOptions": "kvarn.evaluation.evaluate",
    "EvaluationReport": "kvarn.evaluation.report",
    "evaluate": "kvarn.evaluation.evaluate",
    "PruneOptions": "kvarn.pruning.options",
    "PruneTarget": "kvarn.pruning.options",
    "PruningReport": "kvarn.pruning.report",
    "prune": "kvarn.pruning.prune",
    "ImatrixOptions": "kvarn.quantization.collect",
    "QuantizationReport": "kvarn.quantization.report",
    "QuantizeOptions": "kvarn.quantization.quantize",
    "SizeTarget": "kvarn.quantization.allocation.allocate",
    "collect_imatrix": "kvarn.quantization.collect",
    "quantize": "kvarn.quantization.quantize",
    "Filled": "kvarn.fill.layout",
    "Slot": "kvarn.fill.template",
    "EngineConfig": "kvarn.config",
    "Grammar": "kvarn.structured.constraints",
    "JsonSchema": "kvarn.structured.constraints",
    "Regex": "kvarn.structured.constraints",
    "CanvasView": "kvarn.diffusion",
    "DiffusionParams": "kvarn.diffusion",
    "SparseConfig": "kvarn.diffusion",
    "EngineStats": "kvarn.engine.stats",
    "register_sampler": "kvarn.sampling.custom_samplers",
    "Citation": "kvarn.citations.types",
    "CitedPassage": "kvarn.citations.types",
    "SentenceSupport": "kvarn.citations.types",
    "Completion": "kvarn.types",
    "FinishReason": "kvarn.types",
    "SamplingParams": "kvarn.types",
    "Timings": "kvarn.types",
    "TokenEvent": "kvarn.types",
    "TokenLogprob": "kvarn.types",
    "Usage": "kvarn.types",
}  # everything else of __all__ is an error

__all__ = [  # noqa: RUF022 - plain alphabetical order
    "AsyncEventStream",
    "AsyncLLM",
    "BackendError",
    "Cancelled",
    "CanvasView",
    "CapacityError",
    "Citation",
    "CitedPassage",
    "Collection",
    "CollectionNotFound",
    "Completion",
    "ConfigError",
    "ConstraintError",
    "DeadlineExceeded",
    "DiffusionParams",
    "Divergence",
    "Document",
    "DocumentError",
    "DoesNotFit",
    "DownloadError",
    "EngineConfig",
    "EngineStats",
    "EvaluationOptions",
    "EvaluationReport",
    "EventStream",
    "Filled",
    "FinishReason",
    "FormatError",
    "Grammar",
    "Hit",
    "ImatrixOptions",
    "InvalidParameter",
    "JsonSchema",
    "KvarnError",
    "LLM",
    "LoadedLora",
    "ModelError",
    "ModelNotFound",
    "PromptTooLong",
    "PruneOptions",
    "PruneTarget",
    "PruningReport",
    "QuantizationReport",
    "QuantizeOptions",
    "RankedDocument",
    "Regex",
    "RequestError",
    "RequestHandle",
    "RequestState",
    "RetrievalError",
    "SamplingParams",
    "SentenceSupport",
    "SizeTarget",
    "Slot",
    "SparseConfig",
    "StorageError",
    "TemplateError",
    "Timings",
    "TokenEvent",
    "TokenLogprob",
    "Tuning",
    "UnsupportedModel",
    "Usage",
    "__version__",
    "collect_imatrix",
    "evaluate",
    "prune",
    "quantize",
    "register_sampler",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in __all__:
        raise AttributeError(f"module 'kvarn' has no attribute {name!r}")
    from kvarn.config import shorten_blas_waits

    shorten_blas_waits()
    return getattr(import_module(_HOMES.get(name, "kvarn.errors")), name)


def __dir__() -> list[str]:
    return list(__all__)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvarn")
    except PackageNotFoundError:  # run from a source tree
        return "0+unknown"
