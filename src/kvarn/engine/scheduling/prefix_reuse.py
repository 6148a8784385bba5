"""Blocks that a request need not compute: those of the request it forks, or of any other with the same prefix.

Knows tokens and salts; does not know which requests run.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvarn.engine.persistence.disk_prefixes import DiskPrefixes
from kvarn.engine.persistence.restores import Restores
from kvarn.kv.cache import KVCache
from kvarn.request import Request


class PrefixReuse:
    """Finds computed blocks for requests that start, and publishes theirs."""

    def __init__(self, kv: KVCache, *, finds_prefixes: bool) -> None:
        self.num_hit_tokens = 0
        self.num_query_tokens = 0
        self.disk: DiskPrefixes | None = None
        self.restores = Restores(kv)
        self._kv = kv
        self.finds_prefixes = finds_prefixes
        if kv.states is not None:
            kv.states.keeps_snapshots = finds_prefixes

    def keep_on(self, disk: DiskPrefixes) -> None:
        """Keep on disk what is used again, and find it there."""
        self.disk = self.restores.disk = disk

    def count(self, request: Request, num_computed: int) -> None:
        """A request starts for the first time, with num_computed tokens taken over."""
        self.num_hit_tokens += num_computed
        if num_computed > 0 or self.may_share(request):
            self.num_query_tokens += request.num_prompt

    def may_share(self, request: Request) -> bool:
        """Whether it may use prefixes that others computed."""
        return self.finds_prefixes and request.params.reuse_cache and not request.wants_prompt_logprobs

    def take_over(self, request: Request, leader: Request | None) -> int:
        """Share the blocks others have computed for the same tokens; how many tokens that is.

        leader: the request it may fork, if that is running and has no pending block copy.
        """
        num_shared = request.num_prompt - 1
        is_new = request.num_output == 0 and request.num_preemptions == 0
        is_computed = leader is not None and is_new and 0 < num_shared <= leader.num_computed
        if leader is not None and is_computed and self._kv.can_fork(leader.id, num_shared):
            self._kv.fork(request.id, leader.id, num_shared)
            return num_shared
        if not self.may_share(request):
            return 0
        hit = self._kv.lookup(request.token_ids, request.prefix_salt)
        if hit.num_matched:
            self._kv.fork(request.id, hit)
            if self.disk is not None:
                self.disk.used(hit)
        return hit.num_tokens

    def waits_for_disk(self, request: Request) -> bool:
        """Whether a request that would start is held instead, because its prefix is on disk."""
        return self.may_share(request) and self.restores.takes(request)

    def is_being_computed(self, request: Request, num_computed: int, others: Iterable[Request]) -> bool:
        """Whether another request computes this one's next block in this very step: waiting for it saves the work."""
        end = num_computed + self._kv.block_size
        if not self.may_share(request) or end >= len(request.token_ids):
            return False
        wanted, last = request.token_ids[:end], request.token_ids[end - 1]
        alike = [
            one for one in others if one.num_computed < end <= len(one.token_ids) and one.token_ids[end - 1] == last
        ]
        return any(other.prefix_salt == request.prefix_salt and other.token_ids[:end] == wanted for other in alike)

    def publish(self, request: Request) -> None:
        """Publish the blocks that the request has computed, and free those that it will not read again."""
        if self.finds_prefixes:
            is_decoding = request.num_computed > request.num_prompt
            self._kv.publish(
                request.id, request.token_ids, request.prefix_salt, request.num_computed, is_decoding=is_decoding
            )
            if request.prefix_marks and request.num_computed >= request.num_prompt:
                marks, request.prefix_marks = request.prefix_marks, ()
                self._kv.name_texts(request.id, request.num_prompt, marks)
        self._kv.advance(request.id, request.num_computed)
