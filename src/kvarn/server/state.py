"""The parts of one server, made once by serve.py. Owns nothing itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvarn.observe.metrics import Metrics
    from kvarn.server.access.keys import KeyRing
    from kvarn.server.access.limits import RateLimits
    from kvarn.server.api.responses.response_store import ResponseStore
    from kvarn.server.batches.jobs import BatchJobs
    from kvarn.server.chat.generation import Generations
    from kvarn.server.collections.collection_pool import CollectionPool
    from kvarn.server.collections.document_reader import DocumentReader
    from kvarn.server.collections.prefix_warmup import PrefixWarmup
    from kvarn.server.collections.storage_quota import StorageQuota
    from kvarn.server.http.traffic import Traffic
    from kvarn.server.live.sampler import LiveSampler
    from kvarn.server.models.model_pool import ModelPool
    from kvarn.server.process.lifecycle import Lifecycle
    from kvarn.server.process.settings import ServerConfig
    from kvarn.server.process.worker_threads import WorkerThreads


@dataclass(frozen=True, slots=True)
class ServerState:
    """Kept as app.state.kvarn; dependencies.py hands its parts to the routes."""

    config: ServerConfig
    models: ModelPool
    collections: CollectionPool
    keys: KeyRing
    limits: RateLimits
    metrics: Metrics
    lifecycle: Lifecycle
    generations: Generations
    prefix_warmup: PrefixWarmup
    traffic: Traffic
    document_reader: DocumentReader
    storage: StorageQuota
    workers: WorkerThreads
    request_threads: WorkerThreads  # encode prompts and write answers
    body_thread: WorkerThreads  # checks large bodies
    responses: ResponseStore
    live: LiveSampler
    batches: BatchJobs
