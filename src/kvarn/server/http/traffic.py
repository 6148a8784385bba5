"""Counts of all connections of one server since its start. For the event loop's thread."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Traffic:
    """Counted where it happens; exported by /metrics."""

    num_open: int = 0  # connections now, those beyond the limit not counted
    num_accepted: int = 0
    num_refused: int = 0  # connections beyond the limit
    num_evicted: int = 0  # connections that waited for their client, closed to make room
    num_dropped: int = 0  # clients that did not read
    num_received_bytes: int = 0
    num_sent_bytes: int = 0  # also what still waits for its client
    responses: Counter[int] = field(default_factory=Counter)  # by status, also those of the connections themselves
