"""`kvarn deploy ray`: flags become a RayConfig; Ray Serve does the rest."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvarn.cli.serving.serve import ServeOptions
from kvarn.cli.terminal.options import EngineOptions
from kvarn.errors import ConfigError

if TYPE_CHECKING:
    from kvarn.server.ray.settings import RayConfig


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Where the server runs, and between how many replicas; those that are not given leave the default."""

    address: Annotated[
        str, typer.Option(metavar="auto|local|HOST:PORT", help="The Ray cluster; local: one of this machine alone.")
    ] = "auto"
    detach: Annotated[bool, typer.Option("--detach", help="Return once it answers, and leave it running.")] = False
    min_replicas: Annotated[int | None, typer.Option(metavar="N", help="Of each model. [default: 1]")] = None
    max_replicas: Annotated[int | None, typer.Option(metavar="N", help="Of each model. [default: 1]")] = None
    target_waiting: Annotated[
        float | None, typer.Option(metavar="X", help="Requests in one replica's queue; more adds one. [default: 4]")
    ] = None
    target_tokens: Annotated[
        float | None, typer.Option(metavar="X", help="Tokens that one has to compute; more adds one. [default: 8192]")
    ] = None
    upscale_delay: Annotated[float | None, typer.Option(metavar="S", help="Of load above. [default: 10]")] = None
    downscale_delay: Annotated[float | None, typer.Option(metavar="S", help="Of load below. [default: 300]")] = None
    ingresses: Annotated[int | None, typer.Option(metavar="N", help="Nodes that listen. [default: 1]")] = None
    cpus: Annotated[
        float | None, typer.Option(metavar="X", help="Of each replica, as Ray counts them. [default: 1]")
    ] = None
    gpus: Annotated[float | None, typer.Option(metavar="X", help="The same of GPUs. [default: 0]")] = None
    policy: Annotated[
        str | None, typer.Option(metavar="prefix|least_loaded|round_robin", help="How one is chosen. [default: prefix]")
    ] = None
    open_metrics: Annotated[bool, typer.Option("--open-metrics", help="Tell /metrics to other machines, too.")] = False

    def values(self) -> dict[str, Any]:
        """By the names of RayConfig and ScaleConfig."""
        given = {
            "min_replicas": self.min_replicas,
            "max_replicas": self.max_replicas if self.max_replicas is not None else self.min_replicas,
            "target_waiting": self.target_waiting,
            "target_tokens": self.target_tokens,
            "upscale_delay_s": self.upscale_delay,
            "downscale_delay_s": self.downscale_delay,
            "ingresses": self.ingresses,
            "cpus": self.cpus,
            "gpus": self.gpus,
            "policy": self.policy,
            "has_open_metrics": self.open_metrics or None,
        }
        return {name: value for name, value in given.items() if value is not None}


def deploy_ray(*, options: ServeOptions, engine: EngineOptions, ray: RayOptions) -> None:
    """Run the server on a Ray cluster: an ingress, and each model's engines as replicas that follow the load.

    Takes the settings of `kvarn serve`. Until SIGTERM or Ctrl-C, unless detached; logs are Ray's.

    Try: pip install "kvarn[ray]"; kvarn deploy ray --address local --model smollm2 --max-replicas 4, then ask it as any
    Kvarn server.
    """
    from kvarn.server.ray.settings import ray_needed

    config = _config(options, engine, ray)  # wrong settings are refused before the slow import
    with ray_needed():
        from kvarn.server.ray.deploy import deploy

    code = deploy(config, ray.address, detach=ray.detach)
    sys.stdout.flush()
    os._exit(code)


def _config(options: ServeOptions, engine: EngineOptions, ray: RayOptions) -> RayConfig:
    from kvarn.server.process.setting_sources import load_config
    from kvarn.server.ray.settings import RayConfig, ScaleConfig, split_values

    if options.open:
        raise ConfigError("--open opens the page of a server on this machine; open the address that is printed")
    values = options.settings() | {f"engine.{name}": value for name, value in asdict(engine).items()}
    key: str | None = values.pop("engine.cluster_key")
    server = load_config(options.config, {name: value for name, value in values.items() if value is not None})
    if server.engine.cluster_key is not None:  # of the file, or a variable
        key = key or server.engine.cluster_key
        server = replace(server, engine=replace(server.engine, cluster_key=None))
    scaling, own = split_values(ray.values())
    return RayConfig(server, ScaleConfig(**scaling), None if key is None else Path(key), **own)
