"""Ray Serve's part of routing: hands each call to the replica that was chosen before, and tells who the replicas are.

The choice is the router library's (kvarn.routing), made in the ingress with the body at hand.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from kvarn.server.ray.exchange import ReplicaGone
from kvarn.server.ray.membership import MembershipWatch


class NamedReplicaRouter(RequestRouter):  # type: ignore[misc]  # types of Ray are not read
    """Lives in the process of an ingress, in a thread of Ray's. Calls have `replica=NAME` or `watch=`."""

    _watch: MembershipWatch | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one that is named; a call for one that has left fails at once instead of waiting for it."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        asked: dict[str, Any] = pending_request.kwargs
        if (watch := asked.get("watch")) is not None:
            self._watch = watch
            self._tell()
            return [candidate_replicas]
        named = [one for one in candidate_replicas if name_of(one) == asked["replica"]]
        if not named and not pending_request.future.done():
            pending_request.future.set_exception(ReplicaGone(asked["replica"]))
        return [named or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray when the set of replicas changes."""
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        if self._watch is not None:
            self._watch([name_of(one) for one in self.curr_replicas.values()])


def name_of(replica: RunningReplica) -> str:
    """Unique among all replicas that ever run."""
    name: str = replica.replica_id.unique_id
    return name
