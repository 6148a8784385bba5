"""Embedding as a job on a Ray cluster: an actor with the model on each of some CPUs, texts in, vectors out.

The process that asks reads the files and stores the vectors; nodes need neither the files nor the storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from kvarn.errors import BackendError
from kvarn.llm import LLM
from kvarn.retrieval.embedder import ModelEmbedder, Role, embed_as
from kvarn.retrieval.embedder_pool import EmbedderPool
from kvarn.retrieval.types import Float32
from kvarn.server.ray.deploy import connect


class EmbedActor:
    """A loaded model on some node."""

    def __init__(self, model: str) -> None:
        self._embedder = ModelEmbedder(LLM(model, threads=1))

    def embed(self, texts: list[str], role: Role | None) -> Float32:
        return embed_as(self._embedder, texts, role)


class ActorWorker:
    """One actor of one CPU, as an EmbedWorker."""

    def __init__(self, model: str) -> None:
        self._actor: Any = ray.remote(num_cpus=1)(EmbedActor).remote(model)

    def embed(self, texts: Sequence[str]) -> Float32:
        return self._embed(texts, None)

    def embed_as(self, texts: Sequence[str], role: Role) -> Float32:
        return self._embed(texts, role)

    def _embed(self, texts: Sequence[str], role: Role | None) -> Float32:
        try:
            vectors: Float32 = ray.get(self._actor.embed.remote(list(texts), role))
        except RayActorError as error:
            raise BackendError(f"an embedding actor is lost: {str(error).splitlines()[0]:.200}") from None
        return vectors

    def close(self) -> None:
        ray.kill(self._actor)


class RayPool(EmbedderPool):
    """A pool that leaves the cluster when it is closed."""

    def close(self) -> None:
        super().close()
        ray.shutdown()


def actor_pool(model: str, num_workers: int, address: str) -> RayPool:
    """An embedder of so many actors; each waits until the cluster has a CPU for it."""
    connect(address)
    return RayPool(ModelEmbedder(model), [ActorWorker(model) for _ in range(num_workers)])
