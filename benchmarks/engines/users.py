"""What users ask of a server, as data, and what came of it: the same for us and for every peer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.engines import random_ids


@dataclass(frozen=True, slots=True)
class Users:
    """`requests` in all, `concurrency` at once: the next comes when one has ended."""

    name: str
    concurrency: int
    requests: int
    shared: int  # tokens that all prompts begin with
    own: int  # tokens after those
    answer: int  # tokens of every answer

    def resized(self, requests: int | None, answer: int | None) -> Users:
        """Where other numbers than the row's are wanted."""
        return replace(self, requests=requests or self.requests, answer=answer or self.answer)

    def prompts(self, seed: int = 1) -> tuple[tuple[int, ...], ...]:
        """Token ids; the same for the same seed."""
        common = random_ids(self.shared, 1000 * seed)
        return tuple((*common, *random_ids(self.own, 1000 * seed + 1 + number)) for number in range(self.requests))


USERS = {
    users.name: users
    for users in (Users("users-8", 8, 24, shared=0, own=129, answer=64), Users("shared-32", 32, 32, 400, 20, 128))
}


@dataclass
class Answer:
    """When the tokens of one request came, on the clock of time.perf_counter()."""

    asked_at: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0


def summary_of(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """The figures that `kvarn.bench.serve` gives for a server, for an engine in this process."""
    gaps = [later - sooner for one in answers for sooner, later in zip(one.times, one.times[1:], strict=False)]
    num_tokens = sum(one.num_tokens for one in answers)
    return {
        "completion_tokens": num_tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(num_tokens / seconds, 2),
        "first_s": round(statistics.median_low(one.times[0] - one.asked_at for one in answers), 4),
        "gap_ms": round(1000 * statistics.median_low(gaps), 2),
    }


def peak_rss_bytes(pid: int | str = "self") -> int:
    """The most memory a process has had resident."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def peak_rss_mb(pid: int | str = "self") -> float:
    """The same in MB of 10^6 bytes."""
    return round(peak_rss_bytes(pid) / 1e6, 1)
