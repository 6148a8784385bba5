"""Reading /v1/live in tests."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx


def frames(http: httpx.Client) -> Iterator[dict[str, Any]]:
    """The events of the stream."""
    with http.stream("GET", "/v1/live") as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def counts_of(kv: dict[str, Any]) -> Counter[str]:
    """How many blocks of each state the map has."""
    counts: Counter[str] = Counter()
    for letter, length in re.findall(r"([a-z])(\d+)", kv["map"]):
        counts[letter] += int(length)
    return counts
