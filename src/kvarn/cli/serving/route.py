"""`kvarn route`: flags become a RouterConfig; the router does the rest."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvarn.server.router.process import RouterConfig


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """Flags of the router."""

    cluster_key: Annotated[
        Path, typer.Option(readable=False, help="File of the secret that replicas and routers share.")
    ]
    replica: Annotated[
        list[str] | None,
        typer.Option("--replica", metavar="URL", help="A `kvarn serve --cluster-key`; repeat for each."),
    ] = None
    discover: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Instead: each address that this host has, such as a headless service's."),
    ] = None
    max_replicas: Annotated[int, typer.Option(help="That may be discovered.")] = 64
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8080
    uds: Annotated[Path | None, typer.Option(readable=False, help="Listen on this Unix socket instead.")] = None
    tls_cert: Annotated[Path | None, typer.Option(readable=False, help="PEM file: speak TLS.")] = None
    tls_key: Annotated[Path | None, typer.Option(readable=False, help="PEM file of its key.")] = None
    policy: Annotated[str, typer.Option(metavar="prefix|least_loaded|round_robin", help="How a replica is chosen.")] = (
        "prefix"
    )
    drain_delay: Annotated[
        float, typer.Option(metavar="S", help="After SIGTERM, still take requests for so many seconds.")
    ] = 5.0
    drain_timeout: Annotated[float, typer.Option(metavar="S", help="Then let what runs go on for so many.")] = 60.0
    open_metrics: Annotated[bool, typer.Option("--open-metrics", help="Tell /metrics to other machines, too.")] = False

    def config(self) -> RouterConfig:
        """Checked settings."""
        from kvarn.server.process.settings import ServerConfig
        from kvarn.server.router.process import RouterConfig

        http = ServerConfig(
            host=self.host,
            port=self.port,
            uds=self.uds,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            insecure=True,  # replicas know the keys
            drain_delay_s=self.drain_delay,
            drain_timeout_s=self.drain_timeout,
        )
        return RouterConfig(
            tuple(self.replica or ()),
            self.cluster_key,
            http,
            policy=self.policy,
            has_open_metrics=self.open_metrics,
            discover=self.discover,
            max_replicas=self.max_replicas,
        )


def route(*, options: RouteOptions) -> None:
    """Offer several servers as one: each request goes where most of its prompt is cached, unless that one is busy.

    API keys pass through: the replicas know them. Logs are JSON on stderr.

    Try: openssl rand -hex 32 > cluster.key; kvarn serve --port 8001 --cluster-key cluster.key (and 8002), then
    kvarn route --replica http://127.0.0.1:8001 --replica http://127.0.0.1:8002 --cluster-key cluster.key
    """
    from kvarn.server.router.process import route as run_router

    code = run_router(options.config())
    sys.stdout.flush()
    os._exit(code)  # threads that look names up cannot be interrupted
