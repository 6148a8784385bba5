"""Reading a stream of server-sent events as a client does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

DONE = "[DONE]"


def events(response: httpx.Response) -> Iterator[Any]:
    """The data of each event, parsed; the text [DONE] as it is. Comments are skipped."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield DONE if data == DONE else json.loads(data)
