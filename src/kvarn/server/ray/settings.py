"""How the server runs on Ray: what is offered where, and between how many replicas. Imports nothing of Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from kvarn.checks import check_setting
from kvarn.errors import ConfigError
from kvarn.routing.choice import POLICIES
from kvarn.routing.cluster_key import ClusterKey
from kvarn.server.models.catalog import model_ids
from kvarn.server.process.settings import ServerConfig, make_config, meant

MAX_REPLICAS = 512
GRACE_S = 10.0  # beside the drain itself, before Ray kills a replica that ends
# Settings of `kvarn serve` whose files or promises hold for one process: told, not ignored.
_REFUSED = {
    "uds": "the server listens on a port of each node",
    "root_path": "strip the prefix in the proxy before it",
    "batch_dir": "replicas come and go with the files in them; run `kvarn batch` against the server",
    "lora_dir": "one replica would know the adapter; name it with --lora, which all load",
}


@dataclass(frozen=True, slots=True)
class ScaleConfig:
    """Between how many replicas each model runs, and what is too much for one."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_waiting: float = 4.0  # requests in a replica's queue
    target_tokens: float = 8192.0  # that it has to compute: of prompts, and 32 for each answer that runs or waits
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    look_back_s: float = 10.0  # over which load is averaged

    def __post_init__(self) -> None:
        check_setting.integer("min_replicas", self.min_replicas, 1, MAX_REPLICAS)
        check_setting.integer("max_replicas", self.max_replicas, 1, MAX_REPLICAS)
        check_setting.number("target_waiting", self.target_waiting, 0.01, 1e6)
        check_setting.number("target_tokens", self.target_tokens, 1.0, 1e9)
        for name in ("upscale_delay_s", "downscale_delay_s"):
            check_setting.number(name, getattr(self, name), 0.0, 86_400.0)
        check_setting.number("look_back_s", self.look_back_s, 0.5, 3600.0)
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas is {self.max_replicas} and min_replicas {self.min_replicas}; give at least as many"
            )


@dataclass(frozen=True, slots=True)
class RayConfig:
    """One application: an ingress on each of some nodes, and a deployment of engines for each model."""

    server: ServerConfig = field(default_factory=lambda: ServerConfig(host="127.0.0.1"))
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    cluster_key: Path | None = None  # None: a secret is drawn for this deployment
    policy: str = "prefix"
    ingresses: int = 1  # nodes that listen
    cpus: float = 1.0  # of each engine, as Ray counts them
    gpus: float = 0.0
    has_open_metrics: bool = False

    def __post_init__(self) -> None:
        check_setting.one_of("policy", self.policy, tuple(POLICIES))
        check_setting.integer("ingresses", self.ingresses, 1, MAX_REPLICAS)
        check_setting.number("cpus", self.cpus, 0.0, 4096.0)
        check_setting.number("gpus", self.gpus, 0.0, 1024.0)
        default = ServerConfig()
        for name, remedy in _REFUSED.items():
            if getattr(self.server, name) != getattr(default, name):
                raise ConfigError(f"{name} is set, which a server on Ray does not have; {remedy}")
        if self.ingresses > 1 and self.server.port == 0:
            raise ConfigError(f"port is 0 with {self.ingresses} ingresses; clients need one port on every node")
        if self.server.engine.cluster_key is not None:
            raise ConfigError("engine.cluster_key is set; give --cluster-key, which reaches every replica")

    @property
    def models(self) -> tuple[tuple[str, ServerConfig], ...]:
        """Each model with the settings of its replicas; adapters belong to the first."""
        named = list(model_ids(self.server.models).items())
        each = [(model_id, replace(self.server, models=(f"{model_id}={name}",), pinned=())) for model_id, name in named]
        return (each[0], *((model_id, replace(config, loras=())) for model_id, config in each[1:]))

    @property
    def drain_s(self) -> float:
        """How long what runs may go on when a replica ends."""
        return self.server.drain_delay_s + self.server.drain_timeout_s

    def secret(self) -> bytes:
        """What the replicas of this deployment and its ingresses share."""
        if self.cluster_key is None:
            return token_hex(32).encode()
        ClusterKey.read(self.cluster_key)  # refuses what is none
        return self.cluster_key.read_bytes().strip()


_SCALING = frozenset(one.name for one in fields(ScaleConfig))
_OWN = frozenset(one.name for one in fields(RayConfig)) - {"server", "scale"}


def make_ray_config(values: Mapping[str, Any]) -> RayConfig:
    """From plain values by name, as they come from YAML: those of the server, of scaling and of Ray in one table."""
    scaling, rest = split_values(values)
    own = {name: rest.pop(name) for name in list(rest) if name in _OWN}
    serving = {one.name for one in fields(ServerConfig)}
    if unknown := sorted(set(rest) - serving):
        raise ConfigError(f"there is no setting {unknown[0]!r:.60}; {meant(unknown[0], _SCALING | _OWN | serving)}")
    if isinstance(own.get("cluster_key"), str):
        own["cluster_key"] = Path(own["cluster_key"]).expanduser()
    return RayConfig(make_config(rest), ScaleConfig(**scaling), **own)


def split_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of ScaleConfig, and the others."""
    scaling = {name: value for name, value in values.items() if name in _SCALING}
    return scaling, {name: value for name, value in values.items() if name not in _SCALING}


@contextmanager
def ray_needed() -> Iterator[None]:
    """ConfigError where Ray Serve cannot be imported in the block."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f'Ray Serve is not installed here ({error}); run: pip install "kvarn[ray]", on every node of the cluster'
        ) from None
