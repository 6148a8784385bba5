"""The Helm chart: lint, the API's schemas, what a pod must have, and wrong values refused by name. No cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.deploy.charting import CHART, VALUES, WHY, helm, of_kind, pod_of, rendered, values_of

VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
OPEN = {"keys": {"insecure": True}}
# Definitions that are not in Kubernetes itself: models made of those of KEDA 2.16 and of Prometheus's operator 0.80.
CUSTOM = {
    "ServiceMonitor": "prometheus_operator.v1",
    "PrometheusRule": "prometheus_operator.v1",
    "ScaledObject": "keda.v1alpha1",
}


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_strict_lint_has_nothing_to_say(path: Path) -> None:
    for version in ("v1.30.0", "v1.37.0"):
        report = helm.lint(str(CHART), values_of(path), strict=True, kube_version=version)
        assert report["total_charts_linted"] == 1
        assert (report["messages"], report["errors"]) == ([], [])


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_every_object_is_valid_for_every_version(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason=f"kubernetes-validate {WHY}")
    objects = rendered(values_of(path))
    assert len(objects) >= 6
    for one in objects:
        if one["kind"] in CUSTOM:
            model_of(one["kind"]).model_validate(one, extra="forbid")
            continue
        for version in VERSIONS:
            validate.validate(one, version, strict=True)


def model_of(kind: str) -> Any:
    """The model of a custom resource."""
    module = pytest.importorskip(f"cloudcoil.models.{CUSTOM[kind]}", reason=f"cloudcoil {WHY}")
    return getattr(module, kind)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("ScaledObject", {"triggers": [{"type": "prometheus", "metadata": {"threshold": 4}}]}, "threshold"),
        ("ScaledObject", {"maxReplicas": 4}, "maxReplicas"),
        ("ServiceMonitor", {"endpoints": [{"port": "http", "interval": "often"}]}, "interval"),
        ("PrometheusRule", {"groups": [{"name": "a", "rules": [{"alert": "A", "for": "5m"}]}]}, "expr"),
    ],
)
def test_wrong_custom_resources_are_refused(kind: str, change: dict[str, Any], words: str) -> None:
    objects = [one for path in VALUES for one in rendered(values_of(path)) if one["kind"] == kind]
    wrong = objects[0] | {"spec": objects[0]["spec"] | change}
    with pytest.raises(ValueError, match=words):
        model_of(kind).model_validate(wrong, extra="forbid")


@settings(max_examples=40)
@given(pre_stop=st.integers(0, 600), delay=st.integers(0, 3600), timeout=st.integers(0, 86_400))
def test_the_grace_period_is_longer_than_all_that_a_server_may_take(pre_stop: int, delay: int, timeout: int) -> None:
    drain = {"preStopSeconds": pre_stop, "delaySeconds": delay, "timeoutSeconds": timeout}
    pod = pod_of(rendered(OPEN | {"drain": drain}))
    (server,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] > pre_stop + delay + timeout + 5
    assert server["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(pre_stop)]
    assert {f"--drain-delay={delay}", f"--drain-timeout={timeout}"} <= set(server["args"])


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_no_container_may_do_more_than_it_must(path: Path) -> None:
    for one in rendered(values_of(path)):
        if one["kind"] != "Deployment":
            continue
        pod = one["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]


def test_the_three_probes_ask_three_questions() -> None:
    (server,) = pod_of(rendered(OPEN))["containers"]
    probes = {name: server[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/health/startup", "liveness": "/health/live", "readiness": "/health/ready"}
    assert server["startupProbe"]["periodSeconds"] * server["startupProbe"]["failureThreshold"] >= 600


def test_a_changed_config_restarts_pods_and_changed_keys_do_not() -> None:
    def checksum(**values: Any) -> str:
        metadata = of_kind(rendered(values), "Deployment")["spec"]["template"]["metadata"]
        found: str = metadata["annotations"]["checksum/config"]
        return found

    one, other = {"keys": {"toml": "# one"}}, {"keys": {"toml": "# other"}}
    assert checksum(**one) == checksum(**other)
    assert checksum(**one) != checksum(**one, config="[tiers.free]\nconcurrency = 1\n")


def test_every_model_is_pulled_before_the_server_starts() -> None:
    pod = pod_of(rendered(OPEN | {"models": ["smollm2", "fast=hf:org/repo"]}))
    assert [one["args"] for one in pod["initContainers"]] == [["pull", "smollm2"], ["pull", "hf:org/repo"]]
    assert "--model=fast=hf:org/repo" in pod["containers"][0]["args"]


def test_limits_of_the_charts_own_redis_reach_the_server() -> None:
    objects = rendered(OPEN | {"redis": {"enabled": True}})
    (server,) = pod_of(objects)["containers"]
    assert {"name": "KVARN_SERVER_LIMITS", "value": "redis://demo-redis:6379/0"} in server["env"]
    assert of_kind(objects, "Service", "demo-redis")["spec"]["ports"][0]["port"] == 6379


def test_routers_find_the_pods_and_are_what_clients_reach() -> None:
    objects = rendered(OPEN | {"router": {"enabled": True, "clusterKeySecret": "secret"}})
    labels = {
        kind: of_kind(objects, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
        for kind, name in (("server", "demo"), ("router", "demo-router"))
    }

    def selects(selector: dict[str, str]) -> set[str]:
        return {kind for kind, has in labels.items() if selector.items() <= has.items()}

    replicas, clients = of_kind(objects, "Service", "demo-replicas"), of_kind(objects, "Service")
    assert replicas["spec"]["clusterIP"] == "None"
    assert (selects(replicas["spec"]["selector"]), selects(clients["spec"]["selector"])) == ({"server"}, {"router"})
    for name, kind in (("demo", "server"), ("demo-router", "router")):
        for where in ("PodDisruptionBudget", "Deployment"):
            assert selects(of_kind(objects, where, name)["spec"]["selector"]["matchLabels"]) == {kind}
        assert selects(of_kind(objects, "NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"]) == {kind}
    admitted = of_kind(objects, "NetworkPolicy")["spec"]["ingress"][-1]["from"][0]["podSelector"]["matchLabels"]
    assert selects(admitted) == {"router"}
    (router,) = of_kind(objects, "Deployment", "demo-router")["spec"]["template"]["spec"]["containers"]
    (server,) = pod_of(objects)["containers"]
    assert "--discover=http://demo-replicas.ai:8000" in router["args"]
    assert "--cluster-key=/etc/kvarn/cluster/cluster.key" in {*router["args"]} & {*server["args"]}
    given = route_options(router["args"][1:])
    assert (given.discover, given.max_replicas) == ("http://demo-replicas.ai:8000", 64)


@pytest.mark.parametrize("has_routers", [False, True])
def test_every_pod_is_scraped_once_and_prometheus_may_reach_it(has_routers: bool) -> None:
    metrics = {"serviceMonitor": True, "interval": "7s"}
    routers = {"router": {"enabled": has_routers, "clusterKeySecret": "secret"}}
    objects = rendered(OPEN | {"metrics": metrics, "redis": {"enabled": True}} | routers)
    wanted = of_kind(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
    scraped = [
        one["spec"]["selector"]
        for one in objects
        if one["kind"] == "Service" and wanted <= one["metadata"]["labels"].items()
    ]
    for name in ("demo", "demo-router") if has_routers else ("demo",):
        pod = of_kind(objects, "Deployment", name)["spec"]["template"]
        labels = pod["metadata"]["labels"].items()
        assert [selector.items() <= labels for selector in scraped].count(True) == 1
        assert "http" in {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
        admitted = of_kind(objects, "NetworkPolicy", name)["spec"]["ingress"]
        assert "kubernetes.io/metadata.name" in str(admitted)
    assert len(scraped) == 1 + has_routers  # not Redis, which has no such page


def route_options(args: list[str]) -> Any:
    """What `kvarn route` makes of arguments."""
    from typer.testing import CliRunner

    from kvarn.cli.main import app
    from kvarn.server.router import process

    taken = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "route", lambda config: taken.append(config) or 0)
        patch.setattr("os._exit", lambda _: None)
        result = CliRunner().invoke(app, ["route", *args])
    assert result.exit_code == 0, result.output
    return taken[0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (OPEN | {"router": {"enabled": True}}, "router.clusterKeySecret"),
        (OPEN | {"router": {"enabled": True, "clusterKey": "x"}}, "clusterKey"),
        ({}, "give existingSecret or toml"),
        ({"keys": {"insecure": True, "toml": "x"}}, "choose one"),
        (OPEN | {"replicas": 3}, "replicas"),
        (OPEN | {"replicaCount": "two"}, "replicaCount"),
        (OPEN | {"drain": {"timeout": 5}}, "timeout"),
        (OPEN | {"drain": {"timeoutSeconds": -1}}, "timeoutSeconds"),
        (OPEN | {"limits": {"url": "http://redis"}}, "url"),
        (OPEN | {"limits": {"whenAway": "open"}}, "whenAway"),
        (OPEN | {"modelCache": {"type": "pvc", "size": "large"}}, "size"),
        (OPEN | {"modelCache": {"type": "existing"}}, "existingClaim"),
        (OPEN | {"models": []}, "models"),
        (OPEN | {"autoscaling": {"enabled": True, "minReplicas": 9, "maxReplicas": 2}}, "minReplicas"),
        (OPEN | {"ingress": {"enabled": True}}, "ingress.host"),
        ({"keys": {"toml": "x"}, "metrics": {"serviceMonitor": True}}, "metrics.keySecret.name"),
        (OPEN | {"redis": {"enabled": True}, "limits": {"url": "redis://other"}}, "choose one"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm.HelmError, match=words):
        rendered(values)
