"""How many replicas a model needs: by the requests in their queues and the tokens they have to compute.

Runs in Ray's controller, which reads the figures of every replica (ServerReplica.record_autoscaling_stats), averages
them over look_back_s, waits for the delays and keeps the bounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class LoadPolicy:
    """Called by Ray with its AutoscalingContext."""

    def __init__(self, target_waiting: float, target_tokens: float) -> None:
        self._target_waiting = target_waiting
        self._target_tokens = target_tokens

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """As many replicas as bring the busier of the two figures to its target; Ray rounds up."""
        told = context.aggregated_metrics or {}
        if not told.get("tokens"):  # nobody has told anything yet
            return context.target_num_replicas, {}
        waiting, tokens = _total(told.get("waiting", {}).values()), _total(told["tokens"].values())
        return max(waiting / self._target_waiting, tokens / self._target_tokens), {}


def _total(values: Iterable[float | None]) -> float:
    return sum(value for value in values if value is not None)
