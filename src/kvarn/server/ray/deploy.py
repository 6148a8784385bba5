"""`kvarn deploy ray`: put the application on a cluster, print one line when it answers, take it down at a signal."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

import ray
from ray import serve

from kvarn.errors import BackendError, ConfigError
from kvarn.server.ray.application import APPLICATION, INGRESS, make_application
from kvarn.server.ray.settings import GRACE_S, RayConfig

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOCAL = "local"
NAMESPACE = "serve"


def deploy(config: RayConfig, address: str, *, detach: bool) -> int:
    """Run the application until a signal ends it; detach: leave it running and return."""
    if detach and address == LOCAL:
        raise ConfigError("--detach is given with --address local, a cluster that ends with this process; start one")
    connect(address)
    try:
        ended = threading.Event()
        for one in SIGNALS:  # after Ray has set its own
            signal.signal(one, lambda _number, _frame: ended.set())
        print(f"kvarn: {start(config)}", flush=True)
        if not detach:
            ended.wait()
            for one in SIGNALS:
                signal.signal(one, _leave)
            stop(config)
    finally:
        ray.shutdown()
    return 0


def connect(address: str) -> None:
    """Join a cluster; "local" starts one of this machine alone."""
    try:
        if address == LOCAL:
            ray.init(namespace=NAMESPACE, logging_level=logging.WARNING, include_dashboard=False)
        else:
            ray.init(address, namespace=NAMESPACE, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address!r}: {str(error).splitlines()[0]:.200}; start one with "
            f"`ray start --head`, or give --address {LOCAL} for one of this machine alone"
        ) from None


def start(config: RayConfig) -> str:
    """Deploy, wait until every model can be asked, and tell where."""
    serve.start(proxy_location="Disabled")  # the ingress has its own sockets
    try:
        handle = serve.run(make_application(config), name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        raise BackendError(f"the application did not start: {error}; `serve status` and Ray's logs say more") from None
    where: str = handle.address.remote().result()
    return f"serving {', '.join(model_id for model_id, _ in config.models)} on {where}"


def stop(config: RayConfig) -> None:
    """Drain the ingresses first, so that no request finds engines that are leaving; then everything."""
    try:
        ingresses = serve.get_deployment_handle(INGRESS, APPLICATION)
        ingresses.broadcast("drain").results(timeout_s=config.drain_s + GRACE_S)
    finally:
        serve.delete(APPLICATION)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
