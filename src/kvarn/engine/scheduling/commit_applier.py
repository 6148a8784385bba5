"""What a step gave becomes state: tokens of requests, blocks that others may find, forks that start, ends."""

from __future__ import annotations

from collections.abc import Iterable

from kvarn.decoding.decoder import Commit
from kvarn.engine.launching.decode_rows import PlainTokens
from kvarn.engine.scheduling.live_requests import LiveRequests
from kvarn.engine.scheduling.prefix_reuse import PrefixReuse
from kvarn.engine.scheduling.starter import Starter


class CommitApplier:
    """Applies commits to live requests."""

    def __init__(self, live: LiveRequests, prefix_reuse: PrefixReuse, starter: Starter, max_running: int) -> None:
        self._live = live
        self._prefix_reuse = prefix_reuse
        self._starter = starter
        self._max_running = max_running

    def apply(self, commits: Iterable[Commit]) -> None:
        """Tokens, publishable blocks, then ends, whose blocks are freed."""
        for commit in commits:
            request = commit.request
            if commit.error is not None:
                request.fail(commit.error)
                self._live.remove(request, forget_blocks=True)  # whatever it computed may be damaged
                continue
            self._apply(commit)
            if request.num_computed >= request.num_prompt:
                for follower in self._live.start_forks(request, self._max_running):
                    self._starter.run(follower, request.num_prompt - 1)
            if commit.finish is not None:
                request.finish(commit.finish)
                self._live.remove(request)

    def append(self, plain: PlainTokens) -> None:
        """One more token for each, and the blocks that are full with it."""
        block_size = self._live.kv.block_size
        for request, token_id in zip(plain.requests, plain.token_ids, strict=True):
            request.num_computed += 1
            request.token_ids.append(token_id)  # as Request.append(): none is the first of an answer
            if request.num_computed % block_size == 0:
                self._prefix_reuse.publish(request)

    def _apply(self, commit: Commit) -> None:
        request, live = commit.request, self._live
        live.layerwise.leave(request)
        request.num_computed += commit.num_computed
        request.prompt_logprobs.extend(commit.prompt_logprobs)
        if len(commit.tokens) > 1 and request.num_output == 0:
            request.num_first = len(commit.tokens)
        for token in commit.tokens:
            request.append(token.token_id, token.logprob)
        if request.id in live.running:  # else it was preempted with this token under way
            if commit.is_late or commit.num_rejected:
                live.kv.trim(request.id, request.num_computed + request.num_launched)
            self._prefix_reuse.publish(request)  # no further than its tokens: what was guessed wrong is never found
