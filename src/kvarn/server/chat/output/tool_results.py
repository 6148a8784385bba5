"""Tool results in the order of their calls: most templates write no ids, so the order is all that a model sees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """The same conversation, each run of tool results sorted as the calls were made."""
    ordered: list[Message] = []
    results: list[Message] = []
    positions: dict[object, int] = {}  # of each call, by its id
    numbers = itertools.count()
    for message in messages:
        if message.get("role") == "tool":
            results.append(message)
            continue
        ordered += _sorted(results, positions)
        results = []
        for call in message.get("tool_calls") or ():
            positions[call.get("id")] = next(numbers)
        ordered.append(message)
    return ordered + _sorted(results, positions)


def _sorted(results: Sequence[Message], positions: Mapping[object, int]) -> list[Message]:
    """One whose call is unknown stays behind the others."""
    return sorted(results, key=lambda result: positions.get(result.get("tool_call_id"), math.inf))
