"""Flags that say who embeds: this process, several of them, or a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvarn.errors import ConfigError

if TYPE_CHECKING:
    from kvarn.retrieval.embedder_pool import EmbedderPool


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """This process alone unless they say otherwise."""

    workers: Annotated[
        int, typer.Option(min=1, max=256, help="Embed with so many processes; the index is the same.")
    ] = 1
    ray: Annotated[
        str | None, typer.Option(metavar="auto|local|HOST:PORT", help="They are actors on this Ray cluster.")
    ] = None

    def embedder(self, model: str | None) -> str | EmbedderPool | None:
        """The model by name, or loaded by several processes; None: the collection's own, which only this one loads."""
        from kvarn.retrieval.embedder import DEFAULT_EMBEDDER

        if self == WorkerOptions():
            return model
        model = model or DEFAULT_EMBEDDER
        if self.ray is not None:
            from kvarn.server.ray.settings import ray_needed

            with ray_needed():
                from kvarn.server.ray.embedding import actor_pool

            return actor_pool(model, self.workers, self.ray)
        from kvarn.retrieval.embedder_pool import process_pool

        return process_pool(model, self.workers)

    def refuse(self) -> None:
        """Refuse them where a server embeds."""
        if self != WorkerOptions():
            raise ConfigError("--workers and --ray are for embedding here; with --url the server embeds")
