"""The parts of one server, made once by serve.py. Owns nothing itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvarn.observe.metrics import Metrics
    from kvarn.server.access.keys import KeyRing
    from kvarn.server.access.reservation import KeyLimits
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
    from kvarn.server.models.pulls import Pulls
    from kvarn.server.process.lifecycle import Lifecycle
    from kvarn.server.process.settings import ServerConfig
    from kvarn.server.process.worker_threads import WorkerThreads
    from kvarn.server.replica.publisher import ReplicaPublisher


@dataclass(frozen=True, slots=True)
class ServerState:
    """Kept as app.state.kvarn; dependencies.py hands its parts to the routes."""

    config: ServerConfig
    models: ModelPool
    pulls: Pulls
    collections: CollectionPool
    keys: KeyRing
    limits: KeyLimits
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
    replica: ReplicaPublisher  # to routers of the cluster, if this server belongs to one

    @property
    def closing_parts(self) -> tuple[ClosingPart, ...]:
        """What has files or threads of its own, in the order in which it is closed."""
        storing = (self.prefix_warmup, self.collections, self.pulls, self.models, self.responses)
        return (self.batches, self.limits, *storing)


class ClosingPart(Protocol):
    """A part of the server that is closed at its end."""

    async def close(self) -> None: ...
