"""The numbers of a server as Prometheus reads them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.server.process import ServerProcess

Scrape = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(server: ServerProcess, **options: object) -> Scrape:
    """options: of the HTTP client."""
    with server.client(**options) as http:
        response = http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def read(found: Scrape, name: str, **labels: str) -> float:
    """The sum of all series of a name that have these labels."""
    return sum(value for (one, have), value in found.items() if one == name and labels.items() <= dict(have).items())
