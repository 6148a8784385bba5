"""The application of Ray Serve: an ingress, and for each model a deployment of engines that scales with their load."""

from __future__ import annotations

import re
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from kvarn.server.process.settings import ServerConfig
from kvarn.server.ray.autoscaling import LoadPolicy
from kvarn.server.ray.ingress import Ingress
from kvarn.server.ray.replica import ServerReplica
from kvarn.server.ray.request_router import NamedReplicaRouter
from kvarn.server.ray.settings import GRACE_S, RayConfig, ScaleConfig, make_ray_config

APPLICATION = "kvarn"
INGRESS = "ingress"
MAX_CALLS = 1_000_000  # of one replica at a time: its engine's queue decides, not Ray
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 30.0


def make_application(config: RayConfig) -> serve.Application:
    """What `serve.run` takes; models are loaded where Ray places the replicas."""
    secret = config.secret()
    engines = [
        _engines(f"engine-{number}-{_plain(model_id)}", server, config).bind(server, secret)
        for number, (model_id, server) in enumerate(config.models)
    ]
    ingress = serve.deployment(Ingress).options(
        name=INGRESS,
        num_replicas=config.ingresses,
        max_replicas_per_node=1,
        ray_actor_options={"num_cpus": 0, "resources": _near(config.server)},
        **_common(config.drain_s + GRACE_S),
    )
    application: serve.Application = ingress.bind(config, secret, engines)
    return application


def app(settings: dict[str, Any]) -> serve.Application:
    """The same from plain values, for `serve run`, `serve deploy` and RayService: see deploy/ray/serve.yaml."""
    return make_application(make_ray_config(settings))


def _engines(name: str, server: ServerConfig, config: RayConfig) -> Any:
    scale = config.scale
    is_fixed = scale.min_replicas == scale.max_replicas
    size: dict[str, Any] = {"num_replicas": scale.min_replicas} if is_fixed else {"autoscaling_config": _scaling(scale)}
    return serve.deployment(ServerReplica).options(
        name=name,
        request_router_config=RequestRouterConfig(request_router_class=NamedReplicaRouter),
        ray_actor_options={"num_cpus": config.cpus, "num_gpus": config.gpus},
        **size,
        **_common(server.drain_timeout_s + GRACE_S),
    )


def _common(grace_s: float) -> dict[str, Any]:
    return {
        "max_ongoing_requests": MAX_CALLS,
        "graceful_shutdown_timeout_s": grace_s,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "logging_config": {"enable_access_log": False},  # our own has what a request was
    }


def _scaling(scale: ScaleConfig) -> AutoscalingConfig:
    targets = {"target_waiting": scale.target_waiting, "target_tokens": scale.target_tokens}
    return AutoscalingConfig(
        min_replicas=scale.min_replicas,
        max_replicas=scale.max_replicas,
        upscale_delay_s=scale.upscale_delay_s,
        downscale_delay_s=scale.downscale_delay_s,
        look_back_period_s=scale.look_back_s,
        policy=AutoscalingPolicy(policy_function=LoadPolicy, policy_kwargs=targets),
    )


def _near(server: ServerConfig) -> dict[str, float]:
    """An ingress that only its own machine can reach must be on this one."""
    return {f"node:{ray.util.get_node_ip_address()}": 0.001} if server.is_loopback else {}


def _plain(model_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", model_id)[:60]
