"""The step: who runs, forward, choose, apply, tell. Owned by one thread at a time; holds no tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvarn.backends.protocol import Backend
from kvarn.config import EngineConfig
from kvarn.decoding.decoder import Commit, Decoder
from kvarn.engine.admission import Admission
from kvarn.engine.plan import Plan
from kvarn.engine.scheduler import Scheduler
from kvarn.engine.stream import Stream
from kvarn.errors import BackendError
from kvarn.kv.cache import KVCache
from kvarn.request import Request
from kvarn.types import SamplingParams, TokenEvent


class Engine:
    """Requests in, events out, one step at a time."""

    def __init__(
        self,
        backend: Backend,
        decoder: Decoder,
        kv: KVCache,
        *,
        stream: Stream,
        admission: Admission,
        config: EngineConfig,
    ) -> None:
        self.backend = backend
        self.decoder = decoder
        self.kv = kv
        self.stream = stream
        self.admission = admission
        self.scheduler = Scheduler(decoder, kv, config)
        self.max_batch_tokens = config.max_batch_tokens
        self._ids = itertools.count(1)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, *, starts_text: bool = False) -> Request:
        """Queue a request, or refuse it at once with the numbers."""
        request = self.admission.admit(f"r{next(self._ids)}", prompt_ids, params)
        self.stream.open(request, starts_text=starts_text)
        self.scheduler.submit(request)
        return request

    def step(self) -> list[TokenEvent]:
        """Advance every request that can run; failures end the requests of this step, not the engine."""
        events = self.reap()
        plan = self.scheduler.plan()
        if plan.is_empty:
            return events
        try:
            commits = self._compute(plan)
        except Exception as error:
            return events + self._fail(plan, error)
        except BaseException:  # Ctrl-C: as if the step had not begun
            self.scheduler.abandon(plan.spans)
            raise
        readings = self.stream.read(commits)
        self.scheduler.apply([r.commit for r in readings], [r.finish for r in readings])
        return events + self.stream.events(readings)

    def reap(self) -> list[TokenEvent]:
        """End cancelled requests and free their blocks."""
        return self.stream.end(self.scheduler.reap_cancelled())

    def _compute(self, plan: Plan) -> list[Commit]:
        assert plan.batch is not None
        if plan.copies:
            self.backend.copy_blocks(plan.copies)
        hidden = self.backend.forward(plan.batch)
        return self.decoder.commit(plan.spans, hidden)

    def _fail(self, plan: Plan, error: Exception) -> list[TokenEvent]:
        requests = [span.request for span in plan.spans]
        for request in requests:
            failure = BackendError(f"the {self.backend.name} backend failed: {error or type(error).__name__}")
            failure.__cause__ = error
            self.scheduler.fail(request, failure)
        return self.stream.end(requests)
