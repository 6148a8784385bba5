"""What a request need not compute itself: the blocks of the one it forks, or of anybody who had the same tokens.

Knows tokens and tenants; does not know who runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvarn.kv.cache import KVCache
from kvarn.request import Request


class PrefixReuse:
    """Finds computed blocks for requests that start, and makes theirs findable."""

    def __init__(self, kv: KVCache, *, finds_prefixes: bool) -> None:
        self._kv = kv
        self._finds_prefixes = finds_prefixes

    def may_share(self, request: Request) -> bool:
        """Whether it may use prefixes that others computed."""
        return self._finds_prefixes and request.params.reuse_cache and not request.wants_prompt_logprobs

    def take_over(self, request: Request, leader: Request | None) -> int:
        """Share the blocks others have computed for the same tokens; how many tokens that is.

        leader: whom it may fork, if it is running and has no copy still to be made.
        """
        num_shared = request.num_prompt - 1
        is_new = request.num_output == 0 and request.num_preemptions == 0
        if leader is not None and is_new and 0 < num_shared <= leader.num_computed:
            self._kv.fork(request.id, leader.id, num_shared)
            return num_shared
        if not self.may_share(request):
            return 0
        hit = self._kv.lookup(request.token_ids, request.tenant)
        if hit.num_tokens:
            self._kv.fork(request.id, hit)
        return hit.num_tokens

    def is_being_computed(self, request: Request, num_computed: int, others: Iterable[Request]) -> bool:
        """Whether one of the others computes the request's next block in this very step: it pays to wait for that."""
        end = num_computed + self._kv.block_size
        if not self.may_share(request) or end >= len(request.token_ids):
            return False
        wanted = request.token_ids[:end]
        return any(
            other.num_computed < end and other.tenant == request.tenant and other.token_ids[:end] == wanted
            for other in others
        )

    def publish(self, request: Request) -> None:
        """Let others find what the request has computed."""
        if self._finds_prefixes:
            self._kv.publish(request.id, request.token_ids, request.tenant, request.num_computed)
