"""The chart as Helm renders it, offline; skipped where its tools are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "chart"
VALUES = sorted((CHART / "values").glob("*.yaml"))
WHY = "is not installed: make chart installs it where it can"

helm = pytest.importorskip("helm_python", reason=f"helm-python-sdk {WHY}")
yaml = pytest.importorskip("yaml", reason=f"PyYAML {WHY}")


def values_of(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    """All objects; raises what Helm says of wrong values."""
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(chart.merge_values(values))
        files = chart.render(values, name="demo", namespace="ai")
    return [one for name, text in sorted(files.items()) if name.endswith(".yaml") for one in _objects(text)]


def of_kind(objects: list[dict[str, Any]], kind: str, name: str = "demo") -> dict[str, Any]:
    (found,) = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = of_kind(objects, "Deployment")["spec"]["template"]["spec"]
    return spec


def _objects(text: str) -> Iterator[dict[str, Any]]:
    yield from (one for one in yaml.safe_load_all(text) if one is not None)
