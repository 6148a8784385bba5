"""Replicas in simulated time: the real cache bookkeeping behind a model of how long prompts and answers take.

    queue ──one after the other──> prompt ──first token──> answer beside others ──> end

The model has three constants of a device (a step, a prompt's token, a running row) and two that are fitted to the real
scheduler, which engines.py runs on the same traces.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from kvarn.bench.fleet.trace import TraceRequest
from kvarn.kv.cache import KVCache
from kvarn.kv.journal import PrefixJournal
from kvarn.routing.feed import ReplicaLoad
from kvarn.routing.text_prefix import TextPrefix

RECENT = 0.2  # weight of the last prompt in the share of time that prompts take


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Seconds. The defaults are those of Llama-8B on one H200, as docs/gpu.md has them."""

    step: float = 0.0043
    prompt_token: float = 24e-6
    row: float = 33e-6
    max_batch_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """Each replica of a fleet."""

    num_blocks: int = 1024
    block_size: int = 64
    max_running: int = 128
    times: DeviceTimes = DeviceTimes()
    factor: float = 1.0  # of the time that a prompt takes, fitted to the real scheduler
    delay_s: float = 0.0  # until a first token, for steps under way; likewise

    def cache(self, key: bytes) -> KVCache:
        kv = KVCache(self.num_blocks, self.block_size, hash_key=key)
        kv.journal = PrefixJournal()
        return kv


@dataclass(slots=True, eq=False)
class Job:
    """A request at a replica, and when what happened to it."""

    request: TraceRequest
    prefix: TextPrefix
    number: int
    replica: int = 0
    routed: object = None  # the router's own note
    token_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    first_at: float | None = None
    ended_at: float | None = None


class SimulatedReplica(Protocol):
    """What the simulation needs of a replica."""

    kv: KVCache

    @property
    def load(self) -> ReplicaLoad: ...

    @property
    def next_at(self) -> float | None:
        """When something will happen; None: nothing."""

    def submit(self, job: Job, now: float) -> None: ...

    def advance(self, now: float) -> list[Job]:
        """What has got its first token, or ended, by now."""


class ModelledReplica:
    """Prompts are computed one after the other, answers side by side."""

    def __init__(self, shape: ReplicaShape, key: bytes) -> None:
        self.kv = shape.cache(key)
        self._shape = shape
        self._queue: deque[Job] = deque()
        self._prompt: tuple[float, Job] | None = None  # until when, and whose
        self._answers: list[tuple[float, int, Job]] = []  # unsorted: few
        self._prompt_share = 0.0  # of time, recently
        self._idle_since = 0.0
        self._num_queued = 0  # tokens

    @property
    def load(self) -> ReplicaLoad:
        return ReplicaLoad(self._num_queued, len(self._answers), len(self._queue))

    @property
    def next_at(self) -> float | None:
        times = [one[0] for one in self._answers]
        if self._prompt is not None:
            times.append(self._prompt[0])
        return min(times, default=None)

    def submit(self, job: Job, now: float) -> None:
        job.token_ids = job.request.prompt_ids
        self._num_queued += len(job.token_ids)
        self._queue.append(job)
        self._begin(now)

    def advance(self, now: float) -> list[Job]:
        told = []
        if self._prompt is not None and self._prompt[0] <= now:
            job = self._prompt[1]
            self._prompt = None
            self._answer(job, now)
            told.append(job)
        ended = [one for one in self._answers if one[0] <= now]
        for one in ended:
            self._answers.remove(one)
            self._end(one[2], now)
            told.append(one[2])
        self._begin(now)
        return told

    def _begin(self, now: float) -> None:
        """Compute the next prompt if none is being computed and its blocks fit."""
        if self._prompt is not None or not self._queue or len(self._answers) >= self._shape.max_running:
            return
        job, name = self._queue[0], str(self._queue[0].number)
        hit = self.kv.lookup(job.token_ids)
        if hit.num_matched:
            self.kv.fork(name, hit)
        num_new = len(job.token_ids) - hit.num_tokens
        if self.kv.extend(name, num_new + job.request.output_tokens) is None:
            self.kv.release(name)  # until an answer ends
            return
        self._queue.popleft()
        self._num_queued -= len(job.token_ids)
        job.num_cached = hit.num_tokens
        times, num_steps = self._shape.times, -(-num_new // self._shape.times.max_batch_tokens)
        seconds = num_steps * self._step_s + num_new * times.prompt_token
        self._note_share(now, num_new * times.prompt_token)
        self._prompt = now + self._shape.factor * seconds, job

    def _answer(self, job: Job, now: float) -> None:
        name, request = str(job.number), job.request
        self.kv.publish(name, job.token_ids, num_computed=len(job.token_ids))
        self.kv.name_texts(name, len(job.token_ids), job.prefix.marks())
        job.first_at = now + self._shape.delay_s
        stretched = (self._step_s + self._shape.times.row) / (1 - min(0.9, self._prompt_share))
        self._answers.append((now + request.output_tokens * stretched, job.number, job))

    def _end(self, job: Job, now: float) -> None:
        name = str(job.number)
        job.token_ids += [job.request.answer_id] * job.request.output_tokens
        self.kv.publish(name, job.token_ids)
        self.kv.release(name)
        job.token_ids, job.ended_at = [], now

    @property
    def _step_s(self) -> float:
        return self._shape.times.step + self._shape.times.row * len(self._answers)

    def _note_share(self, now: float, prompt_s: float) -> None:
        span = max(prompt_s, now - self._idle_since)
        self._prompt_share += RECENT * (prompt_s / span - self._prompt_share) if span else 0.0
        self._idle_since = now
