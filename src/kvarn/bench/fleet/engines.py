"""Replicas whose scheduler is the real one: an Engine over a backend that computes nothing and takes simulated time.

For fleets of a few, and to fit the model of replicas.py: what a token costs here is what it costs there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import Batch, KVLayout, Sampled, SampleRows
from kvarn.backends.fake import FakeBackend
from kvarn.bench.fleet.replicas import Job, ReplicaShape
from kvarn.config import EngineConfig
from kvarn.decoding.autoregressive import AutoregressiveDecoder
from kvarn.decoding.sampling_state import SamplingDefaults
from kvarn.engine.admission import Admission
from kvarn.engine.engine import Engine
from kvarn.engine.stream import Stream
from kvarn.engine.submission import Submission
from kvarn.request import Request
from kvarn.routing.feed import ReplicaLoad
from kvarn.types import SamplingParams

VOCABULARY = 2**31 - 1
Int32 = npt.NDArray[np.int32]


class EchoBackend(FakeBackend):
    """Says the last token again: an answer as the prompt of the next turn has it."""

    def compute(self, batch: Batch) -> npt.NDArray[np.float32]:
        last: npt.NDArray[np.float32] = batch.token_ids[batch.output_rows].astype(np.int32).view(np.float32)
        return last.reshape(-1, 1)  # tokens in the place of logits

    def sample(self, hidden: npt.NDArray[np.float32], rows: SampleRows) -> Sampled:
        ids: Int32 = np.ascontiguousarray(hidden[rows.rows, 0]).view(np.int32)
        zeros, none = np.zeros(len(ids), np.float32), np.zeros((len(ids), 0))
        return Sampled(ids, zeros, zeros, none.astype(np.int32), none.astype(np.float32))


class SilentText:
    """Tokens without text."""

    def __init__(self, _starts_text: bool, _visible_ids: frozenset[int]) -> None:
        pass

    def push(self, token_id: int) -> str:  # noqa: ARG002
        return ""

    def push_all(self, token_ids: Iterable[int]) -> str:  # noqa: ARG002
        return ""

    def flush(self) -> str:
        return ""


class EngineReplica:
    """One engine with a clock of its own, which runs ahead of the fleet's by at most a step."""

    def __init__(self, shape: ReplicaShape, key: bytes) -> None:
        self._times = shape.times
        self._now = 0.0
        self._jobs: dict[str, tuple[Job, Request]] = {}
        self._engine = _make_engine(shape, key, lambda: self._now, self._spend)
        self.kv = self._engine.kv

    @property
    def load(self) -> ReplicaLoad:
        scheduler = self._engine.scheduler
        left = sum(max(0, one.num_prompt - one.num_computed) for one in scheduler.requests())
        return ReplicaLoad(left, scheduler.num_running, scheduler.num_waiting)

    @property
    def next_at(self) -> float | None:
        return self._now if self._engine.has_work else None

    def submit(self, job: Job, now: float) -> None:
        self._now = max(self._now, now)
        params = SamplingParams(max_tokens=job.request.output_tokens, temperature=0.0, ignore_eos=True)
        submission = Submission(job.request.prompt_ids, params, prefix_marks=job.prefix.marks())
        (request,) = self._engine.submit(submission)
        self._jobs[request.id] = job, request

    def advance(self, now: float) -> list[Job]:
        told = []
        while self._engine.has_work and self._now <= now:
            self._engine.step()
            for name, (job, request) in list(self._jobs.items()):
                if job.first_at is None and request.first_token_at is not None:
                    job.first_at, job.num_cached = self._now, request.num_cached or 0
                    told.append(job)
                if request.is_ended:
                    job.ended_at = self._now
                    del self._jobs[name]
                    told.append(job)
        return told

    def _spend(self, batch: Batch, share: float) -> float:
        num_rows = len(batch.context_lens)
        num_prompt = len(batch.token_ids) - num_rows
        seconds = self._times.step + self._times.row * num_rows + self._times.prompt_token * num_prompt
        self._now += seconds * share
        return seconds * share


def _make_engine(
    shape: ReplicaShape, key: bytes, clock: Callable[[], float], spend: Callable[[Batch, float], float]
) -> Engine:
    config = EngineConfig(
        block_size=shape.block_size, max_batch_tokens=shape.times.max_batch_tokens, max_running=shape.max_running
    )
    backend = EchoBackend(on_forward=spend)
    layout = KVLayout(shape.block_size, ((1, 8),))
    backend.reserve_kv(layout, shape.num_blocks * layout.block_bytes)
    kv = shape.cache(key)
    decoder = AutoregressiveDecoder(backend, VOCABULARY, (), SamplingDefaults(), clock=clock)
    admission = Admission(VOCABULARY, kv.max_tokens, decoder, kv)
    stream = Stream(SilentText, ())
    return Engine(backend, decoder, kv, stream=stream, admission=admission, config=config, clock=clock)
