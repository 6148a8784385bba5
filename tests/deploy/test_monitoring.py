"""Alerts fire when they should and are silent else; every metric that is used exists in a running server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.charting import CHART, ROOT, WHY, yaml
from tests.server.routed import RouterProcess, cluster_files, replica

RULES = CHART / "files" / "rules.yaml"
TESTS = Path(__file__).parent / "rules_test.yaml"
METRIC = re.compile(r"\b(?:kvarn|process)_[a-z0-9_]+")
USERS = [RULES, CHART / "files" / "board.json", CHART / "templates" / "autoscaling.yaml"]


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in /metrics of a server and of a router that nobody has asked anything."""
    model, key = cluster_files(tmp_path_factory.mktemp("model"))
    with replica(model, key) as server, RouterProcess(key, [server.url]) as router:
        lines = [line for one in (server, router) for line in _metrics(one.url).splitlines()]
    return {re.split(r"[{ ]", line, maxsplit=1)[0] for line in lines if line and not line.startswith("#")}


def _metrics(url: str) -> str:
    return httpx.get(url + "/metrics", trust_env=False).text


@pytest.mark.parametrize("path", USERS, ids=lambda path: path.name)
def test_every_metric_that_is_used_exists(path: Path, exposed: set[str]) -> None:
    used = set(METRIC.findall(path.read_text(encoding="utf-8")))
    assert used
    assert not used - exposed


def test_every_alert_fires_and_is_silent_as_its_tests_say(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip(f"promtool {WHY}")
    for path in (RULES, TESTS):
        shutil.copy(path, tmp_path)
    for command in (["check", "rules", RULES.name], ["test", "rules", TESTS.name]):
        done = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_that_fires_and_one_that_is_silent() -> None:
    alerts = {rule["alert"] for group in _yaml(RULES)["groups"] for rule in group["rules"]}
    silent, firing = set(), set()
    for test in _yaml(TESTS)["tests"]:
        silent |= {one["alertname"] for one in test.get("alert_rule_test", ()) if not one["exp_alerts"]}
        for one in test.get("promql_expr_test", ()):
            firing |= set(
                re.findall(
                    r'alertname="(\w+)"', json.dumps([s["labels"] for s in one["exp_samples"]]).replace("\\", "")
                )
            )
    assert firing == alerts
    assert silent == alerts


def test_the_board_is_whole() -> None:
    board = json.loads((CHART / "files" / "board.json").read_text(encoding="utf-8"))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) >= 10
    assert all(target["expr"] for panel in board["panels"] for target in panel["targets"])


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_the_dockerfiles_have_no_fault_that_a_linter_finds(name: str) -> None:
    linter = shutil.which("hadolint") or str(ROOT / ".venv" / "bin" / "hadolint")
    if not Path(linter).exists():
        pytest.skip(f"hadolint {WHY}")
    done = subprocess.run([linter, str(ROOT / "deploy" / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (ROOT / "deploy" / name).read_text(encoding="utf-8")
    assert re.search(r"^USER [1-9][0-9]+:[1-9][0-9]+$", text, re.MULTILINE)


def _yaml(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded
