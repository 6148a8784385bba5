"""From waiting to running: the first in the queue starts if there is room, in the place of lower ones if need be.

Knows room and rank; which request is asked, and whether it gets rows, the scheduler decides.
"""

from __future__ import annotations

from kvarn.engine.scheduling.live_requests import LiveRequests
from kvarn.engine.scheduling.plan import Draft
from kvarn.engine.scheduling.policy import Policy
from kvarn.engine.scheduling.prefix_reuse import PrefixReuse
from kvarn.request import Request


class Starter:
    """Starts requests, and takes running ones out of a step that is being planned."""

    def __init__(self, live: LiveRequests, prefix_reuse: PrefixReuse, policy: Policy, max_running: int) -> None:
        self._live = live
        self._prefix_reuse = prefix_reuse
        self._policy = policy
        self._max_running = max_running
        # The first in the queue, the free blocks it found too few, and how many ran then.
        self._refused: tuple[str, tuple[int, ...], int] | None = None

    def start(self, draft: Draft, request: Request) -> bool:
        """Move the first waiting request to the running ones, if there is room for it."""
        live, kv = self._live, self._live.kv
        if request.num_under_way:
            return False  # it was preempted, and its next token is not known yet
        if live.running and self._refused == self._room(request):
            return False  # nothing has changed since it found too few
        while len(live.running) >= self._max_running:
            if not self._displace(draft, request):
                return False
        leader = request.fork_of if request.fork_of and self._can_fork(draft, request.fork_of) else None
        if leader is None and self._prefix_reuse.waits_for_disk(request):
            live.waiting.remove(request)
            return False
        num_computed = self._prefix_reuse.take_over(request, leader)
        if self._prefix_reuse.is_being_computed(request, num_computed, self._computing(draft)):
            kv.release(request.id)
            return False
        if not self._make_room(draft, request, num_computed):
            kv.release(request.id)
            self._refused = self._room(request)
            return False
        live.waiting.remove(request)
        self.run(request, num_computed)
        return True

    def is_closed_to(self, request: Request | None) -> bool:
        """Whether the first in the queue would not start now, as is known without trying; None: nobody waits."""
        live = self._live
        if request is None or (live.running and self._refused == self._room(request)):
            return True
        is_full = len(live.running) >= self._max_running
        return is_full and not self._policy.may_displace(request, self._policy.victim(live.running.values()))

    def run(self, request: Request, num_computed: int) -> None:
        """Run a request whose first num_computed tokens lie in the cache."""
        self.forget_refusal()
        if request.started_at is None:
            self._prefix_reuse.count(request, num_computed)
        self._live.start(request, num_computed)

    def forget_refusal(self) -> None:
        """There are others, or other priorities, among those that run: the first in the queue may displace one now."""
        self._refused = None

    def drop(self, draft: Draft, victim: Request) -> None:
        """Preempt a running request, also in the step that is being planned."""
        draft.pop(victim.id, None)
        self._live.preempt(victim)

    def _room(self, request: Request) -> tuple[str, tuple[int, ...], int]:
        num_free = tuple([group.pool.num_free for group in self._live.kv.groups])
        return request.id, num_free, len(self._live.running)

    def _make_room(self, draft: Draft, request: Request, num_computed: int) -> bool:
        """Displace lower requests until it fits; none of them if that would not be enough."""
        allocation, running = self._live.allocation, self._live.running
        if allocation.fits(request, num_computed, running.values()):
            return True
        lower = [other for other in running.values() if self._policy.may_displace(request, other)]
        staying = [other for other in running.values() if other not in lower]
        if not allocation.fits(request, num_computed, staying, leaving=lower):
            return False
        while not allocation.fits(request, num_computed, running.values()):
            if not self._displace(draft, request):
                return False
        return True

    def _displace(self, draft: Draft, request: Request) -> bool:
        """Make room for a waiting request by preempting a lower one, if there is one."""
        if not self._live.running:
            return False
        victim = self._policy.victim(self._live.running.values())
        if not self._policy.may_displace(request, victim):
            return False
        self.drop(draft, victim)
        return True

    def _can_fork(self, draft: Draft, leader: Request) -> bool:
        """A pending block copy would be lost if its leader were dropped from the draft: do not fork such a leader."""
        return leader.id in self._live.running and not (leader.id in draft and draft[leader.id].copies)

    def _computing(self, draft: Draft) -> list[Request]:
        """The requests whose rows this step computes, as far as it is planned."""
        planned, chunk = [entry.span.request for entry in draft.values()], self._live.layerwise.chunk
        return planned if chunk is None else [*planned, chunk.request]
